"""Workers that run freely, are lost and come back, at random: the run comes to its end."""

from __future__ import annotations

import random

import pytest

from tests.support.free_runs import POLICIES, FreeRun


def walk(policy: str, seeds: range) -> None:
    for seed in seeds:
        FreeRun(random.Random(f"{policy} {seed}"), policy).run()


@pytest.mark.few(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_whoever_is_lost_the_others_do_all_that_is_left(policy: str) -> None:
    walk(policy, range(20))


@pytest.mark.slow  # ten seconds
@pytest.mark.parametrize("policy", POLICIES)
def test_whoever_is_lost_the_others_do_all_that_is_left_in_many_runs(policy: str) -> None:
    walk(policy, range(20, 400))
