"""The scheduler of DeepMind's asyncdiloco notebook, to which Liu et al. 2024 refer, reproduced.

It is written down again here in 30 lines: simulated finishing times, a grace period that knows what
will come, and shards of the data of which a worker takes the one visited least.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from hybridtrain.engine.exchanges import make_exchange
from hybridtrain.engine.policies import Grace, make_policy
from hybridtrain.engine.protocol.events import Event
from hybridtrain.engine.protocol.facts import Fact, Order, Pushed
from hybridtrain.engine.protocol.messages import Clip, Visits
from hybridtrain.engine.updates.groups import Groups
from hybridtrain.engine.updates.named import make_update
from hybridtrain.errors import UserError
from hybridtrain.virtual.network import Conditions
from hybridtrain.virtual.script import Dies, Joins, Script
from hybridtrain.virtual.service_times import ServiceTimes
from hybridtrain.virtual.training_task import Scheduled, Timetable
from hybridtrain.virtual.virtual_world import VirtualWorld

# Hundredths of a second per step of its four workers, 0.58 s and so on: sums are exact, or rounding
# would say who is first where two come at the same time.
NOTEBOOK = (58.0, 75.0, 151.0, 333.0)
STEPS, SHARDS, LENGTH = 20, 4, 400_000


class Schedule(NamedTuple):
    """When who handed over, how stale that was, and who visited which mini-batches of a shard."""

    arrivals: list[tuple[float, int]]
    ages: Counter[int]
    visits: list[tuple[int, int, int]]  # worker, shard, its first mini-batch there


def notebooks(seconds: Sequence[float], window: float, rounds: int) -> Schedule:
    """As the notebook has it; ties between shards go to the first, not to one drawn at random."""
    found, now, opened, version = Schedule([], Counter(), []), 0.0, None, 0
    finish, busy, read = [0.0] * len(seconds), [False] * len(seconds), [0] * len(seconds)
    visited, done = [0] * SHARDS, [0] * SHARDS
    while len(found.arrivals) < rounds:
        ends = {finish[worker]: worker for worker in reversed(range(len(busy))) if busy[worker]}
        first = min(ends, default=math.inf)
        if not ends or (opened is not None and first - opened > window):
            opened = None
            for worker in range(len(busy)):
                if not busy[worker]:
                    shard = visited.index(min(visited))
                    found.visits.append((worker, shard, done[shard]))
                    visited[shard] += 1
                    done[shard] += STEPS
                    busy[worker], read[worker] = True, version
                    finish[worker] += STEPS * seconds[worker]
            continue
        worker, now = ends[first], max(now, first)
        opened = now if opened is None else opened
        found.arrivals.append((now, worker))
        found.ages[version - read[worker]] += 1
        version, busy[worker] = version + 1, False
        finish = [at if active else now for at, active in zip(finish, busy, strict=True)]
    return found


class Watched(Grace):
    """Writes down when contributions come."""

    def __init__(self, window_s: float) -> None:
        super().__init__(window_s)
        self.arrivals: list[tuple[float, int]] = []

    def on(self, fact: Fact) -> Sequence[Order]:
        if isinstance(fact, Pushed):
            self.arrivals.append((fact.at_s, fact.worker))
        return super().on(fact)


class Counting:
    """Nothing to learn: one number, and a note of who has had which mini-batch (of one sample)."""

    clip: Clip | None = None
    loss = 0.0

    def __init__(self, workers: int) -> None:
        self.timetable = Timetable(LENGTH, (1,) * workers)
        self.drawn: dict[int, list[int]] = {worker: [] for worker in range(workers)}
        self.order: list[tuple[int, int]] = []  # worker, position, where a visit begins

    def parameters(self) -> list[torch.Tensor]:
        return [torch.zeros(1)]

    def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.zeros(1)]

    def study(self, worker: int, epoch: int, positions: Sequence[int]) -> float:
        if len(self.drawn[worker]) % STEPS == 0:
            self.order.append((worker, positions[0]))
        self.drawn[worker] += positions
        return 1.0

    def updated(self, version: int) -> Groups | None:
        return None

    def epoch_ended(self) -> Groups | None:
        return None

    def groups(self) -> Groups:
        return ()

    def own_schedules(self) -> Scheduled:
        return self


def ours(seconds: Sequence[float], window: float, rounds: int) -> Schedule:
    """The same from the policy, the queue and the exchange that train, in virtual time."""
    policy, task = Watched(window), Counting(len(seconds))
    world = VirtualWorld(
        policy,
        len(seconds),
        ServiceTimes("constant", slower=dict(enumerate(seconds))),
        task=task,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        exchange=make_exchange({"name": "movement", "every": STEPS}),
        conditions=Conditions(foresight=True, visits=Visits(SHARDS, STEPS)),
    )
    world.run(updates=rounds)
    for drawn in task.drawn.values():  # each visit is a run of mini-batches
        for begin in range(0, len(drawn), STEPS):
            visit = drawn[begin : begin + STEPS]
            assert visit == list(range(visit[0], visit[0] + len(visit)))
    size = LENGTH // SHARDS
    visits = [(worker, position // size, position % size) for worker, position in task.order]
    return Schedule(policy.arrivals, world.server.statistics.ages, visits)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("seconds", "window"),
    [
        (NOTEBOOK, 50.0),
        pytest.param(NOTEBOOK, 0.0, marks=pytest.mark.slow),
        (NOTEBOOK, 100_000.0),  # all wait for all
        ((0.5, 0.75, 1.5, 3.25, 0.5), 2.5),  # ties, also with the window's end
        ((0.25, 0.25, 1.0), 5.0),  # a window as long as a round
    ],
)
def test_the_schedule_is_the_notebooks(seconds: Sequence[float], window: float) -> None:
    expected, found = notebooks(seconds, window, 120), ours(seconds, window, 120)
    assert [worker for _, worker in found.arrivals[:120]] == [w for _, w in expected.arrivals]
    times = [at_s for at_s, _ in expected.arrivals]
    assert [at_s for at_s, _ in found.arrivals[:120]] == times
    assert found.visits[: len(expected.visits)] == expected.visits
    if len(found.arrivals) == 120:
        assert found.ages == expected.ages


class Learning(Counting):
    """One number per shard, drawn towards what the mini-batch's place in the data says."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.places = [0] * workers

    def parameters(self) -> list[torch.Tensor]:
        return [torch.linspace(-1, 1, SHARDS)]

    def study(self, worker: int, epoch: int, positions: Sequence[int]) -> float:
        self.places[worker] = positions[0]
        return super().study(worker, epoch, positions)

    def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [(values[0] - math.sin(self.places[worker])).sin()]


