"""A whole training step inside Lightning: ours against what one would use instead.

Ours is a plain ``Adam`` under ``strategy="hybrid"``. Each worker computes with one thread; while
all wait, the update uses the cores that they leave idle. The baselines: Lightning's ``ddp`` (gloo)
with fused Adam, and with Adam as torch has it by default; DistributedDataParallel in a loop of
one's own, with fused Adam; with one worker Lightning's single device; and the same path as ours
without all that makes it safe, in Lightning's loop and in none (``prototype.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.frame import Against, Frame
from benchmarks.models import MODELS
from benchmarks.rows import NOTHING_ASKED, Goal, Row, Skipped
from benchmarks.runs import Job

# model: with 2 workers, with 4, and whether the slow and the bare ways are of interest
GOALS = {
    "mlp-100k": (Goal(3, 6), Goal(5, 8)),
    "mlp-10m": (Goal(2, 2.6), Goal(2, 2.5)),
    "speech-short": (Goal(1.4, 1.6), None),
    "speech-long": (Goal(1.0, 1.05), None),
}
_ALONE = Goal(0.97, 1.1)
_BARE = Goal(1.15, 1.05, of="time")


def rows(frame: Frame) -> Iterator[Row | Skipped]:
    """Of every model."""
    if frame.options.quick:
        yield from together(frame, "tiny", frame.options.workers, NOTHING_ASKED, all_ways=False)
        return
    for model, (two, four) in GOALS.items():
        mlp = model.startswith("mlp")
        yield from together(frame, model, 2, two, all_ways=mlp)
        if four is not None:
            yield from together(frame, model, 4, four, all_ways=False)
        if mlp:
            yield from alone(frame, model)
    yield from free(frame, "mlp-100k")


def together(
    frame: Frame, model: str, workers: int, goal: Goal, all_ways: bool
) -> Iterator[Row | Skipped]:
    """Several workers; ``all_ways``: against the slower and the bare ways, too."""
    against: list[Against] = [(lightning(frame, "ddp", model, workers, True), goal)]
    if all_ways:
        against.append((raw(frame, "ddp", "torch DDP, fused Adam", model, workers), NOTHING_ASKED))
        against.append((lightning(frame, "ddp", model, workers, None), NOTHING_ASKED))
        bare = raw(frame, "in_lightning", "the bare path in Lightning's loop", model, workers)
        against.append((bare, _BARE))
        against.append((raw(frame, "prototype", "the bare path", model, workers), NOTHING_ASKED))
    work = f"{MODELS[model].about}, {workers} workers"
    ours = lightning(frame, "hybrid", model, workers, None)
    yield from frame.alternate(work, ours, against, repeats=_repeats(frame, model))


def _repeats(frame: Frame, model: str) -> int:
    """Short steps differ more, by which cores and cache lines a run happens to get."""
    return frame.options.repeats + (2 if model == "mlp-100k" else 0)


def alone(frame: Frame, model: str) -> Iterator[Row | Skipped]:
    """One worker: nothing to share, so what is left is what we cost, and the fused update."""
    against: list[Against] = [
        (lightning(frame, "single", model, 1, None), _ALONE),
        (lightning(frame, "single", model, 1, True), NOTHING_ASKED),
    ]
    work = f"{MODELS[model].about}, 1 worker"
    ours = lightning(frame, "hybrid", model, 1, None)
    yield from frame.alternate(work, ours, against, repeats=_repeats(frame, model))


def free(frame: Frame, model: str) -> Iterator[Row | Skipped]:
    """Workers that do not wait, against the pattern that is copied for it."""
    work = f"{MODELS[model].about}, 2 workers that do not wait"
    ours = [lightning(frame, name, model, 2, None) for name in ("hogwild", "async")]
    pattern = raw(frame, "hogwild", "mnist_hogwild pattern, fused Adam", model, 2)
    yield from frame.alternate(work, ours, [(pattern, NOTHING_ASKED)])


_NAMES = {"ddp": "Lightning ddp", "single": "Lightning, single device"}


def lightning(frame: Frame, strategy: str, model: str, workers: int, fused: bool | None) -> Job:
    """A run of Lightning's loop."""
    label = strategy
    if strategy in _NAMES and MODELS[model].ids:
        label = f"{_NAMES[strategy]}, SparseAdam"
    elif strategy in _NAMES:
        label = _NAMES[strategy] + (", fused Adam" if fused else ", Adam by default")
    arguments = {"model": model, "strategy": strategy, "workers": workers, "fused": fused}
    seconds = {"seconds": frame.options.seconds}
    return Job(label, "benchmarks.loops:lightning", arguments | seconds)


def raw(frame: Frame, way: str, label: str, model: str, workers: int) -> Job:
    """A run without Lightning."""
    module = "loops" if way in ("ddp", "hogwild") else "prototype"
    arguments = {"model": model, "workers": workers, "seconds": frame.options.seconds}
    return Job(label, f"benchmarks.{module}:{way}", arguments)
