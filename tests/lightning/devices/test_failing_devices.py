"""A device that fails for good ends its worker as any failure does; one that is full does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridtrain.engine.worker.device import KINDS, transfers
from hybridtrain.engine.worker.device.cuda import CudaStreams
from tests.lightning.toys import Regression
from tests.picking import by_default
from tests.standin.device import name_it
from tests.standin.state import NAME, SETTINGS
from tests.standin.training import fit_apart

name_it()


@pytest.fixture(autouse=True)
def with_small_buckets_on_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, NAME, CudaStreams)
    monkeypatch.setattr(transfers, "LEAST_BYTES", 64)


# ---- a failed device -----------------------------------------------------------------------------


class Fails(Regression):
    """Worker 1's device fails in backward, once; others may step between two steps of its."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = torch.zeros(1).share_memory_()  # of all workers

    def on_after_backward(self) -> None:
        if self.global_rank == 1 and self.global_step >= 2 and not self.failed:
            self.failed.fill_(1)
            torch.standin.fail()


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", by_default(["hybrid", "async"], "hybrid"))
@pytest.mark.parametrize("choice", ["stop", "continue", "restart"])
def test_a_failed_device_ends_its_worker_alone(choice: str, policy: str) -> None:
    strategy = {"policy": policy, "on_failure": choice}
    if choice == "stop":
        with pytest.raises(RuntimeError, match="device-side assert triggered"):
            fit_apart(2, 6, Fails, max_epochs=2, strategy=strategy)
        return
    module, trainer = fit_apart(2, 6, Fails, max_epochs=2, strategy=strategy)
    found = trainer.strategy.run_stats()
    assert found["samples"] == 2 * 48, "each sample counts once in an epoch"
    assert all(p.device.type == "cpu" and p.isfinite().all() for p in module.parameters())


# ---- no memory left ------------------------------------------------------------------------------


class Greedy(Regression):
    """In step 2 worker 1 asks for more than its device has."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and self.global_step == 2:
            torch.empty(2**20, device=self.device)
        return super().training_step(batch, batch_idx)


@pytest.fixture
def one_mebibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SETTINGS, "device_bytes", 2**20)


def test_who_is_out_of_memory_can_go_on_without_the_mini_batch(one_mebibyte: None) -> None:
    _, trainer = fit_apart(2, 6, Greedy, max_epochs=1, strategy={"on_oom": "drop"})
    assert trainer.global_step == 4
    assert trainer.strategy.run_stats()["left_out"] == {"oom": [0, 1]}


def test_who_is_out_of_memory_hears_how_much_there_was(one_mebibyte: None) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit_apart(2, 6, Greedy, max_epochs=1)
    said = caught.value.__notes__[0]
    assert "4.00 MiB were asked for" in said and "of standin:1's 1.00 MiB are free" in said


class HalfOfIt(Regression):
    """Asks for a third of its device."""

    def on_train_start(self) -> None:
        torch.empty(2**20 // 3, dtype=torch.uint8, device=self.device)


def test_a_worker_gets_no_more_than_its_share(one_mebibyte: None) -> None:
    fit_apart(1, 12, HalfOfIt, max_epochs=1)
    with pytest.raises(torch.OutOfMemoryError):
        fit_apart(4, 3, HalfOfIt, max_epochs=1)
