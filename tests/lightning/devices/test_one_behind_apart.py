"""``pipe_sgd`` with workers on a device: parameters come up while it computes."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from hybridtrain import HybridStrategy
from hybridtrain.engine.worker.device import KINDS, transfers
from hybridtrain.engine.worker.device.cuda import CudaStreams
from hybridtrain.errors import UserError
from tests.lightning.step.test_gradient_scaler import Scaled
from tests.lightning.step.test_one_update_behind import (
    EPOCHS,
    OPTIMIZERS,
    READS,
    Batches,
    Looks,
    N,
    WithValidation,
    in_plain_torch,
)
from tests.lightning.toys import Regression, distance, fit, flat
from tests.standin.device import name_it
from tests.standin.state import NAME
from tests.standin.training import fit_apart

name_it()
adamw = OPTIMIZERS["adamw"]
CLOSE = 1e-6  # the device adds up in another order


@pytest.fixture(autouse=True)
def with_small_buckets_on_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, NAME, CudaStreams)
    monkeypatch.setattr(transfers, "LEAST_BYTES", 64)


def policy(warm_up: int = 3, reads: str = "masters") -> dict[str, Any]:
    return {"name": "pipe_sgd", "warm_up": warm_up, **READS[reads]}


@pytest.mark.parametrize("warm_up", [0, 5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_on_a_device_is_ten_lines_of_plain_torch(name: str, warm_up: int) -> None:
    given = {"policy": policy(warm_up)}
    module, trainer = fit_apart(1, 6, partial(Batches, OPTIMIZERS[name]), strategy=given)
    assert trainer.global_step == EPOCHS * N // 6
    seen = [[each.cpu() for each in batch] for batch in module.seen]
    expected = in_plain_torch(OPTIMIZERS[name], seen, warm_up)
    assert float((flat(module) - expected).abs().max()) < CLOSE


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"transport_dtype": "bf16"},
    "int8": {"exchange": {"name": "gradient", "compress": "int8"}},
    "restart": {"on_failure": "restart"},  # buffers in host memory
}


@pytest.mark.parametrize("clip", [0.0, 0.1], ids=["", "clipped"])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("option", OPTIONS)
def test_workers_on_devices_give_what_workers_on_the_cpu_give(
    option: str, workers: int, clip: float
) -> None:
    module, given = partial(Regression, adamw), {"policy": policy(), **OPTIONS[option]}
    options: dict[str, Any] = {"gradient_clip_val": clip} if clip else {}
    here, _ = fit(HybridStrategy(**given), workers, 12 // workers, module, **options)
    there, trainer = fit_apart(workers, 12 // workers, module, strategy=given, **options)
    assert trainer.global_step == EPOCHS * N // 12
    assert distance(there, here) < (CLOSE if option in ("plain", "restart") else 1e-3)
    behind = trainer.strategy.run_stats()["staleness"]["histogram"]
    assert behind[1] == workers * (EPOCHS * N // 12 - 6)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("reads", READS)
def test_what_workers_read_is_the_same_on_devices(reads: str, workers: int) -> None:
    """What is not quite the masters comes from buffers in host memory."""
    module, given = partial(Regression, adamw), {"policy": policy(reads=reads)}
    here, _ = fit(HybridStrategy(**given), workers, 6, module)
    there, _ = fit_apart(workers, 6, module, strategy=given)
    assert distance(there, here) < (CLOSE if reads in ("masters", "extrapolated") else 1e-2)


PLACES = {"on the device": {}, "in host memory": {"on_failure": "restart"}}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_validation_within_an_epoch_sees_the_newest_and_changes_no_bit(
    workers: int, place: str
) -> None:
    module = partial(WithValidation, adamw)
    given = {"policy": policy(), **PLACES[place]}
    whole, _ = fit_apart(workers, 4, module, strategy=given, limit_val_batches=0)
    looks = Looks()
    options: dict[str, Any] = {"callbacks": [looks], "val_check_interval": 2}
    seen, _ = fit_apart(workers, 4, module, strategy=given, **options)
    assert torch.equal(flat(seen), flat(whole))
    assert len(looks.weights) == EPOCHS * (N // 4 // workers) // 2
    shown = [any(torch.equal(each, at) for at in looks.behind) for each in looks.weights[:-1]]
    assert all(shown), "what a validation sees is what the next step begins with"
    assert not any(torch.equal(*pair) for pair in pairwise(looks.weights))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("step", [2, 6, 8, 12])
def test_resumed_on_a_device_equals_uninterrupted_to_the_bit(
    step: int, workers: int, place: str, tmp_path: Path
) -> None:
    module, given = partial(Regression, adamw), {"policy": policy(4), **PLACES[place]}
    size = 6 // workers
    whole, _ = fit_apart(workers, size, module, strategy=given)
    keeps = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=step)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [keeps]}
    kept, _ = fit_apart(workers, size, module, strategy=given, **options)
    assert torch.equal(flat(kept), flat(whole))
    path = str(tmp_path / f"step={step}.ckpt")
    saved = torch.load(path, map_location="cpu", weights_only=True)
    read = saved["optimizer_states"][0].get("read")
    assert (read is not None) == (step > 4)
    resumed, trainer = fit_apart(workers, size, module, strategy=given, ckpt_path=path)
    assert trainer.global_step == EPOCHS * N // 6
    assert torch.equal(flat(resumed), flat(whole))


@pytest.mark.parametrize(
    ("worker", "step", "kind"), [(1, 1, "kill"), (0, 5, "kill"), (1, 9, "exception")]
)
def test_a_worker_on_a_device_that_is_restarted_leaves_no_trace(
    worker: int, step: int, kind: str
) -> None:
    module, given = partial(Regression, adamw), {"policy": policy(2), "on_failure": "restart"}
    whole, _ = fit_apart(2, 3, module, strategy=given)
    fault = [{"worker": worker, "step": step, "kind": kind}]
    again, trainer = fit_apart(2, 3, module, strategy=given | {"faults": fault})
    assert trainer.global_step == EPOCHS * N // 6
    assert torch.equal(flat(again), flat(whole))


# ---- a gradient scaler ---------------------------------------------------------------------------

OVERFLOW = 4  # the number of the step whose gradients are not finite


class Overflows(Batches):
    """On the last worker."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        last = self.global_rank == self.trainer.world_size - 1
        return loss * torch.inf if last and len(self.seen) == OVERFLOW + 1 else loss


