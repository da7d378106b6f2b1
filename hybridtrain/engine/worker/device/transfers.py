"""Copies between host and device: gradients out, parameters in.

*Out*: hooks add gradients as backward produces them; a full bucket leaves at once on its own lane.
That lane first waits for every stream that has made a gradient of the bucket: hooks may run on
several, and waiting for the stream that is current when the bucket leaves would miss the others
(DeepSpeed's issues 7898 and 8061). The device checks whether gradients are finite, where a pass
costs a fraction of one on the host: their largest magnitudes follow the bucket.

*In*: copies run on another lane, and the compute lane waits for all of them. They may be queued in
parts, each once per update, while the server still steps the rest.
"""

from __future__ import annotations

import mmap
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hybridtrain.engine.memory import Store
from hybridtrain.engine.worker.device.streams import Lane, Streams

LEAST_BYTES = 16 * 2**20  # of a bucket: a third of a millisecond of the bus
# Of a large model: each costs up to 0.4 ms of Python; the step waits for the last one's copy.
_BUCKETS = 12


def part_bytes(n_bytes: int) -> int:
    """The size of a bucket, for a model of ``n_bytes``."""
    return max(LEAST_BYTES, n_bytes // _BUCKETS)


class Bucket(NamedTuple):
    """After ``mark`` the row holds gradients ``numbers``, and ``largest`` their largest magnitudes.

    ``largest``: (n,) float64, host.
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
        self._makers: dict[Any, None] = {}  # streams that have made gradients of this bucket
        self._filled_bytes = 0
        self._sent: deque[Bucket] = deque()
        # A gradient that is rounded to a narrower dtype may overflow in the row.
        self._limits = [_limit(row.dtype) for row in rows]
        self._bucket_bytes = part_bytes(sum(row.nbytes for row in rows))
        self._landings: dict[int, torch.Tensor] = {}  # by address
        self._free: list[torch.Tensor] = []  # landings without a pending copy

    def add(self, number: int, gradient: torch.Tensor) -> None:
        """Add a gradient whose computation has been queued."""
        self._filling.append((number, gradient))
        self._makers[self._streams.current()] = None
        self._filled_bytes += self._rows[number].nbytes  # as it travels
        if self._filled_bytes >= self._bucket_bytes:
            self.close()

    def close(self) -> None:
        """Send the bucket, full or not."""
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
        """Queue the copy of their largest magnitudes; returns its destination, (n,)."""
        place = self._landing(len(gradients))
        self._streams.do(Lane.OUT, lambda: place.copy_(_largest(gradients), non_blocking=True))
        return place

    def _landing(self, n: int) -> torch.Tensor:
        """(n,) float64, page-locked, so that the copy does not block the host."""
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
        """Unlock the host memory; no copy is pending, and none will be queued."""
        for each in self._landings.values():
            self._streams.unlock(each)
        self._landings, self._free = {}, []

    def arrived(self) -> Bucket | None:
        """Wait for the next bucket's copy; ``None`` if none is pending."""
        if not self._sent:
            return None
        self._streams.synchronise(self._sent[0].mark)
        return self._sent.popleft()

    def finite(self, bucket: Bucket) -> list[int]:
        """The gradients of an arrived bucket that are known to be finite in the row.

        Call it once: a later bucket overwrites ``largest``.
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


class Incoming:
    """Brings parameters to the device.

    Args:
        streams: of the device.
        parameters: on the device.
        sources: their values in host memory, page-locked.
    """

    def __init__(
        self,
        streams: Streams,
        parameters: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
    ) -> None:
        self._streams, self._sources = streams, sources
        self._originals = list(parameters)
        self._last: Any = None  # the mark after all copies
        self._find_places()

    def _find_places(self) -> None:
        """Note the parameters' addresses, the destinations of the copies."""
        self._addresses = [p.data_ptr() for p in self._originals]
        self._parameters = [p.detach() for p in self._originals]

    def copy(
        self,
        numbers: Sequence[int],
        after: Callable[[Sequence[int]], Any] = len,
        sources: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Queue the copies of these parameters, after all queued work that uses them.

        ``after`` is called with the numbers, to queue work after the copies on their lane.
        ``sources``: of all parameters, in place of those given at first.
        """
        if not numbers:
            return
        if [p.data_ptr() for p in self._originals] != self._addresses:  # ``.data`` was replaced
            self.hold_compute()  # else the old memory's next user would race with a copy to it
            self._find_places()
        self._streams.wait(Lane.BACK, self._streams.record(Lane.COMPUTE))  # old values in use
        own, sources = self._parameters, self._sources if sources is None else sources
        self._streams.copy(Lane.BACK, [own[n] for n in numbers], [sources[n] for n in numbers])
        after(numbers)
        self._last = self._streams.record(Lane.BACK)

    def hold_compute(self) -> None:
        """Let the compute lane's later work wait for all copies."""
        if self._last is not None:
            self._streams.wait(Lane.COMPUTE, self._last)

    def settle(self) -> None:
        """The host waits for all copies; afterwards their sources may change."""
        self.hold_compute()
        if self._last is not None:
            self._streams.synchronise(self._last)


class PageLocked:
    """A worker's row, its parameters and the mean, in whole pages.

    If the system refuses, copies are slower, and a warning says how much.

    Args:
        streams: of the worker's device.
        store: the shared buffers.
        worker: the number of the worker.
    """

    def __init__(self, streams: Streams, store: Store, worker: int) -> None:
        self._streams = streams
        self._regions: list[torch.Tensor] = []
        places = store.regions_of_gradients(worker)
        places += [store.region_of_parameters(worker, buffer) for buffer in store.buffers]
        if store.averaging:
            places.append(store.region_of_means())
        refused, reason = 0, ""
        for start, stop in places:
            region = store.arena.tensor(start, stop - start, torch.uint8)
            if problem := streams.lock(region):
                refused, reason = refused + region.nbytes, problem
            else:
                self._regions.append(region)
        if refused:
            warnings.warn(
                f"{refused / 2**20:,.0f} MiB of host memory could not be page-locked for worker "
                f"{worker} ({reason}), so copies to and from its device hold it up and take "
                "several times as long; raise the limit of locked memory (ulimit -l), or use fewer "
                "workers or a smaller model",
                stacklevel=3,
            )

    def release(self) -> None:
        """Unlock the memory."""
        for region in self._regions:
            self._streams.unlock(region)
        self._regions = []
