"""A worker's share of its device's memory, and what is said where it was not enough."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridtrain import HybridStrategy
from hybridtrain.engine.worker.device import KINDS
from hybridtrain.engine.worker.device.cuda import CudaStreams
from hybridtrain.errors import UserError
from hybridtrain.lightning.device_memory import DeviceMemory, DeviceUse, out_of_memory
from tests.lightning.toys import Regression, fit
from tests.standin.device import name_it
from tests.standin.state import NAME, state
from tests.standin.training import fit_apart

name_it()


@pytest.mark.parametrize("given", [0, -0.1, 1.01, float("nan"), "0.5", True, [0.5]])
def test_what_is_no_share_is_refused(given: Any) -> None:
    with pytest.raises(UserError, match=r"device_memory_fraction=.* above 0 and up to 1"):
        HybridStrategy(device_memory_fraction=given)


@pytest.mark.parametrize(
    ("given", "workers", "share"),
    [(None, 1, None), (None, 4, 0.25), (1, 1, 1.0), (0.4, 3, 0.4)],
)
def test_several_workers_have_equal_shares_unless_somebody_says_otherwise(
    given: Any, workers: int, share: float | None
) -> None:
    assert DeviceMemory(given).share(workers) == share


class Tells(Regression):
    shares: dict[int, float] | None = None

    def on_train_end(self) -> None:
        self.shares = dict(state().fractions)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("workers", "strategy", "shares"),
    [
        (2, {}, {}),  # each has a device alone
        (4, {}, {0: pytest.approx(0.25, rel=0.05)}),  # their needs are nearly alike
        (2, {"device_memory_fraction": 0.3}, {0: 0.3}),
    ],
)
def test_workers_are_held_to_their_shares(
    workers: int, strategy: dict[str, Any], shares: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, NAME, CudaStreams)
    found, _ = fit_apart(workers, 3, Tells, strategy=strategy, max_epochs=1)
    assert found.shares == shares


def told(monkeypatch: pytest.MonkeyPatch, memory: Any, **options: Any) -> str:
    """Of a worker on a GPU of 80 GiB."""
    strategy = HybridStrategy(**options)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 38 * 2**30)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has")
    memory, shared_by = strategy.device_memory, strategy.workers_per_device
    use = DeviceUse(memory, torch.device("cuda:1"), shared_by, 0, "", torch.nn.Module())
    return out_of_memory(error, use)


def test_out_of_memory_names_what_there_is_and_what_takes_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def memory(device: Any) -> tuple[int, int]:
        return 2**30, 80 * 2**30

    text = told(monkeypatch, memory, workers_per_device=2)
    assert "2.50 GiB were asked for; 1.00 GiB of cuda:1's 80.00 GiB are free" in text
    assert "this worker may take 40.00 GiB. It held 38.00 GiB, so it needs at least 40.50" in text
    for word in ("batch_size_per_worker", "bf16-mixed"):
        assert word in text
    assert "workers_per_device=2 now; at most 1 with such needs fit" in text
    alone = told(monkeypatch, memory)
    assert "workers_per_device" not in alone and "may take" not in alone
    held = told(monkeypatch, memory, device_memory_fraction=0.5)
    assert "a larger device_memory_fraction (0.5 now)" in held


def test_a_device_that_has_failed_is_not_asked_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(device: Any) -> tuple[int, int]:
        raise RuntimeError("CUDA error: device-side assert triggered")

    text = told(monkeypatch, memory)
    assert text.startswith("2.50 GiB were asked for. What takes less: smaller mini-batches")


class Greedy(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")


def test_a_run_that_ends_for_want_of_memory_says_what_takes_less() -> None:
    with pytest.raises(Exception, match=r"(?s)What takes less: smaller mini-batches .*on_oom=drop"):
        fit("hybrid", 2, 6, Greedy)


class TooLarge(torch.nn.Module):
    def to(self, device: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")


def test_parameters_that_do_not_fit_on_a_device_end_with_advice() -> None:
    strategy = HybridStrategy()
    strategy._lightning_module = SimpleNamespace(to=TooLarge().to, _compiler_ctx=None)
    strategy.parallel_devices = [torch.device("cpu")]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        strategy.model_to_device()
    assert caught.value.__notes__[0].startswith("The parameters do not fit. What takes less")
