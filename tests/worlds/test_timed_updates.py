"""Updates that take time, in virtual time: where all wait for them nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from hybridtrain.cli.commands.simulate_options import parse
from hybridtrain.engine.policies import BoundedStaleness, OnArrival, Policy, WaitForAll, make_policy
from hybridtrain.errors import UserError
from hybridtrain.virtual import simulate
from hybridtrain.virtual.network import Conditions, Network
from hybridtrain.virtual.script import Dies, Joins, Script
from hybridtrain.virtual.service_times import ServiceTimes
from hybridtrain.virtual.virtual_world import VirtualWorld
from tests.worlds.test_dial_in_virtual_time import ADAM, UNEQUAL, Regression, Tally, world

CONSTANT = ServiceTimes("constant")


class Ones:
    """Every gradient is one, so that plain SGD counts contributions."""

    def parameters(self) -> list[torch.Tensor]:
        return [torch.zeros(2, dtype=torch.float64)]

    def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.ones_like(values[0])]


def counting(policy: Policy, workers: int, times: Any = CONSTANT, **conditions: Any) -> Any:
    sgd = partial(torch.optim.SGD, lr=1.0)
    under = Conditions(**conditions)
    return VirtualWorld(policy, workers, times, task=Ones(), optimizer=sgd, conditions=under)


def test_a_timer_that_is_due_within_an_update_is_heard_behind_it() -> None:
    made = counting(make_policy("grace"), 2, update_s=2.0)
    made.run(updates=4)
    assert made.now_s == 10.0, "two mini-batches, and two times two updates"
    assert made.server.statistics.stats()["updates"] == 4


@pytest.mark.parametrize("policy", [WaitForAll, lambda: BoundedStaleness(0)])
def test_where_all_wait_an_update_that_takes_time_changes_nothing_but_time(policy: Any) -> None:
    """To the bit: parameters, losses, and what is counted; through epochs with uneven ends."""
    made = []
    for update_s in (0.0, 0.7):
        under = Conditions(Network(latency_s=0.25), update_s=update_s)
        each = world(policy(), Regression(3), ADAM, conditions=under)
        each.run(epochs=3)
        made.append(each)
    plain, timed = made
    for found, wanted in zip(timed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, wanted)
    stats = [each.server.statistics.stats() for each in made]
    for name in ("updates", "samples", "samples_per_worker", "staleness", "dropped"):
        assert stats[0][name] == stats[1][name], name
    assert timed.now_s == pytest.approx(plain.now_s + 0.7 * stats[0]["updates"])


@pytest.mark.parametrize("policy", ["hybrid", "backup", "k_batch_async", "ssp", "async"])
def test_epochs_without_a_task_take_as_long_as_those_of_one(policy: str) -> None:
    under = Conditions(Network(latency_s=0.25), update_s=0.7)
    task = world(make_policy(policy), Regression(3), ADAM, conditions=under)
    length = Regression(3).timetable.length
    plain = VirtualWorld(make_policy(policy), 3, UNEQUAL, 4, conditions=under, epoch=length)
    for each in (task, plain):
        each.run(epochs=3)
    assert plain.now_s == task.now_s and plain.epochs == 3
    stats = [each.server.statistics.stats() for each in (plain, task)]
    for name in ("updates", "samples", "waiting_share", "staleness", "dropped"):
        assert stats[0][name] == stats[1][name], name
    assert stats[0]["samples"] == 3 * length


def test_where_nobody_waits_the_server_makes_one_update_after_the_other() -> None:
    """Ten workers bring ten contributions a second, and the server is done with four."""
    busy = counting(OnArrival(), 10, update_s=0.25)
    busy.run(updates=200)
    assert busy.now_s == pytest.approx(1.0 + 200 * 0.25)
    assert float(busy.parameters()[0][0]) == -200.0
    stats = busy.server.statistics.stats()
    assert sum(stats["waiting_share"]) / 10 == pytest.approx(1 - 4 / 10, abs=0.02)
    assert stats["staleness"]["max"] == 9, "as stale as if updates took no time"


def test_a_server_that_is_seldom_busy_delays_by_its_own_time() -> None:
    rare = counting(OnArrival(), 1, update_s=0.25)
    rare.run(updates=8)
    assert rare.now_s == pytest.approx(8 * 1.25)


POLICIES: list[Any] = ["hybrid", "async", {"name": "ssp", "lead": 2}, {"name": "backup", "k": 3}]
POLICIES += [{"name": "k_async", "k": 2}, {"name": "k_batch_sync", "k": 2}]
POLICIES += [{"name": "backup", "k": "auto"}, {"name": "softsync", "n": 2}, "synchronous"]


@pytest.mark.few(3)
@pytest.mark.parametrize("given", POLICIES, ids=str)
def test_workers_that_die_and_come_back_during_updates_neither_hang_nor_count_twice(
    given: Any,
) -> None:
    times = ServiceTimes("exponential")
    script = Script(
        tuple(Dies(3.1 + 7 * n, n % 5) for n in range(5))
        + tuple(Joins(4.0 + 7 * n, n % 5) for n in range(5))
    )
    busy = counting(make_policy(given), 5, times, script=script, update_s=0.3, interrupt=True)
    busy.run(updates=150)
    stats = busy.server.statistics.stats()
    assert stats["updates"] == 150
    counted = sum(stats["staleness"]["histogram"].values())
    assert counted >= 150 and float(busy.parameters()[0][0]) == pytest.approx(-150.0)


def test_time_alone_and_gradients_take_the_same_time() -> None:
    under = Conditions(update_s=0.3)
    alone = VirtualWorld(OnArrival(), 4, ServiceTimes("exponential"), conditions=under)
    real = counting(OnArrival(), 4, ServiceTimes("exponential"), update_s=0.3)
    for each in (alone, real):
        each.run(updates=100)
    assert alone.now_s == real.now_s
    known, told = (each.server.statistics.stats() for each in (alone, real))
    assert told.pop("handed_over") != known.pop("handed_over")  # time alone has no size
    assert known == told


def test_the_command_line_takes_the_time_of_an_update() -> None:
    plan, _ = parse(["strategy=async", "workers=8", "mini_batches=400", "update_s=0.5"])
    row = simulate(plan, plan.strategies[0], 8)
    assert row.updates_per_s == pytest.approx(2.0, rel=0.02)
    with pytest.raises(UserError, match=r"update_s=-1 was given; it must be a number from 0 on"):
        parse(["update_s=-1"])


@pytest.mark.parametrize("given", ["async", {"name": "k_async", "k": 2}], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_a_queue_is_worked_off_once_though_workers_die_while_updates_are_made(
    given: Any, seed: int
) -> None:
    """One mini-batch counts for its samples, or is done again by somebody: never both."""
    script = Script(tuple(Dies(1.0 + 1.3 * n + 0.1 * seed, n) for n in range(3)))
    task, sgd = Tally(60, 4, n_workers=5), partial(torch.optim.SGD, lr=1.0)
    made = world(make_policy(given), task, sgd, seed=seed,
                 conditions=Conditions(script=script, update_s=0.6))  # fmt: skip
    made.run(epochs=1)
    applied = -made.parameters()[0]
    assert made.server.statistics.samples == 60
    assert float(applied.min()) > 0, "every sample has counted"
    if given == "async":  # each mini-batch alone makes an update
        torch.testing.assert_close(applied, torch.full_like(applied, 0.25), rtol=0, atol=1e-12)
