"""From which mini-batch on the update is hidden."""

from __future__ import annotations

import math

import pytest
from benchmarks.crossover import Costs, LinearFit, crossover

FORWARD, BACKWARD = LinearFit(0.01, 0.01), LinearFit(0.02, 0.02)


def costs(out_s: float, update_s: float, back_s: float, **rest: float) -> Costs:
    return Costs(out_s, update_s, back_s, FORWARD, BACKWARD, **rest)


def test_a_line_through_measurements() -> None:
    line = LinearFit.through([(1, 0.3), (2, 0.5), (4, 0.9)])
    assert (line.fixed_s, line.sample_s) == pytest.approx((0.1, 0.2))
    assert line.reaches(line.at(7)) == pytest.approx(7)
    assert LinearFit.through([(1, 0.5), (2, 0.4)]).sample_s == 0.0


@pytest.mark.parametrize(
    ("each", "samples"),
    [
        ((0.24, 0.1, 0.05), 11.0),  # the way out needs 0.02 + 11 × 0.02 s of backward
        ((0.1, 0.42, 0.05), 20.0),  # the update does
        ((0.1, 0.1, 0.31), 30.0),  # the way back needs 0.01 + 30 × 0.01 s of forward
        ((0.01, 0.01, 0.01), 0.0),
    ],
)
def test_what_takes_longest_says_when_all_is_hidden(
    each: tuple[float, float, float], samples: float
) -> None:
    found = costs(*each)
    assert crossover(found) == pytest.approx(samples)
    assert found.exposed_s(samples + 1) == pytest.approx(found.tail_s)
    if samples:
        assert found.exposed_s(samples - 1) > found.tail_s


def test_where_no_size_takes_longer_nothing_is_ever_hidden() -> None:
    fixed = LinearFit(0.01, 0.0)
    assert crossover(Costs(0.1, 0.1, 0.1, fixed, fixed)) == math.inf


def test_apart_the_update_is_paid_for_at_every_size() -> None:
    found = costs(0.1, 0.2, 0.3, last_part=0.0)
    for samples in (1, 10, 100, 1000):
        assert found.step_apart_s(samples) >= found.step_s(samples)
    whole = FORWARD.at(1000) + BACKWARD.at(1000)
    assert found.step_apart_s(1000) == pytest.approx(whole + 0.5)
    assert found.step_s(1000) == pytest.approx(whole)
