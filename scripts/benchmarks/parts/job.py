"""A whole task to a metric: from the command to its end, start and validation included.

Training stops after the validation in which the metric is reached (``experiment=to_target``), so
what counts is how fast it learns, not only how fast it steps. ``hybrid`` takes the same steps as
``ddp``; ``async`` other ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.command import one_run
from benchmarks.frame import Frame
from benchmarks.rows import NOTHING_ASKED, Row, Skipped
from benchmarks.runs import Job

# name: (how often at the most, what to train)
TASKS: dict[str, tuple[int, list[str]]] = {
    "digits to 97 % of the validation set": (
        2,
        ["task=digits", "target.value=0.97"],
    ),
    "speech (spoken digits) to 50 % of words wrong": (
        1,
        ["task=speech", "target.value=0.5"],
    ),
}


def rows(frame: Frame) -> Iterator[Row | Skipped]:
    """Each task under ``hybrid`` and ``async``, against ``ddp``; the long one once, not thrice."""
    quick = frame.options.quick
    for work, (most, overrides) in list(TASKS.items())[: 1 if quick else None]:
        ours = [_job(name, overrides) for name in ("hybrid", "async")[: 1 if quick else 2]]
        against = [(_job("ddp", overrides), NOTHING_ASKED)]
        repeats = min(most, frame.options.repeats)
        yield from frame.alternate(
            f"{work}, 2 workers",
            ours,
            against,
            unit="s",
            per=1.0,
            repeats=repeats,
        )


def _job(strategy: str, overrides: list[str]) -> Job:
    common = ["experiment=to_target", "trainer.devices=2", "trainer.accelerator=cpu", "test=false"]
    arguments = {"strategy": strategy, "overrides": [*overrides, *common]}
    return Job(strategy, "benchmarks.parts.job:seconds", arguments)


def seconds(strategy: str, overrides: list[str]) -> float:
    """A job: how long the command took."""
    return one_run(strategy, overrides).took_s
