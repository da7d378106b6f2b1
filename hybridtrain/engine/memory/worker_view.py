"""A worker's view of the shared parameters, with its own writes kept apart.

Theory of operation. Under all-reduce every process has its own parameters, and user code may change
them: clamp them after a step, swap in averaged weights for a validation, update a frozen teacher.
Here all workers read the same memory, and such a write would happen once per worker, to all of
them. So a worker maps the shared memory *copy-on-write* (``MAP_PRIVATE``): it sees the server's
writes at no cost, and its own first write to a page gives it a copy of that page. The kernel
reports these pages (:class:`Pages`): at its next step the worker sends what
it has changed, and then *refreshes*: it drops its pages and sees the shared ones. Where the kernel
cannot report them, the worker keeps an ordinary copy, for two more passes over memory.

Legend: P elements of one dtype's buffer.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import platform
import resource
import struct
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch

from hybridtrain.engine.memory.layout import Slot
from hybridtrain.engine.memory.store import Store, checksum

# ---- ask the kernel which pages of a private mapping this process has written to ----------------
# Theory of operation. A private mapping of shared memory shows the writes of other processes, until
# this process writes to a page, which then becomes its own. There are two ways to find these pages.
# The page map (``admin-guide/mm/pagemap.rst``) says of every page whether it still belongs to the
# file; the kernel visits a description of each: 50 ns per page, 5 ms per 100 million parameters.
# Since Linux 6.7 (``admin-guide/mm/userfaultfd.rst``) the kernel can write-protect the mapping
# *asynchronously*: a first write to a page clears one bit, without a signal or a message, and
# ``PAGEMAP_SCAN`` finds cleared bits at 1 ns per page. All pages are mapped at the start, because a
# protected page that is not mapped costs one more fault. Such a write is a page fault of this
# process: if it has had none since the last scan, no scan is needed.

Run = tuple[int, int]  # first page, number of pages

# ---- linux/userfaultfd.h and linux/fs.h ---------------------------------------------------------
_SYSCALL = {"x86_64": 323, "aarch64": 282, "riscv64": 282}
_USER_MODE_ONLY = 1  # needs no privilege: faults inside the kernel are not reported
_API, _REGISTER, _PROTECT = 0xC018AA3F, 0xC020AA00, 0xC018AA06
_API_VERSION = 0xAA
_EVEN_UNMAPPED, _ASYNCHRONOUS = 1 << 13, 1 << 15
_FOR_WRITES = 2
_SCAN = 0xC0606610
_SCAN_FIELDS = 12
_START, _END, _WALKED, _BUFFER, _ROOM, _MASK, _RETURNED = 2, 3, 4, 5, 6, 9, 11
_WRITTEN = 2
_MADV_POPULATE_READ = 22
_RUNS_AT_ONCE = 512

_PAGE_MAP = Path("/proc/self/pagemap")
_ENTRY_BYTES = 8
# Bits 61 to 63 of a page map's entry, shifted down: belongs to a file, is swapped out, is present.
_OF_FILE, _SWAPPED, _PRESENT = 1, 2, 4


class ProtectedPages:
    """Write-protected pages, by ``userfaultfd``.

    Args:
        mapping: the whole mapping; it must not be moved.

    Raises:
        OSError: if this kernel cannot, or this process may not.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._address = _address(mapping)
        self._found: list[Run] = []  # by the last scan
        self._looked_at = -1  # page faults of this process before the last scan
        self._faults = _userfaultfd()
        weakref.finalize(self, os.close, self._faults)
        self._map = os.open(_PAGE_MAP, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._map)
        _control(self._faults, _API, "<QQQ", _API_VERSION, _EVEN_UNMAPPED | _ASYNCHRONOUS, 0)
        mapping.madvise(_MADV_POPULATE_READ)
        _control(self._faults, _REGISTER, "<QQQQ", self._address, len(mapping), _FOR_WRITES, 0)
        self._protect((0, len(mapping) // mmap.PAGESIZE))
        self._runs = (ctypes.c_uint64 * (3 * _RUNS_AT_ONCE))()  # first, last byte, categories
        self._request = (ctypes.c_uint64 * _SCAN_FIELDS)()
        self._request[0] = ctypes.sizeof(self._request)
        self._request[_END] = self._address + len(mapping)
        self._request[_BUFFER] = ctypes.addressof(self._runs)
        self._request[_ROOM] = _RUNS_AT_ONCE
        self._request[_MASK] = self._request[_RETURNED] = _WRITTEN

    def _protect(self, run: Run) -> None:
        start, n_bytes = self._address + run[0] * mmap.PAGESIZE, run[1] * mmap.PAGESIZE
        _control(self._faults, _PROTECT, "<QQQ", start, n_bytes, 1)

    def own(self) -> list[Run]:
        """The pages written to since they were last dropped, in ascending order."""
        if (faults := _page_faults()) != self._looked_at:
            self._found, self._looked_at = self._look(), faults
        return list(self._found)

    def _look(self) -> list[Run]:
        found: list[Run] = []
        request, runs = self._request, self._runs
        request[_START] = self._address
        while request[_START] < request[_END]:
            count = fcntl.ioctl(self._map, _SCAN, request)
            for at in range(0, 3 * count, 3):
                first = (runs[at] - self._address) // mmap.PAGESIZE
                found.append((first, (runs[at + 1] - runs[at]) // mmap.PAGESIZE))
            request[_START] = request[_WALKED]
        return found

    def drop(self, run: Run) -> None:
        """Discard this process's writes to these pages: they show the shared memory again."""
        start, n_bytes = run[0] * mmap.PAGESIZE, run[1] * mmap.PAGESIZE
        self._mapping.madvise(mmap.MADV_DONTNEED, start, n_bytes)
        self._mapping.madvise(_MADV_POPULATE_READ, start, n_bytes)
        self._protect(run)
        self._looked_at = -1


class MappedPages:
    """Pages looked up in the page map.

    Args:
        mapping: the whole mapping; it must not be moved.

    Raises:
        OSError: if there is no page map.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._at = _address(mapping) // mmap.PAGESIZE * _ENTRY_BYTES
        self._raw = bytearray(len(mapping) // mmap.PAGESIZE * _ENTRY_BYTES)
        self._entries = torch.frombuffer(self._raw, dtype=torch.int64)  # (pages,)
        self._fd = os.open(_PAGE_MAP, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)

    def own(self) -> list[Run]:
        view, done = memoryview(self._raw), 0
        while done < len(view):
            done += os.preadv(self._fd, [view[done:]], self._at + done) or len(view)
        flags = self._entries >> 61
        own = (flags & (_PRESENT | _OF_FILE)) == _PRESENT
        own |= (flags & _SWAPPED) != 0
        return _runs(own) if bool(own.any()) else []

    def drop(self, run: Run) -> None:
        start, n_bytes = run[0] * mmap.PAGESIZE, run[1] * mmap.PAGESIZE
        self._mapping.madvise(mmap.MADV_DONTNEED, start, n_bytes)


Pages = ProtectedPages | MappedPages


def map_private(fd: int, start: int, n_bytes: int) -> mmap.mmap:
    """Map whole pages of a file copy-on-write."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(fd, n_bytes, flags=mmap.MAP_PRIVATE, prot=access, offset=start)


def pages_of(mapping: mmap.mmap) -> Pages:
    """The fastest implementation that works here; needs :func:`copy_on_write_is_seen`."""
    with suppress(OSError, ValueError):
        if is_seen_by(ProtectedPages):
            return ProtectedPages(mapping)
    return MappedPages(mapping)


def copy_on_write_is_seen() -> bool:
    """Whether this system can tell written pages from shared ones."""
    return is_seen_by(ProtectedPages) or is_seen_by(MappedPages)


@functools.cache
def is_seen_by(kind: Callable[[mmap.mmap], Pages]) -> bool:
    """Whether this implementation works here."""
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_DONTNEED"):
        return False
    try:
        return _one_written_page_is_seen(kind)
    except (OSError, ValueError):
        return False


def _one_written_page_is_seen(kind: Callable[[mmap.mmap], Pages]) -> bool:
    """Try it on two pages, and write to the first."""
    fd = os.memfd_create("hybridtrain-probe", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 2 * mmap.PAGESIZE)
        mapping = map_private(fd, 0, 2 * mmap.PAGESIZE)
        pages = kind(mapping)
        for _ in range(2):
            if any(mapping[:]) or pages.own():
                return False
            mapping[0] = 1
            if pages.own() != [(0, 1)]:
                return False
            pages.drop((0, 1))
        return True
    finally:
        os.close(fd)


def _address(mapping: mmap.mmap) -> int:
    return torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()


def _userfaultfd() -> int:
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise OSError(f"the number of this call is not known for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "userfaultfd")
    return fd


def _page_faults() -> int:
    """Page faults of this process so far, over all threads and including the kernel's."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt + used.ru_majflt


def _control(fd: int, request: int, layout: str, *fields: int) -> None:
    fcntl.ioctl(fd, request, bytearray(struct.pack(layout, *fields)))


def _runs(pages: torch.Tensor) -> list[Run]:
    """The runs of consecutive marked pages."""
    marked = torch.nn.functional.pad(pages.to(torch.int8), (1, 1))
    edges = torch.diff(marked)
    starts, stops = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    return list(zip(starts.tolist(), (stops - starts).tolist(), strict=True))


class _Span(NamedTuple):
    """A byte range of a worker's region of parameters."""

    start: int
    stop: int


def open_window(store: Store, worker: int, buffer: int | None = None) -> WorkerView:
    """The cheapest view that this system has; the masters where workers write to them.

    ``buffer``: see :meth:`hybridtrain.engine.memory.store.Store.parameter`.
    """
    if store.lock_free:
        return Direct(store)
    kind = CopyOnWrite if copy_on_write_is_seen() else Copied
    return kind(store, worker, buffer=buffer)


class CopyOnWrite:
    """Shared pages, until this worker writes to them.

    Args:
        store: the shared buffers.
        worker: the number of the worker.
        pages: finds the pages written to.
        buffer: of two, the one that is seen.
    """

    def __init__(
        self,
        store: Store,
        worker: int,
        pages: Callable[[mmap.mmap], Pages] = pages_of,
        buffer: int | None = None,
    ) -> None:
        self._start, stop = store.region_of_parameters(worker, buffer)
        n_bytes = max(stop - self._start, mmap.PAGESIZE)
        self._map = map_private(store.arena.fd, self._start, n_bytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)  # (region,)
        self._shared = store.arena.tensor(self._start, n_bytes, torch.uint8)  # (region,)
        place = partial(store.place_of_parameter, worker, buffer=buffer)
        self._at = {slot: self._span(place(slot), slot) for slot in store.layout.slots}
        self._spans = sorted((span, slot) for slot, span in self._at.items() if slot.numel)
        self._ends = [span.stop for span, _ in self._spans]
        self._pages = pages(self._map)
        self._own: list[Run] = []  # found by ``written``

    def _span(self, place: int, slot: Slot) -> _Span:
        first = place - self._start
        return _Span(first, first + slot.numel * slot.dtype.itemsize)

    def view(self, slot: Slot) -> torch.Tensor:
        """The parameter in its own shape, in memory that only this worker writes to."""
        if slot.numel == 0:
            return slot.view(torch.empty(0, dtype=slot.dtype))
        start = self._at[slot].start
        return slot.view(
            torch.frombuffer(self._map, dtype=slot.dtype, count=slot.numel, offset=start)
        )

    def written(self, slots: Sequence[Slot]) -> list[Slot]:
        """The slots that this worker has changed since it last refreshed them."""
        self._own = self._pages.own()
        if not self._own:
            return []
        changed = {slot for span, slot in self._inside(self._own) if not self._is_shared(span)}
        return [slot for slot in slots if slot in changed]

    def refresh(self, slots: Sequence[Slot]) -> None:
        """Show the shared values of these again. Follows ``written``, with no write in between."""
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
        buffer: of two, the one that is seen.
    """

    def __init__(self, store: Store, worker: int, buffer: int | None = None) -> None:
        self._shared = partial(store.parameter, worker, buffer=buffer)
        self._copies = {slot: self._shared(slot).clone() for slot in store.layout.slots}

    def view(self, slot: Slot) -> torch.Tensor:
        return self._copies[slot]

    def written(self, slots: Sequence[Slot]) -> list[Slot]:
        return [s for s in slots if not torch.equal(self.view(s), self._shared(s))]

    def refresh(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self.view(slot).copy_(self._shared(slot))

    def follow(self, slots: Sequence[Slot]) -> None:
        """Nothing to do: all copies are this worker's own."""


class Direct:
    """The masters, which all workers write; parameters without an optimizer are each worker's own.

    Args:
        store: the shared buffers.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._own: dict[Slot, torch.Tensor] = {}
        self._checksums: dict[Slot, int] = {}  # of the masters of these

    def view(self, slot: Slot) -> torch.Tensor:
        return self._own.get(slot, self._store.master(slot))

    def written(self, slots: Sequence[Slot]) -> list[Slot]:
        return []  # all writes are in the masters already

    def refresh(self, slots: Sequence[Slot]) -> None:
        """Nothing to do: there is no copy."""

    def follow(self, slots: Sequence[Slot]) -> None:
        others = set(self._store.layout.slots) - set(slots)
        for slot in self._own.keys() - others:  # the first one that trains it says how it begins
            master, before = self._store.master(slot), self._checksums.pop(slot)
            if checksum(master) == before:
                master.copy_(self._own[slot])
        self._own = {slot: self.view(slot).clone() for slot in others}
        new = others - self._checksums.keys()
        self._checksums |= {slot: checksum(self._store.master(slot)) for slot in new}


WorkerView = CopyOnWrite | Copied | Direct
