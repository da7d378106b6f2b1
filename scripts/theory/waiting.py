"""Compare theory on waiting and staleness with the simulator.

Every figure comes from the policies and the server that train, in virtual time. P workers, service
times X of mean 1 (exponential unless said otherwise), X_{k:P} the k-th smallest of P, H_n the n-th
harmonic number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hybridtrain.engine.policies import FirstK, OnArrival, PipeSGD, Policy, make_policy
from hybridtrain.virtual.network import Conditions
from hybridtrain.virtual.service_times import ServiceTimes
from hybridtrain.virtual.virtual_world import VirtualWorld
from theory.law import About

EXPONENTIAL = ServiceTimes("exponential")
SHIFTED = ServiceTimes("shifted_exponential", shape=0.5)  # 1/2 + Exp of mean 1/2
PARETO = ServiceTimes("pareto", shape=2.5)
CONSTANT = ServiceTimes("constant")


def harmonic(n: int) -> float:
    """H_n."""
    return math.fsum(1 / i for i in range(1, n + 1))


# ---- expected time per update -------------------------------------------------------------------


def kth_of(k: int, n: int, times: ServiceTimes) -> float:
    """E[X_{k:n}] for the distributions above (David & Nagaraja, *Order Statistics*, 2003)."""
    exponential = harmonic(n) - harmonic(n - k)
    if times is EXPONENTIAL:
        return exponential
    if times is SHIFTED:
        return 0.5 + 0.5 * exponential
    assert times is PARETO
    a, log = 1 / 2.5, math.lgamma
    unscaled = math.exp(log(n + 1) + log(n - k + 1 - a) - log(n - k + 1) - log(n + 1 - a))
    return unscaled * (1 - a)


def per_update(
    policy: Policy, workers: int, times: ServiceTimes, updates: int, interrupt: bool = False
) -> float:
    """Virtual seconds per update."""
    world = VirtualWorld(policy, workers, times, conditions=Conditions(interrupt=interrupt))
    world.run(updates=updates)
    return world.now_s / updates


def four_schemes(updates: int, workers: int = 8, k: int = 4) -> list[About]:
    """Dutta et al. 2018 (arXiv:1803.01113), section 3: E[T] per update of all their schemes."""
    rates: list[tuple[str, Policy, Callable[[ServiceTimes], float], bool]] = [
        ("sync", make_policy("hybrid"), lambda x: kth_of(workers, workers, x), False),
        (f"{k}-sync", FirstK(k), lambda x: kth_of(k, workers, x), True),
        (f"{k}-batch-sync", FirstK(k, several=True), lambda x: k / workers, True),
        (f"{k}-async", FirstK(k, late="use"), lambda x: kth_of(k, workers, x), False),
        (f"{k}-batch-async", FirstK(k, "use", several=True), lambda x: k / workers, False),
        ("async", OnArrival(), lambda x: 1 / workers, False),
    ]
    laws = []
    for kind, times in (("exp", EXPONENTIAL), ("shifted", SHIFTED), ("pareto", PARETO)):
        for name, policy, theory, interrupt in rates:
            if kind != "exp" and name in (f"{k}-async", f"{k}-batch-sync"):
                continue  # for memoryless times only
            measured = per_update(policy, workers, times, updates, interrupt)
            laws.append(About("time per update", f"{name}, {kind}", theory(times), measured))
    return laws


def backup_workers(updates: int, needed: int = 8) -> list[About]:
    """Chen et al. 2016 (arXiv:1604.00981): N + b workers, the first N count."""
    laws = []
    for spare in (0, 1, 2, 4, 8):
        for kind, times in (("exp", EXPONENTIAL), ("shifted", SHIFTED)):
            n, policy = needed + spare, FirstK(needed)
            measured = per_update(policy, n, times, updates, interrupt=True)
            theory = kth_of(needed, n, times)
            laws.append(About("backup workers", f"{needed} of {n}, {kind}", theory, measured))
    return laws


# ---- staleness ----------------------------------------------------------------------------------


def softsync(updates: int, workers: int = 16) -> list[About]:
    """n-softsync (Zhang et al. 2016, arXiv:1511.05950): mean staleness (W - 1) / (W / n)."""
    laws = []
    for n in (1, 2, 4, 8, 16):
        world = VirtualWorld(make_policy({"name": "softsync", "n": n}), workers, EXPONENTIAL)
        world.run(updates=updates)
        theory = (workers - 1) / (workers // n)
        laws.append(About("softsync", f"n={n}", theory, world.server.statistics.mean_age()))
    return laws


def bounded_lead(mini_batches: int, workers: int = 8) -> list[About]:
    """Ho et al. 2013 (NIPS), section 2: nobody is more than s + 1 clocks ahead of the slowest."""
    laws = []
    for s in (0, 1, 2, 4, 8, 16):
        world = VirtualWorld(make_policy({"name": "ssp", "lead": s}), workers, EXPONENTIAL)
        world.run(mini_batches=mini_batches)
        gap = max(world.server.statistics.stats()["lead"]["max"])
        laws.append(About("largest lead", f"ssp, s={s}", s + 1, gap, 0.0))
        per_clock = world.now_s * workers / world.events
        theory = harmonic(workers) if s == 0 else seconds_per_clock(s, workers)
        laws.append(About("time per clock", f"ssp, s={s}", theory, per_clock))
    return laws


def seconds_per_clock(s: int, workers: int, clocks: int = 2000, runs: int = 100) -> float:
    """By the recursion that defines a bounded lead, without any simulator.

    A worker begins clock c when it has ended clock c - 1 and all have ended clock c - s - 1. After
    the first 300 clocks, in which the workers drift apart.
    """
    generator = torch.Generator().manual_seed(0)
    ends = torch.zeros(runs, workers, dtype=torch.float64)  # of each worker's last clock
    slowest = [torch.zeros(runs, 1, dtype=torch.float64)] * (s + 1)  # at the last s + 1 clocks
    marks = []
    for clock in range(clocks):
        draws = torch.rand(runs, workers, generator=generator, dtype=torch.float64)
        ends = torch.maximum(ends, slowest[0]) - torch.log1p(-draws)
        slowest = [*slowest[1:], ends.amax(dim=1, keepdim=True)]
        if clock + 1 in (300, clocks):
            marks.append(float(ends.mean()))
    return (marks[1] - marks[0]) / (clocks - 300)


# ---- asynchrony begets momentum -----------------------------------------------------------------


def ages_of(workers: int, updates: int, seed: int = 0) -> list[int]:
    """How old each contribution was, in the order of the updates, when nobody waits."""
    world = VirtualWorld(OnArrival(), workers, EXPONENTIAL, seed=seed)
    statistics, seen = world.server.statistics, list[int]()
    count = statistics.updated

    def note(ages: Sequence[int]) -> None:
        seen.extend(ages)
        count(ages)

    vars(statistics)["updated"] = note
    world.run(updates=updates)
    return seen


def momentum(
    replicas: int, counts: Sequence[int] = (2, 4, 8, 16), rate: float = 0.2, length: int = 60
) -> list[About]:
    """Mitliagkas et al. 2016 (arXiv:1605.09774): momentum 1 - 1/M and rate η/M of the mean iterate.

    Exponential workers have no memory, so a long run cut into pieces is as many short runs, each
    beginning with all workers at its first parameters. Momentum and rate are those which fit the
    mean path of w on w²/2 best.
    """
    laws = []
    for m in counts:
        ages = torch.tensor(ages_of(m, replicas * length)).view(replicas, length)
        path = mean_path(ages, rate)
        moves = path.diff()
        design = torch.stack([moves[:-1], -path[1:-1]], dim=1)
        fit = torch.linalg.lstsq(design, moves[1:, None]).solution.flatten().tolist()
        laws.append(About("momentum", f"M={m}", 1 - 1 / m, fit[0]))
        laws.append(About("rate", f"M={m}, η={rate}", rate / m, fit[1], 0.06))
    return laws


def mean_path(ages: torch.Tensor, rate: float) -> torch.Tensor:
    """Mean of w_0 .. w_T over runs of gradient descent on w²/2 with these (runs, T) ages."""
    runs, length = ages.shape
    w = torch.ones(runs, length + 1, dtype=torch.float64)
    for t in range(length):
        read = (t - ages[:, t]).clamp(min=0)
        w[:, t + 1] = w[:, t] - rate * w.gather(1, read[:, None]).squeeze(1)
    return w.mean(dim=0)


# ---- the edge of stability ----------------------------------------------------------------------


class Quadratic:
    """w²/2, from 1."""

    def parameters(self) -> list[torch.Tensor]:
        return [torch.ones(1, dtype=torch.float64)]

    def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [values[0].clone()]


def grows(rate: float, workers: int, updates: int, policy: Policy | None = None) -> bool:
    """Whether descent on w²/2 diverges with equal workers; by default they take turns."""

    def sgd(masters: list[torch.nn.Parameter]) -> Any:
        return torch.optim.SGD(masters, lr=rate)

    policy = policy or OnArrival()
    world = VirtualWorld(policy, workers, CONSTANT, task=Quadratic(), optimizer=sgd)
    heights = []
    for end in (updates // 2, updates):
        world.run(updates=end - 8 * workers)
        height = 0.0
        for update in range(end - 8 * workers, end):  # more than a period
            world.run(updates=update + 1)
            height = max(height, abs(float(world.parameters()[0])))
        heights.append(height)
    return heights[1] > heights[0]


def stability_edge(
    updates: int, halvings: int = 12, delays: Sequence[int] = (0, 1, 2, 3, 7)
) -> list[About]:
    """A delay of τ updates is stable up to a rate of 2 sin(π / (2(2τ + 1))), by bisection."""
    laws = []
    for delay in delays:
        theory = 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
        diverges = partial(grows, workers=delay + 1, updates=updates)
        edge = _edge(diverges, theory, halvings)
        laws.append(About("stability edge", f"τ={delay}", theory, edge, 0.003))
    return laws


def _edge(diverges: Callable[[float], bool], near: float, halvings: int) -> float:
    """The rate from which on it diverges, within a fifth of ``near``."""
    low, high = 0.8 * near, 1.2 * near
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (low, middle) if diverges(middle) else (middle, high)
    return (low + high) / 2


def one_update_behind(updates: int, halvings: int = 12) -> list[About]:
    """Rates up to which lock-step is stable on w²/2: where a root is as large as 1.

    One update behind: of z² - z + η. With extrapolation: of z³ - z² + 2η z - η.
    """
    edges = (
        (PipeSGD(delay=0), 2.0),
        (PipeSGD(warm_up=0), 1.0),
        (PipeSGD(warm_up=0, extrapolate=True), (math.sqrt(5) - 1) / 2),
    )
    laws = []
    for policy, theory in edges:
        diverges = partial(grows, workers=2, updates=updates, policy=policy)
        case = f"delay={policy.delay}{', extrapolate' * policy.extrapolate}"
        laws.append(
            About("edge of pipe_sgd", case, theory, _edge(diverges, theory, halvings), 0.003)
        )
    return laws
