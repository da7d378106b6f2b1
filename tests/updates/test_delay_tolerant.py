"""Optimizers that are told how late a gradient is: identities, the papers' rules, and a world."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from theory import late as laws

from hybridtrain.engine.policies import make_policy
from hybridtrain.engine.updates.delay_tolerant import AdaDelay, AdaptiveRevision, AsyncAdaDA
from hybridtrain.engine.updates.named import make_update
from hybridtrain.virtual.service_times import ServiceTimes
from hybridtrain.virtual.virtual_world import VirtualWorld

N = 7
parameter, gradients = laws.start, laws.gradients


# ---- nothing is late ----------------------------------------------------------------------------

ADAGRADS: dict[str, Any] = {
    "revision": (lambda p: AdaptiveRevision([p], 0.1), {"initial_accumulator_value": 1, "eps": 0}),
    "adadelay": (lambda p: AdaDelay([p], 0.1), {"eps": 1e-10}),
}


@pytest.mark.parametrize("name", ADAGRADS)
def test_delay_tolerant_updates_are_adagrad_where_no_gradient_is_late(name: str) -> None:
    make, options = ADAGRADS[name]
    assert laws.from_adagrad(make, **options) <= 1e-14


def test_gradients_of_one_reading_count_as_their_sum_in_any_order() -> None:
    assert laws.from_adagrad_on_sums() <= 1e-13


# ---- the rules, written down again --------------------------------------------------------------


class Revised:
    """McMahan and Streeter's Algorithm 1, one number at a time."""

    def __init__(self, x: list[float], lr: float) -> None:
        self.x, self.lr = list(x), lr
        self.z, self.largest, self.sum = [1.0] * len(x), [1.0] * len(x), [0.0] * len(x)
        self.read: dict[int, list[float]] = {}

    def step(self, g: list[float], worker: int) -> None:
        for i, gi in enumerate(g):
            missed = self.sum[i] - self.read[worker][i]
            before = self.lr / math.sqrt(self.largest[i])
            self.z[i] += gi * gi + 2 * gi * missed
            self.largest[i] = max(self.largest[i], self.z[i])
            now = self.lr / math.sqrt(self.largest[i])
            self.x[i] += -now * gi + (before - now) * missed
            self.sum[i] += gi


class Averaged(Revised):
    """Duchi's dual averaging."""

    def __init__(self, x: list[float], lr: float) -> None:
        super().__init__(x, lr)
        self.origin = list(x)

    def step(self, g: list[float], worker: int) -> None:
        for i, gi in enumerate(g):
            self.z[i] += gi * gi
            self.sum[i] += gi
            self.x[i] = self.origin[i] - self.lr * self.sum[i] / math.sqrt(self.z[i])


class Delayed(Revised):
    """Sra's rule; all workers' readings are counted in updates."""

    def __init__(self, x: list[float], lr: float) -> None:
        super().__init__(x, lr)
        self.sum2, self.t = [0.0] * len(x), 0

    def step(self, g: list[float], worker: int) -> None:
        tau = self.t - int(self.read[worker][-1])
        self.t += 1
        for i, gi in enumerate(g):
            self.sum2[i] += self.t / (self.t + tau) * gi * gi
            length = math.sqrt(self.sum2[i] / self.t) * math.sqrt(self.t + tau)
            self.x[i] -= self.lr * gi / (length + 1e-10)


RULES: dict[str, tuple[type[Revised], str]] = {
    "adaptive_revision": (Revised, "sum"),
    "async_ada_da": (Averaged, "sum"),
    "adadelay": (Delayed, "t"),
}


class Bowl:
    """Gradients at what a worker has read: ½ Σ a (x - c)² with a centre for each worker."""

    def __init__(self, workers: int) -> None:
        self.centres = gradients(workers, 3)
        self.scales = torch.linspace(0.5, 2.0, N, dtype=torch.float64)

    def parameters(self) -> list[torch.Tensor]:
        return [parameter().detach().clone()]

    def gradient(self, worker: int, values: Any) -> list[torch.Tensor]:
        return [self.scales * (values[0] - self.centres[worker])]


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("name", RULES)
def test_free_running_workers_make_the_papers_steps(name: str, workers: int) -> None:
    bowl, n = Bowl(workers), 60
    world = VirtualWorld(
        make_policy("async"),
        workers,
        ServiceTimes("constant"),  # so all take turns, in the order of their numbers
        task=bowl,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.2),
        update=make_update({"name": name, "lr": 0.2}),
    )
    world.run(updates=n)
    kind, _ = RULES[name]
    rule = kind(parameter().tolist(), 0.2)
    seen = {worker: list(rule.x) for worker in range(workers)}
    rule.read = {worker: [*rule.sum, 0.0] for worker in range(workers)}
    for number in range(n):
        worker = number % workers
        (g,) = bowl.gradient(worker, [torch.tensor(seen[worker], dtype=torch.float64)])
        rule.step(g.tolist(), worker)
        seen[worker], rule.read[worker] = list(rule.x), [*rule.sum, float(number + 1)]
    wanted = torch.tensor(rule.x, dtype=torch.float64)
    assert torch.allclose(world.parameters()[0], wanted, rtol=0, atol=1e-12)


# ---- what it is for -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_under_long_delays_on_sparse_data_only_the_revision_holds_its_loss() -> None:
    found = laws.long_delays(delays=(1000,), rates=(0.3, 0.5), n=6_000)
    assert [law for law in found if not law.holds] == []


def test_under_delays_on_sparse_data_the_revision_loses_less() -> None:
    makes = [lambda x: laws.revision(x, 0.3), lambda x: laws.gradient_descent(x, 0.3)]
    late, plain = [laws.zipf_loss(make, 300, 2_000, 300) for make in makes]
    assert late < 0.9 * plain, (late, plain)
    none = [laws.zipf_loss(make, 0, 500, 300) for make in makes]
    assert none[0] == pytest.approx(none[1], abs=1e-4)


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (AdaptiveRevision, {"lr": -1.0}, "lr=-1"),
        (AdaptiveRevision, {"initial": 0.0}, "initial=0"),
        (AsyncAdaDA, {"lr": math.nan}, "lr=nan"),
        (AdaDelay, {"smoothness": -0.5}, "smoothness=-0.5"),
        (AdaDelay, {"eps": -1e-3}, "eps=-0.001"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(kind: Any, options: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        kind([parameter()], **options)
