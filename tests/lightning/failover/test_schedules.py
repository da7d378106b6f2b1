"""Real runs in which workers are lost at random, and signals come while they are away."""

from __future__ import annotations

import pytest
from trials.schedule import drawn, drawn_alone, try_plan, try_schedule

POLICIES = ("hybrid", "ssp", "async", "backup")


def test_a_schedule_is_the_same_whenever_it_is_drawn() -> None:
    assert drawn("hybrid", 3) == drawn("hybrid", 3) != drawn("hybrid", 4)


@pytest.mark.sampled(15)
@pytest.mark.slow  # about four seconds each
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(20))
def test_each_restart_that_is_announced_happens_or_the_run_ends_and_says_why(
    policy: str, seed: int
) -> None:
    seen = try_schedule(policy, seed)
    assert not seen.complaints, f"{seen.plan}\n{seen.output}"


@pytest.mark.slow
@pytest.mark.parametrize("on_failure", ["restart", "continue"])
@pytest.mark.parametrize("policy", ["hybrid", "async", "hogwild"])
def test_each_sample_counts_once_where_workers_make_updates_and_are_killed(
    policy: str, on_failure: str
) -> None:
    seen = try_plan(drawn_alone(policy, 0, on_failure), 0)
    assert seen.struck and not seen.complaints, f"{seen.plan}\n{seen.output}"
