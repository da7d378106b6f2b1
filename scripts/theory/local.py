"""Check theory on workers that train on their own, in virtual time.

Every figure comes from the policies, exchanges and updates that train. P workers, learning rate η.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybridtrain.engine.exchanges import make_exchange
from hybridtrain.engine.memory import Layout, Store, pack
from hybridtrain.engine.policies import make_policy
from hybridtrain.engine.updates import build_update
from hybridtrain.engine.updates.base import Contribution, StepInput
from hybridtrain.engine.updates.factory import for_sparse
from hybridtrain.engine.updates.named import make_update
from hybridtrain.engine.updates.thread_pool import Pool
from hybridtrain.virtual.service_times import ServiceTimes
from hybridtrain.virtual.virtual_world import VirtualWorld
from theory.law import About, AtMost, Law
from theory.waiting import CONSTANT, Quadratic

Make = Callable[[Any], torch.optim.Optimizer]
UNEQUAL = ServiceTimes("constant", slower={1: 1.7, 2: 3.1})


class Bowls:
    """½ Σ a (w - c)², where every worker has a ``c`` of its own."""

    def __init__(self, workers: int) -> None:
        drawn = torch.Generator().manual_seed(3)
        self.start = torch.randn(5, dtype=torch.float64, generator=drawn)
        self.scales = torch.rand(5, dtype=torch.float64, generator=drawn) + 0.5
        self.centres = torch.randn(workers, 5, dtype=torch.float64, generator=drawn)

    def parameters(self) -> list[torch.Tensor]:
        return [self.start.clone()]

    def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self.scales * (values[0] - self.centres[worker])]


def sgd(parameters: Any, rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def world(
    task: Any,
    workers: int,
    optimizer: Make,
    policy: Any,
    exchange: Any = "gradient",
    update: Any = None,
    times: ServiceTimes = CONSTANT,
) -> VirtualWorld:
    """Workers on the task, one behind the other where they are equally fast."""
    return VirtualWorld(
        make_policy(policy),
        workers,
        times,
        task=task,
        optimizer=optimizer,
        exchange=make_exchange(exchange),
        update=make_update(update),
    )


def apart(one: VirtualWorld, other: VirtualWorld) -> float:
    """The largest difference of two parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


# ---- elastic averaging --------------------------------------------------------------------------


def pulled(rate: float, alpha: float, workers: int, steps: int = 400) -> float:
    """The centre's distance from the minimum of ½ x², after so many steps of each from 1."""
    exchange = {"name": "elastic", "every": 1, "alpha": alpha}
    made = world(Quadratic(), workers, lambda p: sgd(p, rate), "async", exchange)
    made.run(until_s=steps + 0.5)
    return abs(float(made.parameters()[0]))


def elastic_edge(
    rates: Sequence[float] = (0.5, 1.0, 1.5), counts: Sequence[int] = (1, 3), halvings: int = 6
) -> list[Law]:
    """Zhang et al. 2015, section 4.1: workers in turn are stable up to α = (4 - 2η) / (4 - η)."""
    laws: list[Law] = []
    for workers in counts:
        for rate in rates:
            theory = (4 - 2 * rate) / (4 - rate)
            low, high = 0.9 * theory, 1.1 * theory
            for _ in range(halvings):
                middle = (low + high) / 2
                grows = pulled(rate, middle, workers) > 1.0
                low, high = (low, middle) if grows else (middle, high)
            case = f"P={workers}, η={rate:g}"
            laws.append(About("EASGD: edge of α", case, theory, (low + high) / 2))
    return laws


# ---- one scheme is another ----------------------------------------------------------------------


def endless_window(rounds: int = 6) -> list[Law]:
    """Liu et al. 2024: with an endless window, asynchronous is synchronous.

    If all of a window make one update, to the bit. If one after the other does, N movements under
    Delayed Nesterov are one Nesterov step with their mean.
    """
    exchange, outer = {"name": "movement", "every": 3}, {"lr": 0.7, "momentum": 0.9}
    nesterov = {"name": "sgd", "nesterov": True, **outer}
    delayed = {"name": "delayed_nesterov", "buffer": 3, **outer}
    window = {"name": "grace", "window_s": math.inf}

    def trained(policy: Any, update: Any, updates: int) -> VirtualWorld:
        made = world(Bowls(3), 3, adam, policy, exchange, update, UNEQUAL)
        made.run(updates=updates)
        return made

    sync = trained("hybrid", nesterov, rounds)
    together = trained({**window, "together": True}, nesterov, rounds)
    singly = trained(window, delayed, 3 * rounds)
    case = "endless window, P=3, AdamW inside"
    return [
        AtMost("asynchronous is synchronous", f"{case}: one update", apart(sync, together), 0.0),
        AtMost("Delayed Nesterov is Nesterov", f"{case}: N updates", apart(sync, singly)),
    ]