def test_with_an_endless_window_the_toy_is_synchronous_however_fast_its_workers_are() -> None:
    """The notebook's check of itself: with a window of 1,000 s it has the numbers of lock-step."""
    ends = []
    for seconds in ((1.0, 1.0, 1.0, 1.0), NOTEBOOK):
        world = VirtualWorld(
            make_policy({"name": "grace", "window_s": math.inf, "together": True}),
            4,
            ServiceTimes("constant", slower=dict(enumerate(seconds))),
            task=Learning(4),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            exchange=make_exchange({"name": "movement", "every": STEPS}),
            update=make_update({"name": "sgd", "lr": 0.7, "momentum": 0.9}),
            conditions=Conditions(visits=Visits(SHARDS, STEPS)),
        )
        world.run(updates=8)
        ends += world.parameters()
        assert world.now_s == 8 * STEPS * max(seconds)
    assert torch.equal(*ends) and not torch.equal(ends[0], Learning(4).parameters()[0])


def test_without_foresight_who_waits_goes_on_at_the_end_of_the_window() -> None:
    policy = Watched(0.5)
    world = VirtualWorld(policy, 2, ServiceTimes("constant", slower={1: 1.6}))
    world.run(updates=3)
    assert policy.arrivals[:3] == [(1.0, 0), (1.6, 1), (2.5, 0)]
    with_it = Watched(0.5)
    times = ServiceTimes("constant", slower={1: 1.6})
    VirtualWorld(with_it, 2, times, conditions=Conditions(foresight=True)).run(updates=3)
    assert with_it.arrivals[:3] == [(1.0, 0), (1.6, 1), (2.0, 0)]


def test_servers_see_time_pass_in_order_though_foresight_takes_it_back() -> None:
    """Also of a death in a window, after the last arrival."""
    deaths = Script((Dies(3.0, 2), Joins(17.9, 2), Dies(24.2, 2)))
    world = VirtualWorld(
        Grace(4.0),
        3,
        ServiceTimes("lognormal", slower={1: 30.0, 2: 30.0}),
        conditions=Conditions(script=deaths, foresight=True),
    )
    times, tell = list[float](), world.server.on

    def on(event: Event) -> Any:
        times.append(world.now_s)
        return tell(event)

    vars(world.server)["on"] = on
    world.run(updates=40)
    assert len(times) > 40 and times == sorted(times)


def test_workers_with_fixed_shares_cannot_draw_from_data_shards() -> None:
    with pytest.raises(UserError, match=r"data_shards was given, but .* fixed shares"):
        VirtualWorld(
            make_policy("hybrid"),
            2,
            ServiceTimes("constant"),
            task=Counting(2),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            conditions=Conditions(visits=Visits(2, 2)),
        )
