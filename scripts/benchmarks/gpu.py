"""One GPU: parameters in host memory against plain fused AdamW on the device, and against those who
offload the optimizer as we do.

Language models of 25 M, 170 M and 1.2 G parameters (where the host has the memory), float32
parameters and bf16 arithmetic, except for DeepSpeed, whose parameters on the device are bf16. All
may use all cores of the host. Before anything is timed it is shown that two workers on the GPU
train to what one does with a doubled mini-batch. From the bus, the update and the model's own
times, measured alone, follows the mini-batch from which on the update is hidden
(:mod:`benchmarks.crossover`).

A step's bytes on the host, per parameter: masters 4, two moments 8, a row 4 (2 as bf16); on the
device: parameter 4, gradient 4; plain AdamW 16 there. ``--only "170 M"`` measures one size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.crossover import Costs, LinearFit, crossover
from benchmarks.exchange import room_for
from benchmarks.frame import Against, Frame
from benchmarks.gpu_models import SIZES, TINY, parameters_of
from benchmarks.rows import NOTHING_ASKED, Goal, Row, Skipped
from benchmarks.runs import Job, RunFailed
from hybridtrain.errors import UserError

SAMPLES = 8
_HOST_BYTES = 4 * 4 + 4  # a parameter: masters, moments, a row; a copy while the model is made
_PEERS = Goal(1.0)


def rows(frame: Frame) -> Iterator[Row | Skipped]:
    """What is right, what it costs, and where it costs nothing."""
    if not torch.cuda.is_available():
        yield frame.skip("one GPU", "torch sees no CUDA device")
        return
    yield from is_right(frame)
    sizes = {"a tiny model": TINY} if frame.options.quick else SIZES
    for size, model in sizes.items():
        name = f"{size} parameters" if model is not TINY else size
        try:
            room_for(_HOST_BYTES * parameters_of(model))
        except UserError as error:
            yield frame.skip(name, str(error))
            continue
        work = f"{name}, {SAMPLES} × {model['length']} tokens, 1 worker"
        yield from against_others(frame, model, work)
        yield from hidden_from(frame, model, name)


def is_right(frame: Frame) -> Iterator[Row | Skipped]:
    """The largest difference between parameters, after steps that should be the same."""
    for workers, options in (
        (1, {}),
        (2, {}),
        (2, {"overlap_update": True}),
        (2, {"overlap_update": True, "transport_dtype": "bf16"}),
    ):
        label = " ".join(["hybrid", *(f"{k}={v}" for k, v in options.items())])
        work = f"difference from one process, {workers} worker{'s' * (workers > 1)} on the GPU"
        job = Job(
            label, "benchmarks.gpu_loops:difference", {"workers": workers, "options": options}
        )
        yield from frame.alone(work, job, "of the largest", per=1.0, repeats=1)


def against_others(frame: Frame, model: dict[str, int], work: str) -> Iterator[Row | Skipped]:
    """The same model and mini-batch, in the loop that each is made for."""
    ours = [
        _job("hybrid", "hybrid", model),
        _job("hybrid, overlap_update", "hybrid", model, overlap_update=True),
        _job(
            "hybrid, overlap_update, bf16",
            "hybrid",
            model,
            overlap_update=True,
            transport_dtype="bf16",
        ),
    ]
    against: list[Against] = [
        (_job("plain fused AdamW on the GPU", "plain", model), NOTHING_ASKED),
        (_job("Lightning ddp, fused AdamW on the GPU", "ddp", model), NOTHING_ASKED),
        (_job("torchao CPUOffloadOptimizer", "torchao", model), _PEERS),
        (_job("DeepSpeed ZeRO-Offload", "deepspeed", model), _PEERS),
    ]
    repeats = min(frame.options.repeats, 2)
    yield from frame.alternate(work, ours, against, repeats=repeats, read=read)


def read(figures: dict[str, float]) -> tuple[float, str]:
    """What is compared, and what is told beside it."""
    rate, peak = figures["samples_per_s"], figures["peak_bytes"] / 2**30
    return figures["step_s"], f"{rate:.3g} samples/s, {peak:.1f} GiB of the device at most"


def _job(label: str, way: str, model: dict[str, int], **options: Any) -> Job:
    arguments: dict[str, Any] = {"model": model, "samples": SAMPLES}
    if way == "hybrid":
        arguments["options"] = options
    return Job(label, f"benchmarks.gpu_loops:{way}", arguments)


def hidden_from(frame: Frame, model: dict[str, int], name: str) -> Iterator[Row | Skipped]:
    """The mini-batch that hides the update, and what it is computed from."""
    work = f"{name}: the update is hidden from"
    if not frame.options.wants(work):
        return
    job = Job("measured alone", "benchmarks.gpu_costs:costs", {"model": model, "samples": SAMPLES})
    try:
        found = frame.run(job, work)
    except (UserError, RunFailed) as error:
        yield frame.skip(work, str(error))
        return
    for label, narrow in (("float32", 1.0), ("bf16", 0.5)):
        yield _row(frame, work, label, costs_of(found, narrow))


def costs_of(found: dict[str, Any], narrow: float) -> Costs:
    """``narrow``: the share of its bytes that a gradient travels with."""
    return Costs(
        found["out_s"] * narrow,
        found["update_s"],
        found["back_s"],
        LinearFit.through(found["forward"]),
        LinearFit.through(found["backward"]),
    )


def _row(frame: Frame, work: str, label: str, costs: Costs) -> Row:
    note = (
        f"out {1e3 * costs.out_s:.0f} ms, update {1e3 * costs.update_s:.0f}, back "
        f"{1e3 * costs.back_s:.0f}; of {SAMPLES} samples backward "
        f"{1e3 * costs.backward.at(SAMPLES):.0f}, forward {1e3 * costs.forward.at(SAMPLES):.0f}"
    )
    return Row(frame.part, work, f"gradients as {label}", crossover(costs), "samples", note=note)