def post_local(switch: int = 12) -> list[Law]:
    """Lin et al. 2020: until the switch, post-local SGD is mini-batch SGD."""
    local = {"name": "movement", "every": {"then": 4, "at": switch}}
    ends = [world(Bowls(3), 3, sgd, "hybrid", exchange) for exchange in (local, "gradient")]
    for each in ends:
        each.run(until_s=switch + 0.5)
    return [AtMost("post-local SGD", f"from hybrid, at the switch, step {switch}", apart(*ends))]


def averaged_iterate(steps: int = 24, workers: int = 4) -> list[Law]:
    """On quadratics of one curvature the mean of the workers does not depend on H (linearity)."""
    ends = []
    for every in (1, 2, 8, steps):
        exchange = {"name": "movement", "every": every}
        ends.append(world(Bowls(workers), workers, sgd, "hybrid", exchange))
        ends[-1].run(updates=steps // every)
    return [
        AtMost("mean iterate of local SGD", f"H={every} from H=1", apart(ends[0], end))
        for every, end in zip((2, 8, steps), ends[1:], strict=True)
    ]


# ---- more ---------------------------------------------------------------------------------------


class Table:
    """Rows that our update steps, whose gradients are sparse.

    Args:
        start: their values.
        make: the user's optimizer.
    """

    def __init__(self, start: torch.Tensor, make: Make) -> None:
        layout = Layout.of([("table", start)])
        (self._slot,) = layout.slots
        self._store, self._pool = Store(layout, 1, False), Pool(1)
        self.rows = self._store.master(self._slot)
        self.rows.copy_(start)
        optimizer = make([torch.nn.Parameter(self.rows)])
        self._update = build_update(optimizer, [0], self._store, self._pool)

    def step(self, gradient: torch.Tensor) -> None:
        row = self._store.gradient(0, self._slot)
        given = [Contribution(0, 1.0, frozenset(), {0: pack(0, gradient, row)})]
        with torch.no_grad():
            self._update = for_sparse(self._update, given, self._store, self._pool)
            self._update.step(StepInput(given))


def deferred_momentum(steps: int = 160, rows: int = 150) -> list[Law]:
    """Rows that nobody touches come to rest (after 53 steps here); later they are made up for."""
    laws: list[Law] = []
    for kind in ("heavy ball", "Nesterov"):

        def make(parameters: Any, nesterov: bool = kind == "Nesterov") -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.5, nesterov=nesterov)

        drawn = torch.Generator().manual_seed(1)
        start = torch.randn(rows, 3, dtype=torch.float64, generator=drawn)
        ours, dense = Table(start, make), torch.nn.Parameter(start.clone())
        theirs = make([dense])
        for _ in range(steps):
            where = torch.randint(0, rows, (1, 2), generator=drawn)
            values = torch.randn(2, 3, dtype=torch.float64, generator=drawn)
            gradient = torch.sparse_coo_tensor(
                where, values, start.shape, check_invariants=True
            ).coalesce()
            dense.grad = gradient.to_dense()
            theirs.step()
            ours.step(gradient)
        far = float((ours.rows - dense.detach()).abs().max())
        laws.append(AtMost("deferred momentum", f"{kind}: sparse from dense, {steps} steps", far))
    return laws


class Noisy:
    """½ w² from 0, in many coordinates that do not know of one another, with noise of variance 1.

    A mini-batch of ``size`` has a ``size``-th of it.
    """

    def __init__(self, size: float, coordinates: int = 20_000) -> None:
        self._scale, self._coordinates = size**-0.5, coordinates
        self._drawn = torch.Generator().manual_seed(7)

    def parameters(self) -> list[torch.Tensor]:
        return [torch.zeros(self._coordinates, dtype=torch.float64)]

    def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        noise = torch.randn(self._coordinates, dtype=torch.float64, generator=self._drawn)
        return [values[0] + self._scale * noise]


def linear_scaling(rate: float = 0.05, size: int = 4) -> list[Law]:
    """Goyal et al. 2017: k workers and a rate of k η keep the noise that one worker has at η.

    The stationary variance of SGD on ½ h w² is η σ² / (B h (2 - η h)), so it changes by
    (2 - η h) / (2 - k η h) only.
    """
    laws: list[Law] = []
    for k in (1, 4, 8):
        made = world(Noisy(size), k, lambda p, k=k: sgd(p, k * rate), "hybrid")
        found = []
        for end in range(100, 400, 30):
            made.run(updates=max(end // k, 40))
            found.append(float(made.parameters()[0].var()))
        theory = k * rate / (k * size * (2 - k * rate))
        case = f"{k} workers, η={k * rate:g}"
        laws.append(About("linear scaling: variance", case, theory, found[-1], 0.05))
    return laws
