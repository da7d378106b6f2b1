"""A whole training step inside Lightning: ours against what one would use instead.

Ours is a plain ``Adam`` under ``strategy="hybrid"``. Each worker computes with one thread; while
all wait, the update uses the cores that they leave idle. The baselines: Lightning's ``ddp`` (gloo)
with fused Adam, and with Adam as torch has it by default; DistributedDataParallel in a loop of
one's own, with fused Adam; with one worker Lightning's single device; and the same path as ours
without all that makes it safe, in Lightning's loop and in none (``jobs/prototype.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from benchmarks.frame import Against, Frame
from benchmarks.jobs.models import MODELS
from benchmarks.rows import NOTHING_ASKED, Goal, Row, Skipped
from benchmarks.runs import Job

# model: with 2 workers, with 4, and whether the slow and the bare ways are of interest
GOALS = {
    "mlp-100k": (Goal(3, 6), Goal(5, 8)),
    "mlp-10m": (Goal(2, 2.6), Goal(2, 2.5)),
    "speech-short": (Goal(1.4, 1.6), None),
    "speech-long": (Goal(1.0, 1.05), None),
}
# workers that train on their own, against: one device, lock-step, a loop of one's own
LOCAL_GOALS = {
    "mlp-100k": (Goal(0.9, 1.0), NOTHING_ASKED, Goal(0.6, 0.9)),
    "mlp-10m": (NOTHING_ASKED, Goal(1.05, 1.1), Goal(0.6, 0.9)),
}
# strategy, workers: the least ratio to one device, with a user's callback and data, and without
_SMALL = {
    ("hybrid", 1): (0.96, 0.98),
    ("hybrid", 2): (0.70, 0.66),
    ("hogwild", 2): (0.83, 0.88),
    ("async", 2): (0.70, 0.72),
}
_ALONE = Goal(0.97, 1.1)
_BARE = Goal(1.15, 1.05, of="time")


def rows(frame: Frame) -> Iterator[Row | Skipped]:
    """Measure the steps of every model."""
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
    for as_users_do in (True, False):
        yield from small(frame, as_users_do)
    for model, goals in LOCAL_GOALS.items():
        yield from local(frame, model, goals)


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


def small(frame: Frame, as_users_do: bool) -> Iterator[Row | Skipped]:
    """Steps so short that what surrounds them counts, against one device without us."""
    data = "single samples, a callback" if as_users_do else "whole mini-batches"
    extra, fused = {"as_users_do": as_users_do}, True if as_users_do else None
    alone = lightning(frame, "single", "mlp-small", 1, fused, extra)
    for (name, workers), least in _SMALL.items():
        work = f"{MODELS['mlp-small'].about}, {data}, {workers} workers"
        ours = lightning(frame, name, "mlp-small", workers, fused, extra)
        goal = Goal(least[not as_users_do], 1.0)
        yield from frame.alternate(work, ours, [(alone, goal)])


def local(frame: Frame, model: str, goals: tuple[Goal, ...]) -> Iterator[Row | Skipped]:
    """Workers that train on their own and meet in every eighth step."""
    against = [
        lightning(frame, "single", model, 1, None),
        lightning(frame, "hybrid", model, 2, None),
        raw(frame, "local_sgd", "a loop with the same averaging", model, 2),
    ]
    work = f"{MODELS[model].about}, 2 workers on their own"
    ours = lightning(frame, "local_sgd", model, 2, None)
    yield from frame.alternate(work, ours, list(zip(against, goals, strict=True)))


_NAMES = {"ddp": "Lightning ddp", "single": "Lightning, single device"}


def lightning(
    frame: Frame,
    strategy: str,
    model: str,
    workers: int,
    fused: bool | None,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> Job:
    """A run of Lightning's loop; ``extra``: more arguments of it."""
    label = strategy
    if strategy in _NAMES and MODELS[model].ids:
        label = f"{_NAMES[strategy]}, SparseAdam"
    elif strategy in _NAMES:
        label = _NAMES[strategy] + (", fused Adam" if fused else ", Adam by default")
    arguments = {"model": model, "strategy": strategy, "workers": workers, "fused": fused}
    seconds = {"seconds": frame.options.seconds}
    return Job(label, "benchmarks.jobs.loops:lightning", arguments | seconds | extra)


def raw(frame: Frame, way: str, label: str, model: str, workers: int) -> Job:
    """A run without Lightning."""
    module = "loops" if way in ("ddp", "hogwild", "local_sgd") else "prototype"
    arguments = {"model": model, "workers": workers, "seconds": frame.options.seconds}
    return Job(label, f"benchmarks.jobs.{module}:{way}", arguments)
