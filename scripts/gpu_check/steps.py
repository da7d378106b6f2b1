"""Measure a step's time and its parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_check.check import Found

FIRST, LAST = 3, 6  # steps that are looked at


def measured(way: str, size: str, samples: int = 8, **arguments: Any) -> Found:
    """One of ``benchmarks.jobs.gpu_loops``."""
    from benchmarks.jobs import gpu_loops
    from benchmarks.jobs.gpu_models import SIZES, TINY

    from hybridtrain.errors import UserError

    model = SIZES.get(size, TINY)
    try:
        figures = getattr(gpu_loops, way)(model, samples, **arguments)
    except UserError as error:
        return Found(f"left out: {error}", None)
    text = (
        f"{1e3 * figures['step_s']:.1f} ms a step, {figures['samples_per_s']:.0f} samples/s, "
        f"{figures['peak_bytes'] / 2**30:.2f} GiB of the device at most"
    )
    return Found(text, True, figures)


def difference(workers: int, options: dict[str, Any], accelerator: str = "cuda") -> Found:
    """Whether so many workers train to what one process does."""
    from benchmarks.jobs import gpu_loops

    from hybridtrain.errors import UserError

    try:
        found = gpu_loops.difference(workers, options, accelerator)
    except UserError as error:
        return Found(str(error), False)
    return Found(f"{found:.1g} of the largest parameter", True, {"difference": found})


def difference_behind(accelerator: str = "cuda") -> Found:
    """Whether ``pipe_sgd`` trains to what a loop written by hand does."""
    from benchmarks.jobs import gpu_loops

    from hybridtrain.errors import UserError

    try:
        found = gpu_loops.difference_behind(accelerator)
    except UserError as error:
        return Found(str(error), False)
    return Found(f"{found:.1g} of the largest parameter", True, {"difference": found})


def profiled(size: str, options: dict[str, Any], accelerator: str = "cuda") -> Found:
    """Kernels and copies on the device, and what Python waits for, of three steps."""
    from benchmarks.jobs import gpu_loops
    from benchmarks.jobs.gpu_models import SIZES, TINY, Homeless

    def fused(parameters: Any) -> Any:
        import torch

        return torch.optim.AdamW(parameters, lr=1e-4)

    gpu_loops.use_all_cores()
    strategy, model = gpu_loops.OneWay(**options), SIZES.get(size, TINY)
    place = str(Path("profile.json").absolute())
    more = {"kind": Homeless, "callbacks": [_callback(place)]}
    gpu_loops.fit(model, 8, strategy, fused, accelerator, **more)
    figures = json.loads(Path(place).read_text(encoding="utf-8"))
    longest = ", ".join(f"{name} {ms:.1f}" for name, ms in list(figures["device_ms"].items())[:4])
    text = f"device busy {figures['device_total_ms']:.1f} ms a step; ms a step of {longest}"
    return Found(text, True, figures)


def _callback(place: str) -> Any:
    """It profiles some steps of worker 0, and writes the sums to a file."""
    import pytorch_lightning as pl
    from torch.profiler import ProfilerActivity, profile

    class Profiled(pl.Callback):
        profiler: Any = None
        count = 0

        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if self.count == FIRST and trainer.global_rank == 0:
                kinds = [ProfilerActivity.CPU]
                if trainer.strategy.root_device.type == "cuda":
                    kinds.append(ProfilerActivity.CUDA)
                self.profiler = profile(activities=kinds)
                self.profiler.start()
            if self.count == LAST and self.profiler is not None:
                self.profiler.stop()
                Path(place).write_text(json.dumps(_sums(self.profiler)), encoding="utf-8")
                self.profiler = None
            self.count += 1

    return Profiled()


def _sums(profiler: Any) -> dict[str, Any]:
    """Milliseconds of a step, by name, the longest first."""
    per_step = 1e-3 / (LAST - FIRST)
    events = profiler.key_averages()
    return {
        "device_total_ms": per_step * sum(each.self_device_time_total for each in events),
        "device_ms": _longest(events, "self_device_time_total", per_step),
        "host_ms": _longest(events, "self_cpu_time_total", per_step),
        "calls": {each.key: each.count / (LAST - FIRST) for each in events},
    }


def _longest(events: Any, kind: str, per: float, most: int = 20) -> dict[str, float]:
    found = sorted(events, key=lambda each: -getattr(each, kind))[:most]
    return {each.key: per * getattr(each, kind) for each in found}