def scaled() -> list[Scaled]:
    return [Scaled("16-mixed", NAME, torch.amp.GradScaler(NAME, init_scale=2.0**8))]


@pytest.mark.parametrize("warm_up", [0, 3, 5])
def test_a_step_that_overflows_on_a_device_is_left_out(warm_up: int) -> None:
    given = {"policy": policy(warm_up)}
    module, trainer = fit_apart(1, 6, partial(Overflows, adamw), strategy=given, plugins=scaled())
    assert trainer.global_step == EPOCHS * N // 6
    seen = [[each.cpu() for each in batch] for batch in module.seen]
    expected = in_plain_torch(adamw, seen, warm_up, left_out={OVERFLOW})
    assert float((flat(module) - expected).abs().max()) < CLOSE


@pytest.mark.parametrize("workers", [2, 3])
def test_all_leave_out_a_step_that_overflows_on_one_of_them(workers: int) -> None:
    module, given = partial(Overflows, adamw), {"policy": policy()}
    one, _ = fit_apart(1, 12, module, strategy=given, plugins=scaled())
    all_, _ = fit_apart(workers, 12 // workers, module, strategy=given, plugins=scaled())
    assert distance(all_, one) < CLOSE


# ---- user code that writes to parameters ---------------------------------------------------------


class Writes(pl.Callback):
    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, n: int
    ) -> None:
        if trainer.current_epoch == 1 and n == 1:
            module.net[0].weight.data.mul_(0.5)


@pytest.mark.parametrize("place", PLACES)
def test_a_write_within_an_epoch_is_refused(place: str) -> None:
    given = {"policy": policy(0), **PLACES[place]}
    with pytest.raises(UserError, match=r"net\.0\.weight.*in the middle of an epoch"):
        fit_apart(2, 6, partial(Regression, adamw), strategy=given, callbacks=[Writes()])


class Averaged(pl.Callback):
    """Other weights in a validation, and those of training again behind it."""

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.own = [p.detach().clone() for p in module.parameters()]
        for parameter in module.parameters():
            parameter.data.copy_(parameter * 0.5)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        for parameter, own in zip(module.parameters(), self.own, strict=True):
            parameter.data.copy_(own)


@pytest.mark.parametrize("place", PLACES)
def test_weights_may_be_swapped_in_a_validation_and_back(place: str) -> None:
    module, given = partial(WithValidation, adamw), {"policy": policy(0), **PLACES[place]}
    plain, _ = fit_apart(2, 6, module, strategy=given)
    options: dict[str, Any] = {"callbacks": [Averaged()], "val_check_interval": 2}
    swapped, _ = fit_apart(2, 6, module, strategy=given, **options)
    assert torch.equal(flat(swapped), flat(plain))
