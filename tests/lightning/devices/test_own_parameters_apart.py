"""Workers that train parameters of their own on a device: what leaves them, what comes home."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils._pytree import tree_leaves

from hybridtrain import HybridStrategy
from hybridtrain.engine.worker.device import KINDS
from hybridtrain.engine.worker.device.cuda import CudaStreams
from hybridtrain.errors import UserError
from tests.lightning.toys import Regression, distance, fit
from tests.picking import by_default
from tests.standin.device import name_it
from tests.standin.state import NAME
from tests.standin.training import fit_apart

name_it()

OUTER = {"name": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}
MOVEMENT = {"name": "movement", "every": 3}
IN_ROUNDS: dict[str, dict[str, Any]] = {
    "local_sgd": {"exchange": MOVEMENT},
    "local_sgd, int8": {"exchange": MOVEMENT | {"compress": "int8"}},
    "local_sgd, int4": {"exchange": MOVEMENT | {"compress": "int4"}},
    "local_sgd, topk": {"exchange": MOVEMENT | {"compress": "topk"}},
    "diloco": {"exchange": MOVEMENT, "update": OUTER},
    "streaming_diloco": {
        "exchange": {"name": "streaming", "every": 4, "fragments": 2, "overlap": 1},
        "update": OUTER,
    },
    "easgd": {"exchange": {"name": "elastic", "every": 3}},
}
FREELY: dict[str, dict[str, Any]] = {
    "easgd": {"policy": "async", "exchange": {"name": "elastic", "every": 3}},
    "downpour": {"policy": "async", "exchange": {"name": "accumulated", "n_push": 2}},
    "downpour, overlapped": {
        "policy": "async",
        "exchange": {"name": "accumulated", "n_push": 2, "fetch": "overlapped"},
    },
    "async_diloco": {
        "policy": {"name": "grace", "window_s": 0.01},
        "exchange": MOVEMENT,
        "update": {"name": "delayed_nesterov", "lr": 0.7, "momentum": 0.9, "buffer": 2},
    },
}


@pytest.fixture(autouse=True)
def with_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, NAME, CudaStreams)


class Placed(Regression):
    """Parameters, gradients and the optimizer's state are on the worker's device."""

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.Adam, lr=0.01))

    def on_train_batch_end(self, *_: Any) -> None:
        state = self.trainer.optimizers[0].state
        moments = [leaf for leaf in tree_leaves(dict(state)) if getattr(leaf, "ndim", 0)]
        assert len(moments) == 2 * len(list(self.parameters()))
        places = {each.device for each in (*self.parameters(), *moments)}
        assert places == {self.device}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["step"] = self.trainer.global_step


def trained(kind: Any, scheme: dict[str, Any], folder: Path) -> tuple[Any, dict[str, Any]]:
    """The module at home, and what its last checkpoint says; two workers."""
    places: set[str] = set()
    saving = ModelCheckpoint(folder, filename="last", enable_version_counter=False)
    more: dict[str, Any] = {"callbacks": [saving], "enable_checkpointing": True}
    if kind is fit:
        module, _ = fit(HybridStrategy(**scheme), 2, 3, Placed, max_epochs=2, **more)
    else:
        module, _ = kind(2, 3, Placed, max_epochs=2, strategy=scheme, **more)
    assert not torch.standin.is_initialized(), "nothing of a device has come home"

    def note(storage: Any, place: str) -> Any:
        places.add(place)
        return storage

    saved = torch.load(folder / "last.ckpt", map_location=note, weights_only=False)
    assert places <= {"cpu", f"{NAME}:0"}, "another worker's lies in host memory"
    return module, saved


@pytest.mark.slow
@pytest.mark.parametrize("name", by_default(IN_ROUNDS, "diloco"))
def test_own_steps_on_a_device_are_those_of_a_cpu(name: str, tmp_path: Path) -> None:
    ours, saved = trained(fit_apart, IN_ROUNDS[name], tmp_path / "apart")
    theirs, expected = trained(fit, IN_ROUNDS[name], tmp_path / "cpu")
    assert {p.device.type for p in ours.parameters()} == {"cpu"}
    assert distance(ours, theirs) < 1e-5
    assert saved["step"] == expected["step"]
    for key in ("state_dict", "optimizer_states"):
        for one, other in zip(*map(tree_leaves, (saved[key], expected[key])), strict=True):
            if isinstance(one, torch.Tensor):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
            else:
                assert one == other


@pytest.mark.slow
@pytest.mark.parametrize("name", by_default(["local_sgd", "diloco", "easgd"], "easgd"))
def test_training_goes_on_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    scheme = IN_ROUNDS[name]
    trained(fit_apart, scheme, tmp_path)
    path = str(tmp_path / "last.ckpt")
    ours, _ = fit_apart(2, 3, Placed, max_epochs=3, strategy=scheme, ckpt_path=path)
    theirs, _ = fit(HybridStrategy(**scheme), 2, 3, Placed, max_epochs=3)
    assert distance(ours, theirs) < 1e-5
    assert not torch.standin.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("name", by_default(FREELY, "downpour, overlapped"))
def test_free_workers_on_devices_use_each_sample_once(name: str) -> None:
    module, trainer = fit_apart(2, 3, Placed, max_epochs=2, strategy=FREELY[name])
    assert trainer.strategy.run_stats()["samples"] == 2 * 48
    assert all(p.device.type == "cpu" and p.isfinite().all() for p in module.parameters())


def test_workers_without_a_lock_need_parameters_in_host_memory() -> None:
    with pytest.raises(UserError, match=r"accelerator='standin'.*accelerator='cpu'"):
        fit_apart(2, 6, strategy={"policy": "async", "exchange": "in_place"})
    assert not torch.standin.is_initialized()
