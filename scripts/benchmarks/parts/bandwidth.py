"""The machine's own limit: how fast memory is read and written, by one core and by all.

Over arrays much larger than the last cache: *copy* (one read, one write) and *triad*
(``a = b + s * c``, two reads, one write), as STREAM has them (McCalpin, 1995); the bytes that a
program asks for are counted, not those that the cache fetches before it overwrites them. *In place*
(``a += b``, two reads, one write) has none of these, so it is the limit for what changes memory, as
an optimizer does. *Update* is torch's fused Adam, which reads gradient, parameter and two moments
and writes three of them back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.frame import Frame
from benchmarks.rows import Row, Skipped
from benchmarks.runs import Job
from hybridtrain.engine.updates.thread_pool import Pool

BYTES = {"copy": 8, "triad": 12, "in place": 12, "update": 28}  # an element


def rows(frame: Frame) -> Iterator[Row | Skipped]:
    """GB/s of each, with one core and with all."""
    elements = 1 << (22 if frame.options.quick else 25)
    cores = len(os.sched_getaffinity(0))
    for threads in dict.fromkeys((1, cores)):
        for kind in BYTES:
            work = f"{elements >> 20} Mi elements, {threads} core{'s' * (threads > 1)}"
            arguments = {"kind": kind, "elements": elements, "threads": threads}
            job = Job(kind, "benchmarks.parts.bandwidth:bandwidth", arguments)
            yield from frame.alone(work, job, "GB/s", per=1.0, repeats=1)


def bandwidth(kind: str, elements: int, threads: int, tries: int = 7) -> float:
    """GB/s: the best of several passes, as what disturbs can only slow it down."""
    arrays = [torch.zeros(elements) for _ in range(4)]
    pool = Pool(threads)
    size = -(-elements // threads)  # each core has one stretch, so that no Python is in between
    parts = [slice(i, i + size) for i in range(0, elements, size)]
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


def _in_place(a: torch.Tensor, b: torch.Tensor, *_: torch.Tensor) -> None:
    a.add_(b)


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


_OPERATIONS: dict[str, Callable[..., None]] = {
    "copy": _copy,
    "triad": _triad,
    "in place": _in_place,
    "update": _update,
}
