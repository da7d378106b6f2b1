"""Other libraries for the same arithmetic: none of them a dependency (extra ``benchmark``).

Legend: P parameters, W workers.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.jobs.exchange import room_for
from hybridtrain.errors import UserError

Peer = Callable[[int, int], Callable[[], object]]
_LR, _BETA1, _BETA2, _EPS = 1e-4, 0.9, 0.999, 1e-8


def optional(name: str) -> Any:
    """A module that need not be there.

    Raises:
        UserError: how it is installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{name.partition('.')[0]} cannot be imported ({error}); "
            "pip install 'hybridtrain[benchmark]'"
        ) from None


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def numba_pass(parameters: int, workers: int) -> Callable[[], object]:
    """Mean of two rows and Adam in one loop, compiled for this machine, on all cores."""
    assert workers == 2, "the loop below is written for two rows"
    os.environ["NUMBA_NUM_THREADS"] = str(_cores())
    numba = optional("numba")
    room_for(4 * parameters * (3 + workers))
    kernel = numba.njit(parallel=True, fastmath={"contract", "nsz", "arcp"})(_kernel_for(numba))
    p, m, v = (np.zeros(parameters, np.float32) for _ in range(3))
    draw = np.random.default_rng(0)
    rows = [draw.standard_normal(parameters, np.float32) for _ in range(2)]
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        size = np.float32(_LR / (1 - _BETA1**count))
        root = np.float32(1 / math.sqrt(1 - _BETA2**count))
        kernel(p, m, v, *rows, size, root, *map(np.float32, (_BETA1, _BETA2, _EPS)))

    return step


def _kernel_for(numba: Any) -> Callable[..., None]:
    prange, one, half = numba.prange, np.float32(1), np.float32(0.5)

    def kernel(p, m, v, a, b, size, root, beta1, beta2, eps):  # type: ignore[no-untyped-def]
        for i in prange(p.size):
            g = (a[i] + b[i]) * half
            first = beta1 * m[i] + (one - beta1) * g
            second = beta2 * v[i] + (one - beta2) * g * g
            m[i], v[i] = first, second
            p[i] -= size * first / (np.sqrt(second) * root + eps)

    return kernel


def deepspeed_adam(parameters: int, workers: int) -> Callable[[], object]:
    """DeepSpeed's CPUAdam on all cores; it takes one gradient, so torch makes the mean."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    adam = optional("deepspeed.ops.adam").DeepSpeedCPUAdam
    room_for(4 * parameters * (4 + workers))
    torch.set_num_threads(_cores())
    rows = [torch.randn(parameters) for _ in range(workers)]
    weight = torch.nn.Parameter(torch.zeros(parameters))
    weight.grad = torch.zeros(parameters)
    try:
        optimizer = adam([weight], lr=_LR, adamw_mode=False)
    except Exception as error:  # it compiles now, and complains in many ways
        raise UserError(f"DeepSpeedCPUAdam cannot be built here: {error}") from None

    def step() -> None:
        mean = torch.mul(rows[0], 1 / workers, out=weight.grad)
        for row in rows[1:]:
            mean.add_(row, alpha=1 / workers)
        optimizer.step()

    return step
