"""Under ``hybrid``, everything a user can observe is what DDP would have given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.case import Case
from tests.parity.cases import CASES
from tests.parity.harness import STRATEGIES, Harness, Job

# Besides the wide ones: one of each kind of thing that no wide case has.
BY_DEFAULT = {
    *("optimizers/LBFGS", "steps/a hook after accumulation", "manual/a closure"),
    *("schedulers/per step while accumulating", "callbacks/a callback's own state"),
    *("callbacks/BasePredictionWriter", "callbacks/LearningRateFinder", "modules/tied parameters"),
    *("modules/random numbers of three libraries", "loaders/a batch sampler"),
    *("loaders/an IterableDataset, val_check_interval", "logged/TensorBoardLogger"),
    *("loops/a hook stops the training", "loops/fit twice on one trainer"),
}
assert CASES.keys() >= BY_DEFAULT


def _runs() -> list[Any]:
    """Three workers for those cases that need them, two for some; among the slow tests all."""
    return [
        pytest.param(case, strategy, workers, id=f"{case.id}-{strategy}-{workers}", marks=marks)
        for case in CASES.values()
        for strategy in STRATEGIES
        for workers, marks in (
            (2, _marks(case, case.id in BY_DEFAULT)),
            (3, _marks(case, case.wide)),
        )
    ]


def _marks(case: Case, by_default: bool) -> list[pytest.MarkDecorator]:
    marks = [] if by_default else [pytest.mark.slow]
    if case.gpu:
        marks.append(pytest.mark.gpu)
    return marks


@pytest.mark.parametrize(("case", "strategy", "workers"), _runs())
def test_the_strategy_gives_what_the_reference_gives(
    harness: Harness, case: Case, strategy: str, workers: int
) -> None:
    if case.gpu and torch.cuda.device_count() < workers:
        pytest.skip(f"needs {workers} CUDA devices")
    harness.check_end(Job(case, case.versus, workers))
    harness.check_end(Job(case, strategy, workers))
    verdict = harness.verdict(case, strategy, workers, case.versus)
    allowed = case.allowed(workers)
    assert verdict.compared > 0, "nothing was compared"
    assert verdict.grade <= allowed, (
        f"{case.id} under {strategy} with {workers} workers is not {allowed}, but "
        f"{verdict.grade} against {case.versus}:\n{verdict.explain()}"
    )
