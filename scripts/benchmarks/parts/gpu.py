"""One GPU: parameters in host memory against plain fused AdamW on the device, and against those who
offload the optimizer as we do.

Language models of 25 M, 170 M and 1.2 G parameters (where the host has the memory), float32
parameters and bf16 arithmetic, except for DeepSpeed, whose parameters on the device are bf16. All
may use all cores of the host. Before anything is timed it is shown that two workers on the GPU
train to what one does with a doubled mini-batch.

A step's bytes on the host, per parameter: masters 4, two moments 8, a row 4 (2 as bf16), and one
more row under ``pipe_sgd``; on the device: parameter 4, gradient 4, and another parameter 4 under
``pipe_sgd``; plain AdamW 16 there. ``--only "170 M"`` measures one size, ``--only largest`` looks
for the largest model that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.frame import Against, Frame
from benchmarks.jobs.exchange import room_for
from benchmarks.jobs.gpu_models import HOST_BYTES, SIZES, TINY, parameters_of
from benchmarks.parts import gpu_largest
from benchmarks.rows import NOTHING_ASKED, Goal, Row, Skipped
from benchmarks.runs import Job
from hybridtrain.errors import UserError

SAMPLES = (8, 64)  # of a mini-batch: one that hides little of the update, and one that hides more
CLIP = 1.0  # the largest norm of a gradient
ONE_BEHIND: dict[str, Any] = {"policy": {"name": "pipe_sgd", "warm_up": 0}}
_PEERS = Goal(1.0)


def rows(frame: Frame) -> Iterator[Row | Skipped]:
    """Check results on a GPU; measure time and memory."""
    if not torch.cuda.is_available():
        yield frame.skip("one GPU", "torch sees no CUDA device")
        return
    yield from is_right(frame)
    sizes = {"a tiny model": TINY} if frame.options.quick else SIZES
    for size, model in sizes.items():
        name = f"{size} parameters" if model is not TINY else size
        try:
            room_for(HOST_BYTES * parameters_of(model))
        except UserError as error:
            yield frame.skip(name, str(error))
            continue
        for samples in SAMPLES:
            work = f"{name}, {samples} × {model['length']} tokens, 1 worker"
            yield from against_others(frame, model, samples, work)
            yield from clipped(frame, model, samples, work)
    yield from gpu_largest.rows(frame)


def is_right(frame: Frame) -> Iterator[Row | Skipped]:
    """The largest difference between parameters, after steps that should be the same."""
    for workers, options in ((1, {}), (2, {}), (2, {"transport_dtype": "bf16"})):
        label = " ".join(["hybrid", *(f"{k}={v}" for k, v in options.items())])
        work = f"difference from one process, {workers} worker{'s' * (workers > 1)} on the GPU"
        job = Job(
            label, "benchmarks.jobs.gpu_loops:difference", {"workers": workers, "options": options}
        )
        yield from frame.alone(work, job, "of the largest", per=1.0, repeats=1)
    job = Job("pipe_sgd", "benchmarks.jobs.gpu_loops:difference_behind", {})
    work = "difference from a loop written by hand, one update behind"
    yield from frame.alone(work, job, "of the largest", per=1.0, repeats=1)


def against_others(
    frame: Frame, model: dict[str, int], samples: int, work: str
) -> Iterator[Row | Skipped]:
    """The same model and mini-batch, in the loop that each is made for."""
    ours = [
        _job("hybrid", "hybrid", model, samples),
        _job("hybrid, bf16 transport", "hybrid", model, samples, transport_dtype="bf16"),
        _job("pipe_sgd", "hybrid", model, samples, **ONE_BEHIND),
    ]
    against: list[Against] = [
        (_job("plain fused AdamW on the GPU", "plain", model, samples), NOTHING_ASKED),
        (_job("Lightning ddp, fused AdamW on the GPU", "ddp", model, samples), NOTHING_ASKED),
        (_job("torchao CPUOffloadOptimizer", "torchao", model, samples), _PEERS),
        (_job("DeepSpeed ZeRO-Offload", "deepspeed", model, samples), _PEERS),
    ]
    repeats = min(frame.options.repeats, 2)
    yield from frame.alternate(work, ours, against, repeats=repeats, read=read)


def clipped(
    frame: Frame, model: dict[str, int], samples: int, work: str
) -> Iterator[Row | Skipped]:
    """The same with the norm of the gradient limited, which those who step early do without."""
    ours = [
        _job("hybrid", "hybrid", model, samples),
        _job("pipe_sgd", "hybrid", model, samples, **ONE_BEHIND),
    ]
    plain = _job("plain fused AdamW on the GPU", "plain", model, samples)
    jobs = [replace(job, arguments=job.arguments | {"clip": CLIP}) for job in (*ours, plain)]
    repeats = min(frame.options.repeats, 2)
    against: list[Against] = [(jobs[-1], NOTHING_ASKED)]
    name = f"{work}, gradients clipped"
    yield from frame.alternate(name, jobs[:-1], against, repeats=repeats, read=read)


def read(figures: dict[str, float]) -> tuple[float, str]:
    """Split figures into the compared one and a text beside it."""
    rate, peak = figures["samples_per_s"], figures["peak_bytes"] / 2**30
    return figures["step_s"], f"{rate:.3g} samples/s, {peak:.1f} GiB of the device at most"


def _job(label: str, way: str, model: dict[str, int], samples: int, **options: Any) -> Job:
    arguments: dict[str, Any] = {"model": model, "samples": samples}
    if way == "hybrid":
        arguments["options"] = options
    return Job(label, f"benchmarks.jobs.gpu_loops:{way}", arguments)
