"""Which checks there are, the cheapest first; a later one tells less for its time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpu_check.check import Check

PYTEST = ("torch", "pytorch_lightning", "pytest")
SIZE = "170 M"
_BEHIND = {"options": {"policy": {"name": "pipe_sgd", "warm_up": 0}}}
_CLIPPED, _LARGE = {"clip": 1.0}, {"samples": 64}
# Of the benchmark: a label, the way, what it is given.
WAYS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("plain AdamW on the GPU", "plain", {}),
    ("hybrid", "hybrid", {"options": {}}),
    ("pipe_sgd", "hybrid", _BEHIND),
    ("torchao CPUOffloadOptimizer", "torchao", {}),
    ("pipe_sgd, gradients clipped", "hybrid", _BEHIND | _CLIPPED),
    ("plain AdamW on the GPU, 64 samples", "plain", _LARGE),
    ("pipe_sgd, 64 samples, gradients clipped", "hybrid", _BEHIND | _CLIPPED | _LARGE),
    ("hybrid, 64 samples", "hybrid", {"options": {}} | _LARGE),
    ("hybrid, bf16 transport", "hybrid", {"options": {"transport_dtype": "bf16"}}),
    ("hybrid, threads_per_worker=1", "hybrid", {"options": {"threads_per_worker": 1}}),
    ("hybrid, two workers", "hybrid", {"options": {"workers_per_device": 2}}),
)


def checks(size: str = SIZE) -> Iterator[Check]:
    """All of them."""
    yield Check("machine", "gpu_check.machine:facts", 30, needs=(), on_gpu=False)
    yield Check("private names", "gpu_check.machine:private_names", 60, on_gpu=False)
    yield Check("bus", "gpu_check.bus:probe", 40)
    yield Check("page-locking under a low ulimit -l", "gpu_check.host:little_lockable", 90)
    yield from _right()
    yield _tests("tests on the GPU", ["tests/lightning/preflight/test_devices.py"], "gpu", 120)
    yield from _timed(size)
    yield Check("fits", "gpu_check.fits:run", 240)
    yield Check("host memory left behind", "gpu_check.host:growth", 150)
    yield Check("profile", "gpu_check.steps:profiled", 60, {"size": size, "options": {}})
    apart = ["tests/lightning/devices/test_apart.py"]
    yield _tests("tests on the stand-in", apart, "not slow", 120, on_gpu=False)
    parity = ["tests/parity/test_traps.py", "tests/parity/test_parity.py"]
    yield _tests("parity on the GPU", parity, "gpu", 150)


def _right() -> Iterator[Check]:
    for workers in (1, 2):
        label = f"{workers} worker{'s' * (workers > 1)}"
        arguments = {"workers": workers, "options": {}}
        yield Check(f"equal to one process, {label}", "gpu_check.steps:difference", 60, arguments)
    name = "one update behind, equal to a loop written by hand"
    yield Check(name, "gpu_check.steps:difference_behind", 60)


def _timed(size: str) -> Iterator[Check]:
    for label, way, given in WAYS:
        arguments: dict[str, Any] = {"way": way, "size": size, **given}
        needs = ("torch", "pytorch_lightning", *(("torchao",) if way == "torchao" else ()))
        name = f"step of {size} parameters, {label}"
        yield Check(name, "gpu_check.steps:measured", 60, arguments, needs)


def _tests(name: str, files: list[str], only: str, limit_s: float, on_gpu: bool = True) -> Check:
    arguments = {"files": files, "only": only}
    return Check(name, "gpu_check.testing:run", limit_s, arguments, PYTEST, on_gpu)
