"""A worker's view of the shared parameters, with its own writes kept apart.

Theory of operation. Under all-reduce every process has its own parameters, and user code may change
them: clamp them after a step, swap in averaged weights for a validation, update a frozen teacher.
Here all workers read the same memory, and such a write would happen once per worker, to all of
them. So a worker maps the shared memory *copy-on-write* (``MAP_PRIVATE``): it sees the server's
writes at no cost, and its own first write to a page gives it a copy of that page. The kernel
reports these pages (:mod:`hybridtrain.memory.dirty_pages`): at its next step the worker sends what
it has changed, and then *refreshes*: it drops its pages and sees the shared ones. Where the kernel
cannot report them, the worker keeps an ordinary copy, for two more passes over memory.

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
    """A byte range of a worker's region of parameters."""

    start: int
    stop: int


class WorkerView(Protocol):
    """One worker's view of the parameters."""

    def view(self, slot: Slot) -> torch.Tensor:
        """The parameter in its own shape, in memory that only this worker writes to."""
        ...

    def written(self, slots: Sequence[Slot]) -> list[Slot]:
        """The slots that this worker has changed since it last refreshed them."""
        ...

    def refresh(self, slots: Sequence[Slot]) -> None:
        """Show the shared values of these again. Follows ``written``, with no write in between."""
        ...

    def follow(self, slots: Sequence[Slot]) -> None:
        """From now on only these are refreshed; all others are this worker's own."""
        ...


def open_window(store: Store, worker: int) -> WorkerView:
    """The cheapest view that this system has; the masters where workers write to them."""
    if store.lock_free:
        return Direct(store)
    kind = CopyOnWrite if copy_on_write_is_seen() else Copied
    return kind(store, worker)


class CopyOnWrite:
    """Shared pages, until this worker writes to them.

    Args:
        store: the shared buffers.
        worker: the number of the worker.
        pages: finds the pages written to.
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
        self._own: list[Run] = []  # found by ``written``

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
        """Nothing to do: pages written to are this worker's own until they are refreshed."""

    def _inside(self, runs: Sequence[Run]) -> Iterator[tuple[_Span, Slot]]:
        """The parts of parameters that lie on these pages."""
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
    """The pages of these ascending spans, each once."""
    runs: list[Run] = []
    for start, stop in spans:
        first, last = start // mmap.PAGESIZE, (stop - 1) // mmap.PAGESIZE
        if runs and first <= sum(runs[-1]):
            first = runs.pop()[0]
        runs.append((first, last - first + 1))
    return runs


class Copied:
    """A copy in ordinary memory, compared and updated at every step.

    Args:
        store: the shared buffers.
        worker: the number of the worker.
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
        """Nothing to do: all copies are this worker's own."""

    def _shared(self, slot: Slot) -> torch.Tensor:
        return self._store.parameter(self._worker, slot)


class Direct:
    """The masters, which all workers write; parameters without an optimizer are each worker's own.

    Args:
        store: the shared buffers.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._own: dict[Slot, torch.Tensor] = {}

    def view(self, slot: Slot) -> torch.Tensor:
        return self._own.get(slot, self._store.master(slot))

    def written(self, slots: Sequence[Slot]) -> list[Slot]:
        return []  # all writes are in the masters already

    def refresh(self, slots: Sequence[Slot]) -> None:
        """Nothing to do: there is no copy."""

    def follow(self, slots: Sequence[Slot]) -> None:
        others = set(self._store.layout.slots) - set(slots)
        self._own = {slot: self.view(slot).clone() for slot in others}
