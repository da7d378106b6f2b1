"""The kernel says which pages of a private mapping were written to."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybridtrain.engine.memory import worker_view
from hybridtrain.engine.memory.worker_view import (
    MappedPages,
    Pages,
    ProtectedPages,
    copy_on_write_is_seen,
    is_seen_by,
    map_private,
    pages_of,
)

N, PAGE = 2000, mmap.PAGESIZE
KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(not is_seen_by(kind), reason="this system cannot"))
    for kind in (ProtectedPages, MappedPages)
]
Kind = Callable[[mmap.mmap], Pages]


@pytest.fixture
def file() -> Iterator[int]:
    """N pages of zeros."""
    fd = os.memfd_create("pages")
    os.ftruncate(fd, N * PAGE)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("kind", KINDS)
def test_only_pages_that_were_written_to_are_ones_own(kind: Kind, file: int) -> None:
    private, shared = map_private(file, 0, N * PAGE), mmap.mmap(file, N * PAGE)
    own = kind(private)
    assert sum(private[::PAGE]) == 0 and own.own() == [], "reading is no write"
    shared[7 * PAGE] = 1
    assert private[7 * PAGE] == 1 and own.own() == [], "nor is what others write"
    for page in (3, 4, 5, 100, N - 1):
        private[page * PAGE + 17] = 9
    assert own.own() == [(3, 3), (100, 1), (N - 1, 1)]
    assert shared[3 * PAGE + 17] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_dropped_is_shared_again_and_seen_again_when_written(kind: Kind, file: int) -> None:
    private, shared = map_private(file, 0, N * PAGE), mmap.mmap(file, N * PAGE)
    own = kind(private)
    private[10 * PAGE : 20 * PAGE] = b"x" * 10 * PAGE
    own.drop((12, 3))
    assert own.own() == [(10, 2), (15, 5)]
    shared[13 * PAGE] = 5
    assert private[13 * PAGE] == 5 and private[12 * PAGE] == 0 and private[15 * PAGE] == ord("x")
    private[13 * PAGE + 1] = 2
    assert own.own() == [(10, 2), (13, 1), (15, 5)]
    assert private[13 * PAGE] == 5


@pytest.mark.parametrize("kind", KINDS)
def test_many_stretches_are_found_in_several_portions(kind: Kind, file: int) -> None:
    private = map_private(file, 0, N * PAGE)
    own = kind(private)
    for page in range(0, N, 2):
        private[page * PAGE] = 1
    assert N // 2 > worker_view._RUNS_AT_ONCE
    assert own.own() == [(page, 1) for page in range(0, N, 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_kernel_writes_for_us_counts_too(kind: Kind, file: int) -> None:
    private = map_private(file, 0, N * PAGE)
    own = kind(private)
    read_end, write_end = os.pipe()
    os.write(write_end, b"hello")
    os.readv(read_end, [memoryview(private)[50 * PAGE : 50 * PAGE + 5]])
    assert own.own() == [(50, 1)]
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_child_writes_to_pages_of_its_own(kind: Kind, file: int) -> None:
    private = map_private(file, 0, N * PAGE)
    own = kind(private)
    private[PAGE] = 1
    child = os.fork()
    if child == 0:  # a data loader's worker
        private[0] = private[2 * PAGE] = 7
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert own.own() == [(1, 1)] and private[0] == 0
    private[PAGE] = private[3 * PAGE] = 2
    assert own.own() == [(1, 1), (3, 1)]


def test_where_the_kernel_protects_nothing_its_map_is_read(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> int:
        raise PermissionError(1, "userfaultfd")

    monkeypatch.setattr(worker_view, "_userfaultfd", refused)
    is_seen_by.cache_clear()
    try:
        assert not is_seen_by(ProtectedPages)
        assert copy_on_write_is_seen() == is_seen_by(MappedPages)
        if copy_on_write_is_seen():
            assert isinstance(pages_of(map_private(file, 0, N * PAGE)), MappedPages)
    finally:
        is_seen_by.cache_clear()


@pytest.mark.skipif(not is_seen_by(ProtectedPages), reason="this system cannot")
def test_nothing_is_looked_for_while_the_process_has_had_no_page_fault(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, looks = [1], []
    monkeypatch.setattr(worker_view, "_page_faults", lambda: faults[0])
    private = map_private(file, 0, N * PAGE)
    own = ProtectedPages(private)
    look = own._look
    monkeypatch.setattr(own, "_look", lambda: looks.append(1) or look())
    private[3 * PAGE] = 1
    assert own.own() == own.own() == [(3, 1)] and len(looks) == 1, "what is known is told again"
    private[9 * PAGE], faults[0] = 1, 2
    assert own.own() == [(3, 1), (9, 1)] and len(looks) == 2
    own.drop((3, 1))
    assert own.own() == [(9, 1)] and len(looks) == 3, "what was dropped is another matter"


@pytest.mark.skipif(not is_seen_by(ProtectedPages), reason="this system cannot")
def test_a_first_write_is_a_page_fault_whoever_makes_it(file: int) -> None:
    private = map_private(file, 0, N * PAGE)
    own = ProtectedPages(private)
    thread = threading.Thread(target=lambda: private.write(b"x"))
    before = worker_view._page_faults()
    thread.start()
    thread.join()
    assert worker_view._page_faults() > before
    before = worker_view._page_faults()
    with Path("/dev/zero").open("rb", buffering=0) as zeros:
        zeros.readinto(memoryview(private)[5 * PAGE : 5 * PAGE + 1])
    assert worker_view._page_faults() > before and own.own() == [(0, 1), (5, 1)]
