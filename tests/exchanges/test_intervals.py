"""When a worker exchanges: always after so many steps, later than at first, by its speed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridtrain.engine.exchanges import begin_policy, make_exchange
from hybridtrain.engine.exchanges.movement import interval
from hybridtrain.engine.policies import make_policy
from hybridtrain.errors import UserError
from tests.exchanges.test_own_parameters import Two, momentum, world


def lengths(given: Any, rates: list[float]) -> list[int]:
    made = interval(given)
    return [made.length(SimpleNamespace(rate=r, worker=0, workers=1)) for r in rates]  # type: ignore


def test_an_interval_changes_from_the_given_step_on() -> None:
    assert lengths({"then": 4, "at": 3}, [0.1] * 6) == [1, 1, 1, 4, 4, 4]
    assert lengths({"then": 4, "at": 1, "first": 2}, [0.1] * 3) == [2, 4, 4]


def test_an_interval_changes_when_the_learning_rate_falls_after_its_warm_up() -> None:
    rates = [0.1, 0.2, 0.4, 0.4, 0.04, 0.04, 0.5]
    assert lengths({"then": 8, "at": "first_decay"}, rates) == [1, 1, 1, 1, 1, 8, 8]


def test_an_interval_that_changes_at_a_step_goes_on_from_its_saved_state() -> None:
    local: Any = SimpleNamespace(rate=0.1)
    first = interval({"then": 5, "at": 3})
    assert [first.length(local) for _ in range(2)] == [1, 1]
    second = interval({"then": 5, "at": 3})
    second.load_state(first.state())
    assert [second.length(local) for _ in range(3)] == [1, 5, 5]


def test_intervals_by_the_speed_of_workers_are_rounded_down_and_at_least_1() -> None:
    """DyLU, with the seconds of the toy of Liu et al. 2024."""
    made: Any = interval({"longest": 20, "seconds_per_step": [0.58, 0.75, 1.51, 3.33]})
    assert made.lengths == (20, 15, 7, 3)
    slow: Any = interval({"longest": 2, "seconds_per_step": [1.0, 90.0]})
    assert slow.lengths == (2, 1)


def test_an_interval_that_grows_at_a_step_is_hybrid_before_and_local_sgd_afterwards() -> None:
    """Momentum, too: it is linear in the gradients, so the mean of all workers' is hybrid's."""
    task = Two(3)
    later, hybrid = (
        world(task, 3, momentum, {"name": "movement", "every": {"then": 4, "at": 6}}),
        world(task, 3, momentum, "gradient"),
    )
    for each in (later, hybrid):
        each.run(updates=6)
    assert later.now_s == hybrid.now_s == 6
    for found, wanted in zip(later.parameters(), hybrid.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    later.run(updates=8)
    assert later.now_s == 6 + 2 * 4


def test_each_worker_has_its_own_number_of_steps() -> None:
    made = world(Two(2), 2, momentum, {"name": "movement", "every": [6, 2]}, policy="async")
    made.run(until_s=12.5)
    assert made.server.statistics.stats()["updates"] == 12 // 6 + 12 // 2
    assert [made.server.statistics.stats()["samples_per_worker"]] == [[12, 12]]


@pytest.mark.parametrize(
    ("every", "fragments"),
    [
        (True, ["exchange.every=True", "from 1 on"]),
        ([], ["exchange.every=[]", "from 1 on"]),
        ([4, 0], ["exchange.every=[4, 0]", "from 1 on"]),
        ("8", ["exchange.every='8'", "from 1 on"]),
        ({"than": 4}, ["exchange.every={'than': 4}", "{then: a whole number"]),
        ({"then": 4, "att": 1}, ["did you mean at?"]),
        ({"then": 4}, ["exchange.every.at=None", "first_decay"]),
        ({"then": 4, "at": 0}, ["exchange.every.at=0", "from 1 on"]),
        ({"then": 0, "at": 4}, ["exchange.every.then=0"]),
        ({"longest": 8}, ["exchange.every.seconds_per_step=None", "service_s"]),
        ({"longest": 8, "seconds_per_step": [1.0, -1.0]}, ["seconds_per_step=[1.0, -1.0]"]),
        ({"longest": 0, "seconds_per_step": [1.0]}, ["exchange.every.longest=0"]),
    ],
)
def test_an_interval_that_makes_no_sense_is_refused(every: Any, fragments: list[str]) -> None:
    with pytest.raises(UserError) as error:
        make_exchange({"name": "movement", "every": every})
    for fragment in fragments:
        assert fragment in str(error.value)


def test_there_is_one_number_for_each_worker_or_one_for_all() -> None:
    exchange = make_exchange({"name": "movement", "every": [4, 2, 1]})
    with pytest.raises(UserError, match=r"every=\[4, 2, 1\] was given, but .* 2 workers"):
        begin_policy(make_policy("async"), exchange, 2)
    assert begin_policy(make_policy("async"), exchange, 3).gathers == 2
    alone = make_exchange({"name": "movement", "every": [4]})
    with pytest.raises(UserError, match=r"every=\[4\] was given, but .* 2 workers"):
        begin_policy(make_policy("async"), alone, 2)


def test_errors_about_seconds_per_step_show_the_value_that_was_given() -> None:
    every = {"longest": 8, "seconds_per_step": [1.0, 2.0]}
    exchange = make_exchange({"name": "movement", "every": every})
    given = r"exchange.every.seconds_per_step=\[1.0, 2.0\] was given"
    with pytest.raises(UserError, match=rf"{given}, but there are 3 workers"):
        begin_policy(make_policy("async"), exchange, 3)
    with pytest.raises(UserError, match=rf"{given}, .*step equally often"):
        begin_policy(make_policy("hybrid"), exchange, 2)


def test_in_lock_step_all_exchange_equally_often() -> None:
    unequal = make_exchange({"name": "movement", "every": [4, 8]})
    with pytest.raises(UserError, match=r"every=\[4, 8\].*step equally often.*policy=async or"):
        begin_policy(make_policy("hybrid"), unequal, 2)
    begin_policy(make_policy("hybrid"), make_exchange({"name": "movement", "every": [4, 4]}), 2)
