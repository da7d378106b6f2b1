"""Under ``hybrid``, everything a user can observe is what DDP would have given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.case import Case
from tests.parity.cases import CASES
from tests.parity.harness import STRATEGIES, Harness, Job
from tests.parity.places import sharing

# Besides the wide ones: one of each kind of thing that no wide case has.
BY_DEFAULT = {
    *("optimizers/LBFGS", "steps/a hook after accumulation", "manual/a closure"),
    *("schedulers/per step while accumulating", "callbacks/a callback's own state"),
    *("callbacks/BasePredictionWriter", "callbacks/LearningRateFinder", "modules/tied parameters"),
    *("modules/random numbers of three libraries", "loaders/a batch sampler"),
    *("loaders/an IterableDataset, val_check_interval", "logged/TensorBoardLogger"),
    *("loops/a hook stops the training", "loops/fit twice on one trainer"),
}
# Wide ones of which another wide one has nearly all.
NOT_BY_DEFAULT = {
    *("optimizers/SGD", "steps/on_after_backward reads gradients", "manual/one optimizer"),
    *("modules/parameters unused in some steps", "modules/parameters unused in some workers"),
    *("loaders/45 samples", "modules/a queue in a buffer", "steps/uneven loss weights"),
}
assert CASES.keys() >= BY_DEFAULT | NOT_BY_DEFAULT


def _runs() -> list[Any]:
    """Three workers for those cases that need them, two for some; among the slow tests all."""
    return [
        pytest.param(case, strategy, workers, id=f"{case.id}-{strategy}-{workers}", marks=marks)
        for case in CASES.values()
        for strategy in STRATEGIES
        for workers, marks in (
            (2, _marks(case, case.id in BY_DEFAULT)),
            (3, _marks(case, case.wide and case.id not in NOT_BY_DEFAULT)),
        )
    ]


def _marks(case: Case, by_default: bool) -> list[pytest.MarkDecorator]:
    marks = [] if by_default else [pytest.mark.slow]
    if case.gpu:
        marks.append(pytest.mark.gpu)
    return marks


@pytest.mark.wide
@pytest.mark.sampled(100)
@pytest.mark.few(17)
@pytest.mark.parametrize(("case", "strategy", "workers"), _runs())
def test_the_strategy_gives_what_the_reference_gives(
    harness: Harness, case: Case, strategy: str, workers: int
) -> None:
    ours = Job(case, strategy, workers)
    theirs = reference(case, workers, torch.cuda.device_count())
    if theirs is None:
        pytest.skip(f"needs {workers} CUDA devices")
    harness.check_end(theirs)
    harness.check_end(ours)
    verdict = harness.verdict_on(ours, theirs)
    allowed = case.allowed(workers)
    assert verdict.compared > 0, "nothing was compared"
    assert verdict.grade <= allowed, (
        f"{case.id} under {strategy} with {workers} workers is not {allowed}, but "
        f"{verdict.grade} against {theirs.strategy}:\n{verdict.explain()}"
    )


def reference(case: Case, workers: int, n_gpus: int) -> Job | None:
    """What a run is compared with; ``None``: nothing that is here.

    On too few GPUs, DDP cannot run, and our workers share one: a CPU rounds as it does only in
    float32, and one worker alone is the reference for what no CPU can do.
    """
    if not case.gpu or n_gpus >= workers:
        return Job(case, case.versus, workers)
    if not n_gpus:
        return None
    if not case.on_cpu:
        return Job(case, "union", workers)
    exact = case.trainer(Path()).get("precision") == "32-true"
    return Job(case, case.versus, workers, "cpu") if exact else None


@pytest.mark.parametrize(
    ("precision", "n_gpus", "expected"),
    [
        ("32-true", 0, None),
        ("32-true", 1, ("ddp", "cpu")),
        ("32-true", 2, ("ddp", "cuda")),
        ("16-mixed", 1, ("union", "cuda")),
        ("16-mixed", 3, ("ddp", "cuda")),
        ("bf16-mixed", 1, None),
    ],
)
def test_on_too_few_gpus_the_reference_is_another(
    precision: str, n_gpus: int, expected: tuple[str, str] | None
) -> None:
    found = reference(CASES[f"precision/{precision} on CUDA"], 2, n_gpus)
    assert (found and (found.strategy, found.place)) == expected


def test_on_too_few_gpus_workers_share_one() -> None:
    options = {"strategy": "hybrid", "devices": 3}
    assert sharing(options, 3) == options
    shared = sharing(options, 2)
    assert shared["devices"] == 1 and shared["strategy"].workers_per_device == 3
    assert sharing({"strategy": "auto", "devices": 1}, 1) == {"strategy": "auto", "devices": 1}
