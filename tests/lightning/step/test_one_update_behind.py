"""``pipe_sgd``: lock-step, one update behind, against ten lines of plain torch."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from hybridtrain.errors import UserError
from tests.lightning.toys import Regression, fit, flat, regression_data

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.02),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "rprop": torch.optim.Rprop,  # has no flat kernel: one tensor after the other
}
N, EPOCHS = 48, 3


def behind(warm_up: int = 0, reads: str = "masters", **options: Any) -> HybridStrategy:
    return HybridStrategy({"name": "pipe_sgd", "warm_up": warm_up, **READS[reads]}, **options)


READS: dict[str, dict[str, Any]] = {
    "masters": {},
    "extrapolated": {"extrapolate": True},
    "int8": {"compress": "int8"},
    "both": {"extrapolate": True, "compress": "int4"},
}


class Batches(Regression):
    """Keeps the mini-batches that one worker has trained on, in their order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append([each.clone() for each in batch])
        return super().training_step(batch, batch_idx)


def in_plain_torch(
    make: Any, batches: list[Any], warm_up: int, left_out: Collection[int] = ()
) -> torch.Tensor:
    """Each gradient is of the parameters of one update before, but the first of an epoch."""
    torch.manual_seed(7)
    masters, read = Regression(), Regression()
    read.load_state_dict(masters.state_dict())
    optimizer = make(masters.parameters())
    for step, (x, y) in enumerate(batches):
        if step % (N // 6) == 0 or 0 < step <= warm_up:
            read.load_state_dict(masters.state_dict())
        read.zero_grad()
        torch.nn.functional.mse_loss(read.net(x), y).backward()
        newest = {name: value.clone() for name, value in masters.state_dict().items()}
        for master, own in zip(masters.parameters(), read.parameters(), strict=True):
            master.grad = own.grad.clone()
        if step not in left_out:
            optimizer.step()
        read.load_state_dict(newest)
    return flat(masters)


@pytest.mark.parametrize("warm_up", [0, 5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_is_ten_lines_of_plain_torch(name: str, warm_up: int) -> None:
    """To the bit, but where torch steps the last elements of a parameter in another loop."""
    module, trainer = fit(behind(warm_up), 1, 6, partial(Batches, OPTIMIZERS[name]))
    assert trainer.global_step == EPOCHS * N // 6
    expected = in_plain_torch(OPTIMIZERS[name], module.seen, warm_up)
    if name == "adamw":
        assert float((flat(module) - expected).abs().max()) < 1e-6
    else:
        assert torch.equal(flat(module), expected)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_several_workers_are_one_with_a_larger_mini_batch(workers: int, clip: float) -> None:
    options: dict[str, Any] = {"gradient_clip_val": clip} if clip else {}
    module = partial(Regression, OPTIMIZERS["adamw"])
    whole, _ = fit(behind(3), 1, 12, module, **options)
    shared, trainer = fit(behind(3), workers, 12 // workers, module, **options)
    assert float((flat(shared) - flat(whole)).abs().max()) < 1e-6
    stats = trainer.strategy.run_stats()
    steps = EPOCHS * N // 12
    assert stats["updates"] == trainer.global_step == steps
    at_newest = 4 + 2  # of the warm-up and the next, and the first of both later epochs
    assert stats["staleness"]["histogram"] == {
        0: at_newest * workers,
        1: (steps - at_newest) * workers,
    }


@pytest.mark.parametrize("workers", [1, 2])
def test_two_runs_give_the_same_bits(workers: int) -> None:
    runs = [fit(behind(), workers, 4, partial(Regression, OPTIMIZERS["adamw"])) for _ in range(2)]
    assert torch.equal(flat(runs[0][0]), flat(runs[1][0]))


@pytest.mark.parametrize("workers", [1, 2])
def test_without_delay_it_is_hybrid_to_the_bit(workers: int) -> None:
    module = partial(Regression, OPTIMIZERS["adamw"])
    theirs, _ = fit("hybrid", workers, 4, module)
    ours, _ = fit(HybridStrategy({"name": "pipe_sgd", "delay": 0}), workers, 4, module)
    endless, _ = fit(behind(10**6), workers, 4, module)
    assert torch.equal(flat(ours), flat(theirs)) and torch.equal(flat(endless), flat(theirs))


# ---- what only looks at training ----------------------------------------------------------------


class Looks(pl.Callback):
    """Notes, in each validation, whether the module has what all updates have given."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.behind: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.behind.append(flat(module))

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.weights.append(flat(module))


def validated(workers: int, reads: str, **options: Any) -> tuple[Any, Looks]:
    looks = Looks()
    module, _ = fit(
        behind(3, reads),
        workers,
        4,
        partial(WithValidation, OPTIMIZERS["adamw"]),
        callbacks=[looks],
        **options,
    )
    return module, looks


class WithValidation(Regression):
    def val_dataloader(self) -> Any:
        return DataLoader(regression_data(), 16)


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_validation_within_an_epoch_sees_the_newest_and_changes_no_bit(
    workers: int, reads: str
) -> None:
    whole, _ = validated(workers, reads, limit_val_batches=0)
    module, looks = validated(workers, reads, val_check_interval=2)
    assert torch.equal(flat(module), flat(whole))
    assert len(looks.weights) == EPOCHS * (N // 4 // workers) // 2
    assert torch.equal(looks.weights[-1], flat(module))
    if reads == "masters":  # what a worker has behind the next step is what a validation has seen
        seen = [any(torch.equal(each, at) for at in looks.behind) for each in looks.weights[:-1]]
        assert all(seen)
    assert not any(torch.equal(*pair) for pair in pairwise(looks.weights))


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("step", [2, 6, 8, 12])
def test_resumed_equals_uninterrupted_to_the_bit(
    step: int, workers: int, reads: str, tmp_path: Path
) -> None:
    module = partial(Regression, OPTIMIZERS["adamw"])
    size = 6 // workers
    whole, _ = fit(behind(4, reads), workers, size, module)
    keeps = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=step)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [keeps]}
    kept, _ = fit(behind(4, reads), workers, size, module, **options)
    assert torch.equal(flat(kept), flat(whole))
    path = str(tmp_path / f"step={step}.ckpt")
    read = torch.load(path, weights_only=True)["optimizer_states"][0].get("read")
    assert (read is not None) == (step > 4)
    resumed, trainer = fit(behind(4, reads), workers, size, module, ckpt_path=path)
    assert trainer.global_step == EPOCHS * N // 6
    assert torch.equal(flat(resumed), flat(whole))


# ---- what user code does beside it --------------------------------------------------------------


class Writes(Regression):
    """Writes to its parameters where an epoch ends, or in each mini-batch."""

    def __init__(self, where: str) -> None:
        super().__init__(OPTIMIZERS["adamw"])
        self.where = where

    @torch.no_grad()
    def write(self, where: str) -> None:
        for parameter in self.parameters() if where == self.where else ():
            parameter.clamp_(-0.1, 0.1)

    def on_train_epoch_end(self) -> None:
        self.write("epoch")

    def on_train_batch_end(self, *_: Any) -> None:
        self.write("batch")


def test_what_hooks_of_an_epoch_write_counts_once() -> None:
    one, _ = fit(behind(), 1, 12, partial(Writes, "epoch"))
    two, _ = fit(behind(), 2, 6, partial(Writes, "epoch"))
    assert float(one.net[0].weight.abs().max()) <= 0.1 + 1e-6
    assert float((flat(one) - flat(two)).abs().max()) < 1e-6


@pytest.mark.parametrize("workers", [1, 2])
def test_a_write_within_an_epoch_is_refused_by_name(workers: int) -> None:
    with pytest.raises(UserError, match=r"net\.0\.weight.*one update behind.*strategy=hybrid"):
        fit(behind(), workers, 6, partial(Writes, "batch"))


class Moved(Regression):
    """Moves a frozen layer by hand, and unfreezes another in the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.Linear(4, 1).requires_grad_(False)
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS["adamw"](filter(lambda p: p.requires_grad, self.parameters()))

    @torch.no_grad()
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)
            self.net[0].weight.mul_(0.5)
            self.optimizers().add_param_group({"params": list(self.net[0].parameters())})

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            for parameter in self.teacher.parameters():
                parameter.add_(1.0)
        return super().training_step(batch, batch_idx)


def test_layers_that_no_optimizer_steps_are_the_workers_own() -> None:
    one, _ = fit(behind(), 1, 12, Moved)
    two, _ = fit(behind(), 2, 6, Moved)
    assert float((flat(one) - flat(two)).abs().max()) < 1e-6
    assert float(one.teacher.bias) > 11  # 4 steps of each of 3 epochs


def test_the_last_of_max_steps_is_made() -> None:
    module, trainer = fit(
        behind(), 1, 6, partial(Batches, OPTIMIZERS["sgd"]), max_epochs=-1, max_steps=7
    )
    assert trainer.global_step == trainer.strategy.run_stats()["updates"] == 7
    expected = in_plain_torch(OPTIMIZERS["sgd"], module.seen, 0)
    assert torch.equal(flat(module), expected)
