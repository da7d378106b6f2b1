"""What a worker computes with: shared parameters that it may write to without anybody noticing.

Theory of operation. Under all-reduce every process has parameters of its own, and user code may do
with them what it likes: clamp them after a step, swap averaged weights in for a validation and back
again, move a frozen teacher along. Here all workers read the same memory, and such a write would
happen once per worker, and to all of them. So a worker looks at shared memory through a
*copy-on-write* mapping (``MAP_PRIVATE``): it sees what the server writes, at no cost, but the first
write of its own to a page gives it that page for itself. The kernel's page map tells which pages
these are (documented in the kernel's ``admin-guide/mm/pagemap.rst``), so that at its next step the
worker can hand over what it has changed, and then *refresh*: forget its own pages and see what is
shared again. Where there is no such map, an ordinary copy serves, for two more passes over memory.

Legend: P elements of one dtype's buffer.
"""

from __future__ import annotations

import functools
import mmap
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from hybridtrain.memory.layout import Slot
from hybridtrain.memory.store import Store

_PAGE_MAP = Path("/proc/self/pagemap")
_ENTRY_BYTES = 8
# Bits 61 to 63 of an entry, shifted down: belongs to a file, is swapped out, is present.
_OF_FILE, _SWAPPED, _PRESENT = 1, 2, 4


class Window(Protocol):
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


def open_window(store: Store, worker: int) -> Window:
    """The cheapest window that this system has, or none where workers write to the masters."""
    if store.lock_free:
        return Direct(store)
    kind = CopyOnWrite if copy_on_write_is_seen() else Copied
    return kind(store, worker)


@functools.cache
def copy_on_write_is_seen() -> bool:
    """Whether this system tells pages that were written to from those that are shared."""
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_DONTNEED"):
        return False
    try:
        return _one_written_page_is_seen()
    except (OSError, ValueError):
        return False


def _one_written_page_is_seen() -> bool:
    """Try it, on two pages of which one is written to."""
    fd = os.memfd_create("hybridtrain-probe", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 2 * mmap.PAGESIZE)
        pages = torch.frombuffer(_map_private(fd, 0, 2 * mmap.PAGESIZE), dtype=torch.uint8)
        bool(pages.any())
        pages[0] = 1
        return _PageMap(pages).private().tolist() == [True, False]
    finally:
        os.close(fd)


def _map_private(fd: int, start: int, n_bytes: int) -> mmap.mmap:
    access = mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(fd, n_bytes, flags=mmap.MAP_PRIVATE, prot=access, offset=start)


class _PageMap:
    """Which pages of a mapping are this process's own.

    Args:
        pages: all bytes of the mapping, (n,) uint8.
    """

    def __init__(self, pages: torch.Tensor) -> None:
        n_pages = pages.numel() // mmap.PAGESIZE
        self._at = pages.data_ptr() // mmap.PAGESIZE * _ENTRY_BYTES
        self._raw = bytearray(n_pages * _ENTRY_BYTES)
        self._entries = torch.frombuffer(self._raw, dtype=torch.int64)  # (pages,)
        self._fd = os.open(_PAGE_MAP, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)

    def private(self) -> torch.Tensor:
        """True for each page that was written to: (pages,) bool."""
        view, done = memoryview(self._raw), 0
        while done < len(view):
            done += os.preadv(self._fd, [view[done:]], self._at + done) or len(view)
        flags = self._entries >> 61
        own = (flags & (_PRESENT | _OF_FILE)) == _PRESENT
        return own | ((flags & _SWAPPED) != 0)


class CopyOnWrite:
    """Shared pages, until this worker writes to them.

    Args:
        store: the shared buffers.
        worker: whose view.
    """

    def __init__(self, store: Store, worker: int) -> None:
        self._store, self._worker = store, worker
        self._start, stop = store.region_of_parameters(worker)
        self._map = _map_private(store.arena.fd, self._start, max(stop - self._start, 1))
        self._pages = _PageMap(torch.frombuffer(self._map, dtype=torch.uint8))
        self._own: torch.Tensor | None = None  # (pages,) bool, as ``written`` has seen it

    def view(self, slot: Slot) -> torch.Tensor:
        if slot.numel == 0:
            return slot.view(torch.empty(0, dtype=slot.dtype))
        start = self._first_byte(slot)
        return slot.view(
            torch.frombuffer(self._map, dtype=slot.dtype, count=slot.numel, offset=start)
        )

    def written(self, slots: Sequence[Slot]) -> list[Slot]:
        own = self._pages.private()
        self._own = own if bool(own.any()) else None
        return [
            slot
            for slot in slots
            if self._touched(slot)
            and not torch.equal(self.view(slot), self._store.parameter(self._worker, slot))
        ]

    def refresh(self, slots: Sequence[Slot]) -> None:
        if self._own is None:
            return
        mine = set(slots)
        others = [slot for slot in self._store.layout.slots if slot not in mine]
        drop = torch.zeros_like(self._own)
        for slot in slots:
            drop[self._pages_of(slot)] = True
        drop &= self._own
        kept = [(v, v.clone()) for v in map(self.view, _on_pages(others, self, drop))]
        for first, count in _runs(drop):
            self._map.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, count * mmap.PAGESIZE)
        for view, value in kept:  # a neighbour on the same page that is not to be refreshed
            view.copy_(value)
        self._own = None

    def follow(self, slots: Sequence[Slot]) -> None:
        """Nothing: what is written to is this worker's own until it is refreshed."""

    def _touched(self, slot: Slot) -> bool:
        return self._own is not None and bool(self._own[self._pages_of(slot)].any())

    def _first_byte(self, slot: Slot) -> int:
        return self._store.place_of_parameter(self._worker, slot) - self._start

    def _pages_of(self, slot: Slot) -> slice:
        first = self._first_byte(slot)
        last = first + slot.numel * slot.dtype.itemsize - 1
        return slice(first // mmap.PAGESIZE, last // mmap.PAGESIZE + 1)


def _on_pages(slots: Iterable[Slot], window: CopyOnWrite, pages: torch.Tensor) -> list[Slot]:
    return [s for s in slots if s.numel and bool(pages[window._pages_of(s)].any())]


def _runs(pages: torch.Tensor) -> list[tuple[int, int]]:
    """First page and number of pages of each stretch of marked ones."""
    marked = torch.nn.functional.pad(pages.to(torch.int8), (1, 1))
    edges = torch.diff(marked)
    starts, stops = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    return [(int(a), int(b - a)) for a, b in zip(starts, stops, strict=True)]


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
