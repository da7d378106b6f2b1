"""The largest model that trains in so much of a GPU's memory, by trying.

A share of the GPU is enough to know it: what a parameter takes is the same, and a try takes seconds
instead of minutes. Layers are added until one is too many; each try is a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.frame import Frame
from benchmarks.jobs import gpu_loops
from benchmarks.jobs.exchange import room_for
from benchmarks.jobs.gpu_models import HOST_BYTES, parameters_of
from benchmarks.rows import NOTHING_ASKED, Row, Skipped, compare
from benchmarks.runs import Job, RunFailed
from hybridtrain.engine.memory.limits import gpus
from hybridtrain.errors import UserError
from hybridtrain.lightning.preflight.machine_checks import chosen

BUDGET = 4 * 2**30  # bytes of the GPU
_MOST_LAYERS = 256
_UNIT = "bytes of the device a parameter"

OURS = "hybrid"
WAYS = {
    OURS: "hybrid",
    "plain fused AdamW on the GPU": "plain",
    "Lightning ddp, fused AdamW on the GPU": "ddp",
    "torchao CPUOffloadOptimizer": "torchao",
    "DeepSpeed ZeRO-Offload": "deepspeed",
}


def rows(frame: Frame) -> Iterator[Row | Skipped]:
    """Ours against each of the others."""
    work = f"the largest model in {BUDGET >> 30} GiB of the GPU, 1 worker"
    if frame.options.quick or not frame.options.wants(work):
        return
    found: dict[str, int] = {}
    for label, way in WAYS.items():
        try:
            found[label] = largest(partial(_try, frame, work, label, way))
        except (UserError, RunFailed) as error:
            yield frame.skip(f"{work}: {label}", str(error))
    for label in [each for each in found if each != OURS] if OURS in found else ():
        taken = [[BUDGET / parameters_of(_model(found[each]))] for each in (OURS, label)]
        told = "; ".join(f"{each}: {_shown(found[each])}" for each in (OURS, label))
        names = (frame.part, work, OURS, label)
        yield compare(names, *taken, _UNIT, NOTHING_ASKED, told)


def largest(fits: Callable[[int], bool]) -> int:
    """The most layers that fit, to an eighth of them.

    Raises:
        UserError: if not even one does.
    """
    low, high = 0, 8
    while high <= _MOST_LAYERS and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not low:
        raise UserError("not even one layer fits")
    return low


def fits(way: str, depth: int, share: float) -> bool:
    """A job: whether so many layers train on this share of the first GPU."""
    model = _model(depth)
    room_for(HOST_BYTES * parameters_of(model))
    options: dict[str, Any] = {}
    if way == "hybrid":
        options["options"] = {"device_memory_fraction": share}
    else:
        torch.cuda.set_per_process_memory_fraction(share, 0)
    try:
        getattr(gpu_loops, way)(model, 1, **options)
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            return False
        raise
    return True


def is_out_of_memory(error: BaseException) -> bool:
    """Recognise that the device is out of memory, in this process or in a worker."""
    return "out of memory" in str(error).lower()


def _try(frame: Frame, work: str, label: str, way: str, depth: int) -> bool:
    return bool(frame.run(_job(label, way, depth), work))


def _job(label: str, way: str, depth: int) -> Job:
    first = chosen([torch.device("cuda", 0)]) or gpus()
    if not first or not first[0].n_bytes:
        raise UserError("nobody tells how much memory the GPU has (libnvidia-ml.so.1)")
    share = min(1.0, BUDGET / first[0].n_bytes)
    arguments: dict[str, Any] = {"way": way, "depth": depth, "share": share}
    return Job(f"{label}, {depth} layers", "benchmarks.parts.gpu_largest:fits", arguments)


def _model(depth: int) -> dict[str, int]:
    return {"width": 1024, "depth": depth, "length": 64}


def _shown(depth: int) -> str:
    return f"{parameters_of(_model(depth)) / 1e6:.0f} M parameters"
