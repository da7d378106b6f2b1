"""What a worker computes with: shared parameters that it may write to without anybody noticing.

Theory of operation. Under all-reduce every process has parameters of its own, and user code may do
with them what it likes: clamp them after a step, swap averaged weights in for a validation and back
again, move a frozen teacher along. Here all workers read the same memory, and such a write would
happen once per worker, and to all of them. So a worker looks at shared memory through a
*copy-on-write* mapping (``MAP_PRIVATE``): it sees what the server writes, at no cost, but the first
write of its own to a page gives it that page for itself. The kernel tells which pages these are
(:mod:`hybridtrain.memory.dirty_pages`), so that at its next step the worker can hand over what it
has changed, and then *refresh*: forget its own pages and see what is shared again. Where it does
not tell, an ordinary copy serves, for two more passes over memory.

Legend: P elements of one dtype's buffer.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import torch

from hybridtrain.memory.dirty_pages import Pages, Run, copy_on_write_is_seen, map_private, pages_of
from hybridtrain.memory.layout import Slot
from hybridtrain.memory.store import Store


class _Span(NamedTuple):
    """Bytes of a worker's region of parameters."""

    start: int
    stop: int


class WorkerView(Protocol):
    """One worker's view of the parameters."""

    def view(self, slot: Slot) -> torch.Tensor:
        """The parameter in its own shape, in memory that only this worker writes to."""
        ...

    def written(self, slots: Sequence[Slot]) -> list[Slot]:
        """Which of these this worker has changed since it last refreshed them."""
        ...

    def refresh(self, slots: Sequence[Slot]) -> None:
        """Let these hold what is shared. Follows ``written``, with no write in between."""
        ...

    def follow(self, slots: Sequence[Slot]) -> None:
        """Only these will be refreshed from now on; all others are this worker's own."""
        ...


def open_window(store: Store, worker: int) -> WorkerView:
    """The cheapest window that this system has, or none where workers write to the masters."""
    if store.lock_free:
        return Direct(store)
    kind = CopyOnWrite if copy_on_write_is_seen() else Copied
    return kind(store, worker)


class CopyOnWrite:
    """Shared pages, until this worker writes to them.

    Args:
        store: the shared buffers.
        worker: whose view.
        pages: tells which of its pages are shared no more.
    """

    def __init__(
        self, store: Store, worker: int, pages: Callable[[mmap.mmap], Pages] = pages_of
    ) -> None:
        self._start, stop = store.region_of_parameters(worker)
        n_bytes = max(stop - self._start, mmap.PAGESIZE)
        self._map = map_private(store.arena.fd, self._start, n_bytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)  # (region,)
        self._shared = store.arena.tensor(self._start, n_bytes, torch.uint8)  # (region,)
        self._at = {slot: self._span(store, worker, slot) for slot in store.layout.slots}
        self._spans = sorted((span, slot) for slot, span in self._at.items() if slot.numel)
        self._ends = [span.stop for span, _ in self._spans]
        self._pages = pages(self._map)
        self._own: list[Run] = []  # as ``written`` has seen them

    def _span(self, store: Store, worker: int, slot: Slot) -> _Span:
        first = store.place_of_parameter(worker, slot) - self._start
        return _Span(first, first + slot.numel * slot.dtype.itemsize)

    def view(self, slot: Slot) -> torch.Tensor:
        if slot.numel == 0:
            return slot.view(torch.empty(0, dtype=slot.dtype))
        start = self._at[slot].start
        return slot.view(
            torch.frombuffer(self._map, dtype=slot.dtype, count=slot.numel, offset=start)
        )

    def written(self, slots: Sequence[Slot]) -> list[Slot]:
        self._own = self._pages.own()
        if not self._own:
            return []
        changed = {slot for span, slot in self._inside(self._own) if not self._is_shared(span)}
        return [slot for slot in slots if slot in changed]

    def refresh(self, slots: Sequence[Slot]) -> None:
        if not self._own:
            return
        mine = set(slots)
        drop = _joined(span for span, slot in self._inside(self._own) if slot in mine)
        others = [span for span, slot in self._inside(drop) if slot not in mine]
        kept = [(part, part.clone()) for part in map(self._part, others)]
        for run in drop:
            self._pages.drop(run)
        for part, value in kept:  # a neighbour on the same page that is not to be refreshed
            part.copy_(value)
        self._own = []

    def follow(self, slots: Sequence[Slot]) -> None:
        """Nothing: what is written to is this worker's own until it is refreshed."""

    def _inside(self, runs: Sequence[Run]) -> Iterator[tuple[_Span, Slot]]:
        """What of which parameters lies on these pages."""
        for first, count in runs:
            start, stop = first * mmap.PAGESIZE, (first + count) * mmap.PAGESIZE
            for span, slot in islice(self._spans, bisect_right(self._ends, start), None):
                if span.start >= stop:
                    break
                yield _Span(max(span.start, start), min(span.stop, stop)), slot

    def _part(self, span: _Span) -> torch.Tensor:
        return self._bytes[span.start : span.stop]

    def _is_shared(self, span: _Span) -> bool:
        return torch.equal(self._part(span), self._shared[span.start : span.stop])


def _joined(spans: Iterable[_Span]) -> list[Run]:
    """The pages that these lie on, each once. They are given in ascending order."""
    runs: list[Run] = []
    for start, stop in spans:
        first, last = start // mmap.PAGESIZE, (stop - 1) // mmap.PAGESIZE
        if runs and first <= sum(runs[-1]):
            first = runs.pop()[0]
        runs.append((first, last - first + 1))
    return runs


class Copied:
    """A copy in ordinary memory, compared and renewed at every step.

    Args:
        store: the shared buffers.
        worker: whose view.
    """

    def __init__(self, store: Store, worker: int) -> None:
        self._store, self._worker = store, worker
        self._copies = {slot: store.parameter(worker, slot).clone() for slot in store.layout.slots}

    def view(self, slot: Slot) -> torch.Tensor:
        return self._copies[slot]

    def written(self, slots: Sequence[Slot]) -> list[Slot]:
        return [s for s in slots if not torch.equal(self.view(s), self._shared(s))]

    def refresh(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self.view(slot).copy_(self._shared(slot))

    def follow(self, slots: Sequence[Slot]) -> None:
        """Nothing: all copies are this worker's own."""

    def _shared(self, slot: Slot) -> torch.Tensor:
        return self._store.parameter(self._worker, slot)


class Direct:
    """The masters themselves, written to by all; but what no optimizer steps is each worker's own.

    Args:
        store: the shared buffers.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._own: dict[Slot, torch.Tensor] = {}

    def view(self, slot: Slot) -> torch.Tensor:
        return self._own.get(slot, self._store.master(slot))

    def written(self, slots: Sequence[Slot]) -> list[Slot]:
        return []  # it is there already

    def refresh(self, slots: Sequence[Slot]) -> None:
        """Nothing: there is no other copy."""

    def follow(self, slots: Sequence[Slot]) -> None:
        others = set(self._store.layout.slots) - set(slots)
        self._own = {slot: self.view(slot).clone() for slot in others}
