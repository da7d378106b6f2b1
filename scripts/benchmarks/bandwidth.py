"""The machine's own limit: how fast memory is read and written, by one core and by all.

Two measures over arrays much larger than the last cache: *copy* (one read, one write) and *triad*
(``a = b + s * c``, two reads, one write), as STREAM has them (McCalpin, 1995); the bytes a program
asks for are counted, not those the cache fetches before it overwrites them. The third is the
optimizer's own pattern: Adam reads gradient, parameter and two moments and writes three of them
back, 28 bytes an element, in pieces small enough to be worked on in the cache.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.frame import Frame
from benchmarks.rows import Row, Skipped
from benchmarks.runs import Job
from hybridtrain.update.pool import Pool

BYTES = {"copy": 8, "triad": 12, "update": 28}  # an element
_CHUNK = 1 << 16  # elements


def rows(frame: Frame) -> Iterator[Row | Skipped]:
    """GB/s of each, with one core and with all."""
    elements = 1 << (22 if frame.options.quick else 25)
    cores = len(os.sched_getaffinity(0))
    for threads in dict.fromkeys((1, cores)):
        for kind in BYTES:
            work = f"{elements >> 20} Mi elements, {threads} core{'s' * (threads > 1)}"
            arguments = {"kind": kind, "elements": elements, "threads": threads}
            job = Job(kind, "benchmarks.bandwidth:bandwidth", arguments)
            yield from frame.alone(work, job, "GB/s", per=1.0, repeats=1)


def bandwidth(kind: str, elements: int, threads: int, tries: int = 7) -> float:
    """GB/s: the best of several passes, as what disturbs can only slow it down."""
    arrays = [torch.zeros(elements) for _ in range(4)]
    pool = Pool(threads)
    parts = [slice(i, i + _CHUNK) for i in range(0, elements, _CHUNK)]
    operation = _OPERATIONS[kind]

    def piece(lane: int, part: slice) -> None:
        operation(*(array[part] for array in arrays))

    best = float("inf")
    for _ in range(tries):
        began = time.perf_counter()
        pool.map(piece, parts)
        best = min(best, time.perf_counter() - began)
    pool.close()
    return BYTES[kind] * elements / best / 1e9


def _copy(a: torch.Tensor, b: torch.Tensor, *_: torch.Tensor) -> None:
    a.copy_(b)


def _triad(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *_: torch.Tensor) -> None:
    torch.add(b, c, alpha=3.0, out=a)


_STEP = torch.tensor(1.0)


def _update(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    torch._fused_adam_(
        *([p], [g], [m], [v], [], [_STEP]),
        amsgrad=False,
        lr=1e-3,
        beta1=0.9,
        beta2=0.999,
        weight_decay=0.0,
        eps=1e-8,
        maximize=False,
    )


_OPERATIONS: dict[str, Callable[..., None]] = {"copy": _copy, "triad": _triad, "update": _update}
