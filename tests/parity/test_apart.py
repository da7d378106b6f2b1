"""The cases again, with workers that compute on the stand-in for a device.

The reference computes on the CPU, with DDP or as one worker. What only a device can do (16-mixed)
is compared with one worker on the stand-in.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest

from tests.parity.case import Case, Grade
from tests.parity.cases import CASES
from tests.parity.harness import STRATEGIES, Harness, Job
from tests.parity.places import APART

OWN_DICE = "the device draws random numbers of its own, the reference those of the CPU"
AHEAD = "mini-batches that a process has read are moved ahead of their turn: other hooks are called"
NOT_ALIKE = {
    "steps/hooks change gradients": OWN_DICE,
    "modules/dropout": OWN_DICE,
    "modules/random numbers of three libraries": OWN_DICE,
    "modules/activations computed again": OWN_DICE,
    "modules/attention": OWN_DICE,
    "loaders/*worker process*": AHEAD,
    "callbacks/DeviceStatsMonitor": "there are no statistics of the stand-in",
    "logged/torchmetrics": "torch moves a module of the stand-in only if nothing else holds it",
}


def _runs() -> list[Any]:
    return [
        pytest.param(
            case,
            strategy,
            workers,
            id=f"{case.id}-{strategy}-{workers}",
            marks=_marks(case),
        )
        for case in CASES.values()
        for strategy in STRATEGIES
        for workers in ((2, 3) if case.gpu else (2,))
    ]


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    reasons = [why for pattern, why in NOT_ALIKE.items() if fnmatchcase(case.id, pattern)]
    return [pytest.mark.skip(reason=why) for why in reasons]


def reference(case: Case, workers: int) -> Job:
    """What the run on the stand-in is compared with."""
    if case.on_cpu:
        return Job(case, case.versus, workers, "cpu")
    return Job(case, "union", workers, APART)


# Not ``case``, ``strategy``, ``workers``: those are started in advance, elsewhere.
@pytest.mark.sampled(50)
@pytest.mark.slow  # tests/lightning/devices has tests of the stand-in that run by default
@pytest.mark.parametrize(("what", "under", "n_workers"), _runs())
def test_workers_on_a_device_give_what_the_reference_gives(
    harness: Harness, what: Case, under: str, n_workers: int
) -> None:
    ours, theirs = Job(what, under, n_workers, APART), reference(what, n_workers)
    harness.check_end(theirs)
    harness.check_end(ours)
    verdict = harness.verdict_on(ours, theirs)
    assert verdict.compared > 0, "nothing was compared"
    assert verdict.grade <= max(what.expect, Grade.ROUNDING), (
        f"{what.id} under {under} with {n_workers} workers on the stand-in is {verdict.grade} "
        f"against {theirs.strategy}:\n{verdict.explain()}"
    )
