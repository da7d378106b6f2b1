"""Sparse gradients: an embedding of which a mini-batch touches one row in a thousand.

``SparseAdam`` under ``strategy="hybrid"``, against Lightning's ``ddp`` and DistributedDataParallel
in a loop of one's own, both over gloo, whose all-reduce takes sparse tensors. And the same with
SparseAdam's arithmetic in a function that numba compiles, which workers call without a lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from benchmarks.frame import Frame
from benchmarks.jobs.models import MODELS
from benchmarks.parts.step import lightning, raw
from benchmarks.rows import NOTHING_ASKED, Goal, Row, Skipped
from benchmarks.runs import Job


def rows(frame: Frame) -> Iterator[Row | Skipped]:
    """Workers that wait, and workers that do not."""
    model = "embedding-small" if frame.options.quick else "embedding"
    work = f"{MODELS[model].about}, 2 workers"
    ddp = lightning(frame, "ddp", model, 2, None)
    own_loop = raw(frame, "ddp", "torch DDP, SparseAdam", model, 2)
    against = [(ddp, Goal(6, 10)), (own_loop, NOTHING_ASKED)][: 1 if frame.options.quick else 2]
    yield from frame.alternate(work, lightning(frame, "hybrid", model, 2, None), against)
    if frame.options.quick:
        return
    compiled = f"{MODELS[model].about}, compiled steps, 2 workers"
    if find_spec("numba") is None:
        yield frame.skip(compiled, "needs numba: pip install 'hybridtrain[sparse]'")
    else:
        arguments = {"model": model, "workers": 2, "seconds": frame.options.seconds}
        ours = Job("hogwild, compiled", "benchmarks.jobs.written:written", arguments)
        yield from frame.alternate(compiled, ours, [(own_loop, Goal(3))])
    free = lightning(frame, "async", model, 2, None)
    yield from frame.alternate(f"{work} that do not wait", free, [(ddp, NOTHING_ASKED)])
