"""Two devices, each with a worker of its own, and what is found there before it leaves."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import nn

from hybridtrain import HybridStrategy
from hybridtrain.engine.memory import Layout, Store
from hybridtrain.engine.worker import finite
from hybridtrain.engine.worker.device import KINDS, transfers
from hybridtrain.engine.worker.device.cuda import CudaStreams
from hybridtrain.engine.worker.finite import FiniteCheck
from hybridtrain.engine.worker.replica_cuda import CudaReplica
from hybridtrain.errors import UserError
from tests.lightning.toys import Regression, distance, fit
from tests.standin.device import name_it
from tests.standin.state import NAME, state
from tests.standin.training import fit_apart

name_it()
HERE = torch.device(NAME, 0)
LAYERS, WEIGHTS = 3, (0, 2, 4)


@pytest.fixture(autouse=True)
def with_small_buckets_on_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, NAME, CudaStreams)
    monkeypatch.setattr(transfers, "LEAST_BYTES", 64)


# ---- where everything lies -----------------------------------------------------------------------


class Placed(Regression):
    """Each worker's parameters, buffers, mini-batches and answers are on its own device."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.first = first
        self.register_buffer("mark", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.assert_mine(*batch, *self.parameters(), *self.buffers())
        loss = super().training_step(batch, batch_idx)
        self.assert_mine(loss)
        return loss

    def on_after_backward(self) -> None:
        self.assert_mine(*(p.grad for p in self.parameters()))

    def on_train_epoch_end(self) -> None:
        rank, strategy = self.global_rank, self.trainer.strategy
        n = self.trainer.world_size
        mine = torch.full((2,), 1.0 + rank, device=self.device)
        told = [strategy.broadcast(mine, src) for src in range(n)]
        mean, total = strategy.reduce(mine.clone()), strategy.reduce(mine.clone(), reduce_op="sum")
        everyone = self.all_gather(mine)
        self.assert_mine(*told, mean, total, everyone)
        assert [float(t[0]) for t in told] == [float(row[0]) for row in everyone]
        assert everyone.shape == (n, 2) and float(total[0]) == n * (n + 1) / 2
        assert float(mean[0]) == (n + 1) / 2

    def assert_mine(self, *tensors: torch.Tensor) -> None:
        assert self.device == torch.device(NAME, self.first + self.global_rank)
        assert {tensor.device for tensor in tensors} == {self.device}


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["hybrid", "async"])
def test_each_worker_has_all_on_its_own_device(policy: str) -> None:
    module, _ = fit_apart(2, 6, Placed, max_epochs=1, strategy={"policy": policy})
    assert all(tensor.device.type == "cpu" for tensor in module.state_dict().values())
    if policy == "hybrid":
        assert distance(module, fit("hybrid", 2, 6, max_epochs=1)[0]) < 1e-6


def test_one_worker_takes_the_device_that_was_chosen() -> None:
    fit_apart(1, 12, lambda: Placed(1), max_epochs=1, devices=[1])


# ---- whether gradients are numbers ---------------------------------------------------------------


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements of the host's row are read, each time that some are."""
    seen: list[int] = []
    original = finite.has_finite_sum

    def counted(flat: torch.Tensor) -> bool:
        seen.append(flat.numel())
        return original(flat)

    monkeypatch.setattr(finite, "has_finite_sum", counted)
    return seen


def offender(poison: dict[int, float], transport: torch.dtype | None) -> int | None:
    """The first that is found among gradients of ones, into which some other value is put."""
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(LAYERS)])
    store = Store(Layout.of(net.named_parameters(), transport=transport), 2, False)
    net.to(HERE)
    parameters = list(net.parameters())
    exchange = CudaReplica(parameters, store, 0, True, CudaStreams(HERE))
    weighed = [torch.ones_like(p) for p in parameters]
    for number, value in poison.items():
        weighed[number].view(-1)[-1] = value
    # Backward in the order of the layers, so that each bucket leaves while it runs.
    sum((p * w).sum() for p, w in zip(parameters, weighed, strict=True)).backward()
    numbers = tuple(range(len(parameters)))
    absent = exchange.collect(numbers)
    known: Collection[int] = exchange.finite
    found = FiniteCheck(store, 0).offender(numbers, absent, (), known)
    exchange.close()
    return found


OVERFLOWS = 3.4e38  # of float32, where the largest of bf16 is 3.39e38


@pytest.mark.few(2)
@pytest.mark.parametrize("transport", [None, torch.bfloat16])
@pytest.mark.parametrize("number", WEIGHTS)
@pytest.mark.own_process
def test_what_is_not_finite_is_found_in_any_bucket(
    number: int, transport: torch.dtype | None, looks: list[int]
) -> None:
    state()
    for value in (torch.inf, -torch.inf, torch.nan, *((OVERFLOWS,) if transport else ())):
        assert offender({number: value}, transport) == number
        (read,) = looks
        assert 64 <= read < 128, "of all, the one that is not known to be finite, and its padding"
        looks.clear()
    assert offender({0: torch.nan, number: -torch.inf}, transport) == 0


@pytest.mark.parametrize("transport", [None, torch.bfloat16])
@pytest.mark.own_process
def test_the_row_is_not_read_where_all_are_finite(
    transport: torch.dtype | None, looks: list[int]
) -> None:
    state()
    largest = torch.finfo(transport or torch.float32).max
    assert offender({}, transport) is None
    assert offender({2: largest, 4: -largest}, transport) is None
    assert looks == []


class Poisoned(Regression):
    """In step 3 worker 1 has one gradient too large for its place in the row.

    Args:
        layer: whose weight.
        value: of one element.
    """

    def __init__(self, layer: int, value: float) -> None:
        super().__init__()
        self.layer, self.value = layer, value

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.fit_loop.epoch_loop.batch_idx == 2 and self.global_rank == 1:
            loss = loss + self.net[self.layer].weight.flatten()[0] * self.value
        return loss


def poisoned(choice: str, layer: int, value: float) -> tuple[Any, Any]:
    options = {"transport_dtype": "bf16", "on_nonfinite": choice}
    return fit_apart(2, 6, lambda: Poisoned(layer, value), max_epochs=1, strategy=options)


@pytest.mark.parametrize(
    ("layer", "value"),
    [
        pytest.param(0, OVERFLOWS),
        *[
            pytest.param(layer, value, marks=pytest.mark.slow)
            for layer, value in ((2, OVERFLOWS), (0, torch.nan), (2, torch.inf))
        ],
    ],
)
@pytest.mark.parametrize(
    "choice",
    ["raise", *[pytest.param(other, marks=pytest.mark.slow) for other in ("drop", "skip_step")]],
)
def test_what_is_not_finite_on_a_device_follows_the_users_choice(
    choice: str, layer: int, value: float
) -> None:
    if choice == "raise":
        with pytest.raises(UserError, match=rf"worker 1 \(standin:1\).* net\.{layer}\.weight"):
            poisoned(choice, layer, value)
        return
    module, trainer = poisoned(choice, layer, value)
    strategy = HybridStrategy(transport_dtype="bf16", on_nonfinite=choice)
    on_cpu, _ = fit(strategy, 2, 6, lambda: Poisoned(layer, value), max_epochs=1)
    assert distance(module, on_cpu) < 1e-3, "less than a gradient more or less would make"
    assert trainer.strategy.run_stats()["left_out"] == {"nonfinite": [0, 1]}
