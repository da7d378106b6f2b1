"""What goes wrong with a host, in every phase, under every policy: some cells of the matrix.

``python scripts/fault_matrix.py --hosts`` runs all 455.
"""

from __future__ import annotations

import os
from itertools import cycle

import pytest
from trials.host_faults import (
    KINDS,
    PHASES,
    HostCase,
    host_cases,
    told,
    try_all,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="hosts are forked processes"),
]


def some() -> list[HostCase]:
    """Each kind in each phase, the strategies and policies taking turns."""
    turns = cycle(dict.fromkeys((case.strategy, case.policy) for case in host_cases()))
    return [HostCase(*next(turns), kind, phase) for kind in KINDS for phase in PHASES]


def test_all_strategies_and_policies_are_tried() -> None:
    assert len({(case.strategy, case.policy) for case in some()}) == 13
    assert len(host_cases()) == 455


@pytest.mark.sampled(15)
@pytest.mark.parametrize("case", some(), ids=str)
def test_a_host_fails_and_nothing_is_lost_or_left(case: HostCase) -> None:
    for row, complaints in try_all([case]):
        assert complaints == [], told(row, complaints) + row.said
