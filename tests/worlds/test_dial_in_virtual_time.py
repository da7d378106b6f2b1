"""The dial from lock-step to free-running, in virtual time: policies that equal one another.

The same claims as in real processes (``tests/lightning/async_training/test_dial.py``), on the same
server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from hybridtrain.engine.policies import (
    BoundedStaleness,
    FirstK,
    OnArrival,
    PipeSGD,
    Policy,
    Softsync,
    Switch,
    make_policy,
)
from hybridtrain.engine.protocol.messages import Clip
from hybridtrain.engine.updates.groups import Groups
from hybridtrain.virtual.network import Conditions
from hybridtrain.virtual.service_times import ServiceTimes
from hybridtrain.virtual.training_task import Scheduled, Timetable
from hybridtrain.virtual.virtual_world import VirtualWorld
from tests.picking import by_default

UNEQUAL = ServiceTimes("lognormal", slower={0: 3.0})
SGD = partial(torch.optim.SGD, lr=0.05)
ADAM = partial(torch.optim.Adam, lr=0.01)


class Samples:
    """A lesson over a list of samples: the mean of ``gradient_of(sample, values)``."""

    clip: Clip | None = None
    loss = 0.0

    def __init__(self, length: int, batch_size: int, n_workers: int) -> None:
        self.timetable = Timetable(length, (batch_size,) * n_workers)
        self._positions: dict[int, Sequence[int]] = {}

    def study(self, worker: int, epoch: int, positions: Sequence[int]) -> float:
        self._positions[worker] = positions
        return float(len(positions))

    def updated(self, version: int) -> Groups | None:
        return None

    def epoch_ended(self) -> Groups | None:
        return None

    def groups(self) -> Groups:
        return ()

    def own_schedules(self) -> Scheduled:
        return self


class Regression(Samples):
    """y = |x|², by a plane. 16 parameters fill whole vectors, and so round as elsewhere."""

    def __init__(self, n_workers: int, length: int = 53, batch_size: int = 4) -> None:
        super().__init__(length, batch_size, n_workers)
        x = torch.randn(length, 15, generator=torch.Generator().manual_seed(0))
        self.x, self.y = torch.cat([x, torch.ones(length, 1)], dim=1), x.pow(2).sum(1)

    def parameters(self) -> list[torch.Tensor]:
        return [torch.full((16,), 0.1)]

    def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        own = torch.tensor(list(self._positions[worker]))
        x, y = self.x[own], self.y[own]
        return [2 * (x @ values[0] - y) @ x / len(own)]


class Tally(Samples):
    """One weight per sample: how much of it has been applied."""

    def parameters(self) -> list[torch.Tensor]:
        return [torch.zeros(self.timetable.length, dtype=torch.float64)]

    def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        own = list(self._positions[worker])
        gradient = torch.zeros_like(values[0])
        gradient[own] = 1 / len(own)
        return [gradient]


def world(policy: Policy, task: Any, optimizer: Any, **rest: Any) -> VirtualWorld:
    sizes = task.timetable.sizes
    return VirtualWorld(policy, len(sizes), UNEQUAL, task=task, optimizer=optimizer, **rest)


def trained(policy: Policy, n_workers: int, optimizer: Any, updates: int = 42) -> torch.Tensor:
    made = world(policy, Regression(n_workers), optimizer)
    made.run(updates=updates)
    return made.parameters()[0]


@pytest.mark.few(3)
@pytest.mark.parametrize("optimizer", [SGD, ADAM])
@pytest.mark.parametrize(
    "policy",
    [
        FirstK(3),
        FirstK(3, "use"),
        BoundedStaleness(0),
        Switch(make_policy("hybrid"), BoundedStaleness(0), at_update=5),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_at_its_limit_a_policy_gives_the_same_bits_as_hybrid(policy: Any, optimizer: Any) -> None:
    hybrid = trained(make_policy("hybrid"), 3, optimizer)
    assert torch.equal(trained(policy, 3, optimizer), hybrid)


@pytest.mark.parametrize("workers", [2, 3, 16])
def test_synchronous_equals_one_worker_to_the_bit(workers: int) -> None:
    alone = trained(make_policy("hybrid"), 1, ADAM)
    assert torch.equal(trained(make_policy("synchronous"), workers, ADAM), alone)


@pytest.mark.parametrize("name", ["async", "synchronous", "backup", "k_async", "ssp", "softsync"])
def test_with_one_worker_every_policy_is_plain_training(name: str) -> None:
    task = Regression(1)
    plain = torch.nn.Parameter(task.parameters()[0])
    optimizer = ADAM([plain], fused=True)
    for step in range(42):
        begin = step % 14 * 4
        task.study(0, 0, range(begin, min(begin + 4, 53)))
        plain.grad = task.gradient(0, [plain.detach()])[0]
        optimizer.step()
    assert torch.equal(trained(make_policy(name), 1, ADAM), plain.detach())


POLICIES: dict[str, Callable[[], Policy]] = {
    "synchronous": lambda: make_policy("synchronous"),
    "hybrid": lambda: make_policy("hybrid"),
    "pipe_sgd": PipeSGD,
    "pipe_sgd at once": lambda: PipeSGD(warm_up=0, extrapolate=True),
    "backup": FirstK,
    "backup in time": lambda: make_policy({"name": "backup", "k": "auto"}),
    "k_async": lambda: FirstK(2, "use"),
    "k_batch_sync": lambda: FirstK(3, "drop", True),
    "k_batch_async": lambda: FirstK(3, "use", True),
    "softsync": lambda: Softsync(1),
    "ssp": lambda: BoundedStaleness(1),
    "async": OnArrival,
    "switch": lambda: Switch(make_policy("hybrid"), OnArrival(), at_update=6),
    "switch back": lambda: Switch(OnArrival(), make_policy("hybrid"), at_update=6),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("interrupt", by_default([False, True], True))
@pytest.mark.parametrize("name", POLICIES)
def test_updates_are_conserved_and_every_sample_counts_once_an_epoch(
    name: str, interrupt: bool
) -> None:
    length, epochs = 203, 3
    task = Tally(length, 4, n_workers=4)
    made = world(
        POLICIES[name](), task, partial(torch.optim.SGD, lr=1.0),
        conditions=Conditions(interrupt=interrupt),
    )  # fmt: skip
    statistics = made.server.statistics
    while statistics.samples < epochs * length:
        made.run(updates=statistics.version + 1)
    applied = -made.parameters()[0]
    assert statistics.samples == epochs * length, "every epoch has ended with each sample done once"
    assert float(applied.min()) > 0, "every sample has counted"
    assert float(applied.sum()) == pytest.approx(statistics.version, abs=1e-9), "shares sum to 1"
