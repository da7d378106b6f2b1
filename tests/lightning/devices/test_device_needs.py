"""What each worker needs of its device is measured, decides its share, and is told."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridtrain.engine.worker.device import KINDS
from hybridtrain.engine.worker.device.cuda import CudaStreams
from hybridtrain.lightning.device_memory import (
    DeviceMemory,
    DeviceNeeds,
    DeviceUse,
    note_need,
    out_of_memory,
)
from tests.lightning.toys import Regression
from tests.standin.device import name_it
from tests.standin.state import NAME, SETTINGS, state
from tests.standin.training import fit_apart

name_it()
GIB, KIB = 2**30, 2**10


@pytest.fixture
def needs() -> Iterator[DeviceNeeds]:
    """Of four workers on two devices: 0 and 2, 1 and 3."""
    made = DeviceNeeds(4, 2)
    yield made
    made.close()


# ---- shares --------------------------------------------------------------------------------------


def test_a_share_is_what_was_needed_and_an_equal_part_of_the_rest(needs: DeviceNeeds) -> None:
    needs.note(1, 10 * GIB, 80 * GIB)
    assert needs.share(1) is None, "worker 3 has not measured yet"
    needs.note(3, 30 * GIB, 80 * GIB)
    assert needs.share(1) == 30 / 80 and needs.share(3) == 50 / 80
    needs.note(3, 5 * GIB, 80 * GIB)  # less than before
    assert needs.of(3) == 30 * GIB and needs.others(1) == {3: 30 * GIB}
    assert needs.share(0) is None, "nobody has measured on the other device"


def test_needs_that_do_not_fit_leave_shares_equal(needs: DeviceNeeds) -> None:
    needs.note(0, 50 * GIB, 80 * GIB)
    needs.note(2, 40 * GIB, 80 * GIB)
    assert needs.share(0) is None
    assert DeviceMemory(needs=needs).share(2, worker=0) == 0.5
    assert DeviceMemory(0.7, needs=needs).share(2, worker=0) == 0.7


def test_a_process_that_is_sent_the_needs_of_devices_shares_them(needs: DeviceNeeds) -> None:
    other = pickle.loads(pickle.dumps(needs))
    other.note(2, 7 * GIB, 80 * GIB)
    assert needs.of(2) == 7 * GIB
    assert needs.figures()["device_memory"] == {
        "needed_bytes": [0, 0, 7 * GIB, 0],
        "total_bytes": [0, 0, 80 * GIB, 0],
    }


def test_no_memory_is_measured_where_workers_have_no_devices() -> None:
    memory = DeviceMemory()
    with memory.measured([torch.device("cpu")], 2):
        assert memory.needs is None
        memory.measure(torch.device("cpu"), 2, 0)
    assert memory.figures() == {} == DeviceNeeds(2, 1).figures()


# ---- what is said --------------------------------------------------------------------------------


def worker(memory: DeviceMemory) -> DeviceUse:
    """Worker 1 of four on two GPUs of 80 GiB, with 1 GiB of parameters."""
    parameter = SimpleNamespace(nbytes=GIB)
    module: Any = SimpleNamespace(parameters=lambda: [parameter])
    return DeviceUse(memory, torch.device("cuda:1"), 2, 1, "bf16-mixed", module)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> torch.OutOfMemoryError:
    """A worker that holds 38 GiB has asked for 4."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 38 * GIB)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *_: None)
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 1 has")


def test_a_worker_out_of_its_share_of_memory_is_told_what_others_left(
    full: torch.OutOfMemoryError, needs: DeviceNeeds
) -> None:
    text = out_of_memory(full, worker(DeviceMemory(needs=needs)), samples=16)
    assert "may take 40.00 GiB. It held 38.00 GiB, so it needs at least 42.00 GiB" in text
    assert "not measured yet: worker 3" in text and "device_memory_fraction" not in text
    assert "at most 15 of 16 samples fit" in text  # 16 · 39/41
    needs.note(3, 12 * GIB, 80 * GIB)
    text = out_of_memory(full, worker(DeviceMemory(needs=needs)), samples=16)
    assert "what others there have needed so far: worker 3 12.00 GiB" in text
    assert "device_memory_fraction=0.53 or more (the others leave that unused)" in text
    assert "workers_per_device=2 now; at most 1 with such needs fit" in text


def test_advice_promises_no_memory_that_other_workers_need(
    full: torch.OutOfMemoryError, needs: DeviceNeeds
) -> None:
    needs.note(3, 39 * GIB, 80 * GIB)  # 42 more are not there
    text = out_of_memory(full, worker(DeviceMemory(needs=needs)), samples=1)
    assert "device_memory_fraction" not in text and "samples fit" not in text
    given = out_of_memory(full, worker(DeviceMemory(0.5, needs=needs)))
    assert "a larger device_memory_fraction (0.5 now)" in given


def test_memory_that_was_lacking_counts_as_needed_unless_others_need_it(
    full: torch.OutOfMemoryError, needs: DeviceNeeds
) -> None:
    note_need(full, worker(DeviceMemory(needs=needs)))
    assert needs.of(1) == 0, "worker 3 has not measured yet"
    needs.note(3, 12 * GIB, 80 * GIB)
    note_need(full, worker(DeviceMemory(needs=needs)))
    assert needs.of(1) == 42 * GIB
    absurd = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32768.00 GiB.")
    note_need(absurd, worker(DeviceMemory(needs=needs)))
    assert needs.of(1) == 42 * GIB


# ---- in a run ------------------------------------------------------------------------------------


class Uneven(Regression):
    """Worker 1 needs ``more`` bytes than the others, from the step ``since`` on."""

    more, since = 128 * KIB, 0
    share = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and self.global_step >= self.since:
            torch.empty(self.more, dtype=torch.uint8, device=self.device)
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.share = state().fractions[0]


@pytest.fixture
def one_mebibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, NAME, CudaStreams)
    monkeypatch.setattr(SETTINGS, "device_bytes", KIB**2)


def test_shares_follow_needs_and_the_run_tells_them(one_mebibyte: None) -> None:
    module, trainer = fit_apart(4, 3, Uneven, max_epochs=1)
    found = trainer.strategy.run_stats()["device_memory"]
    assert found["total_bytes"] == [KIB**2] * 4
    first, large, *others = found["needed_bytes"]
    assert large > 128 * KIB > 4 * max(first, *others)
    rest = KIB**2 - sum(found["needed_bytes"])
    assert module.share == pytest.approx((first + rest / 4) / KIB**2)
    assert 0 < module.share < 0.23


class Grows(Uneven):
    """More than an equal share, once all have measured."""

    more, since = 400 * KIB, 2


@pytest.mark.slow
def test_a_worker_that_goes_on_after_running_out_of_memory_has_more_the_next_time(
    one_mebibyte: None,
) -> None:
    _, trainer = fit_apart(4, 3, Grows, max_epochs=2, strategy={"on_oom": "drop"})
    found = trainer.strategy.run_stats()
    assert found["left_out"] == {"oom": [0, 1, 0, 0]}, "once, and then it had what it needs"
    assert found["device_memory"]["needed_bytes"][1] > 400 * KIB


def test_a_run_that_ends_out_of_memory_says_what_other_workers_have_needed(
    one_mebibyte: None,
) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit_apart(4, 3, Grows, max_epochs=1)
    said = caught.value.__notes__[0]
    assert "so far: worker 0 0.0" in said and "worker 3 0.0" in said
    assert "device_memory_fraction=0.4" in said and "of 3 samples fit" in said
