"""Gradients on their way from the device to the worker's row.

Hooks add them as backward produces them; a bucket that is full leaves at once on its own lane, with
one mark behind it. Before it leaves, that lane waits for every stream that has made a gradient of
the bucket: hooks may run on several, and waiting for the one that is current when the bucket leaves
would miss the others (DeepSpeed's issues 7898 and 8061).

Whether a gradient is finite is found out on the device, where a pass over it costs a fraction of a
pass on the host: its largest magnitude travels behind the bucket.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybridtrain.worker.device.streams import Lane, Streams

LEAST_BYTES = 16 * 2**20  # of a bucket: a third of a millisecond of the bus
# Of a large model: each costs up to 0.4 ms of Python, and the way of the last is waited for.
_BUCKETS = 12


def part_bytes(n_bytes: int) -> int:
    """Of a model's bytes, how many travel together."""
    return max(LEAST_BYTES, n_bytes // _BUCKETS)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients ``numbers`` lie in the row once ``mark`` has been reached.

    ``largest``: their largest magnitudes, (n,) float64, host, which are there then, too.
    """

    numbers: tuple[int, ...]
    largest: torch.Tensor
    mark: Any


class Outgoing:
    """Fills buckets and sends them.

    Args:
        streams: of the device.
        rows: each parameter's place, in its shape; host, page-locked.
    """

    def __init__(self, streams: Streams, rows: Sequence[torch.Tensor]) -> None:
        self._streams, self._rows = streams, rows
        self._filling: list[tuple[int, torch.Tensor]] = []
        self._makers: dict[Any, None] = {}  # streams that have made what is being filled in
        self._filled_bytes = 0
        self._sent: deque[Bucket] = deque()
        # What a row can hold: a gradient that is rounded to a narrower dtype may overflow there.
        self._limits = [_limit(row.dtype) for row in rows]
        self._bucket_bytes = part_bytes(sum(row.nbytes for row in rows))
        self._landings: dict[int, torch.Tensor] = {}  # by address
        self._free: list[torch.Tensor] = []  # of these: those that nothing is on its way to

    def add(self, number: int, gradient: torch.Tensor) -> None:
        """It has just been queued to be computed."""
        self._filling.append((number, gradient))
        self._makers[self._streams.current()] = None
        self._filled_bytes += self._rows[number].nbytes  # as it travels
        if self._filled_bytes >= self._bucket_bytes:
            self.close()

    def close(self) -> None:
        """The bucket leaves, full or not."""
        if not self._filling:
            return
        for maker in self._makers:
            self._streams.wait(Lane.OUT, self._streams.record(Lane.COMPUTE, maker))
        numbers = tuple([number for number, _ in self._filling])
        gradients = [gradient for _, gradient in self._filling]
        self._streams.copy(Lane.OUT, [self._rows[n] for n in numbers], gradients)
        largest = self._look(gradients)
        self._sent.append(Bucket(numbers, largest, self._streams.record(Lane.OUT)))
        self._filling, self._makers, self._filled_bytes = [], {}, 0

    def _look(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Queue the copy of their largest magnitudes; returns where they will be, (n,)."""
        place = self._landing(len(gradients))
        self._streams.do(Lane.OUT, lambda: place.copy_(_largest(gradients), non_blocking=True))
        return place

    def _landing(self, n: int) -> torch.Tensor:
        """Page-locked, or the copy would hold up the host, (n,) float64."""
        free = next((each for each in self._free if each.numel() >= n), None)
        if free is None:
            pages = -(-8 * n // mmap.PAGESIZE)
            free = torch.frombuffer(mmap.mmap(-1, pages * mmap.PAGESIZE), dtype=torch.float64)
            self._streams.lock(free)
            self._landings[free.data_ptr()] = free
        else:
            self._free = [each for each in self._free if each is not free]
        return free[:n]

    def release(self) -> None:
        """Nothing is on its way any more, nor will be."""
        for each in self._landings.values():
            self._streams.unlock(each)
        self._landings, self._free = {}, []

    def arrived(self) -> Bucket | None:
        """The next bucket, once its gradients lie in the row; ``None``: none is on its way."""
        if not self._sent:
            return None
        self._streams.synchronise(self._sent[0].mark)
        return self._sent.popleft()

    def finite(self, bucket: Bucket) -> list[int]:
        """Which gradients of a bucket that has arrived are known to be finite in the row.

        Asked once: what its ``largest`` says is written over later.
        """
        found = zip(bucket.numbers, bucket.largest.tolist(), strict=True)
        self._free.append(self._landings[bucket.largest.data_ptr()])
        return [number for number, largest in found if largest <= self._limits[number]]


def _limit(dtype: torch.dtype) -> float:
    known = dtype.is_floating_point or dtype.is_complex
    return torch.finfo(dtype).max if known else float("inf")


def _largest(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude of each, (n,) float64; NaN where there is one, 0 of none."""
    if not all(gradient.numel() for gradient in gradients):
        gradients = [g if g.numel() else g.new_zeros(1) for g in gradients]
    norms = torch._foreach_norm(list(gradients), float("inf"))
    alike = len({norm.dtype for norm in norms}) == 1  # then few kernels do
    return torch.stack(norms if alike else [norm.double() for norm in norms]).double()
