"""User code may write to parameters: nobody else sees it, and nothing of it is lost."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial

import pytest
import torch

from hybridtrain.engine.memory import Layout, Store
from hybridtrain.engine.memory.layout import Slot
from hybridtrain.engine.memory.worker_view import (
    Copied,
    CopyOnWrite,
    MappedPages,
    ProtectedPages,
    WorkerView,
    is_seen_by,
    open_window,
)

KINDS = [
    *(
        pytest.param(
            partial(CopyOnWrite, pages=pages),
            marks=pytest.mark.skipif(not is_seen_by(pages), reason="this system cannot"),
            id=pages.__name__,
        )
        for pages in (ProtectedPages, MappedPages)
    ),
    pytest.param(Copied, id="Copied"),
]
Kind = Callable[[Store, int], WorkerView]

# Several to a page, one over several pages, one without elements, two dtypes.
SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((3, 4), torch.float32),
    ((5,), torch.float32),
    ((3000,), torch.float32),
    ((0,), torch.float32),
    ((7, 2), torch.float64),
    ((2, 4, 3, 3), torch.float32),
]


def make(kind: Kind, private: bool = False) -> tuple[Store, list[Slot], list[WorkerView]]:
    tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in SHAPES]
    tensors[5] = tensors[5].to(memory_format=torch.channels_last)
    store = Store(Layout.of((f"p{n}", t) for n, t in enumerate(tensors)), 2, private)
    slots = list(store.layout.slots)
    for number, slot in enumerate(slots):
        store.master(slot).fill_(number + 1)
    for worker in range(2):
        store.refresh(worker)
    return store, slots, [kind(store, worker) for worker in range(2)]


def values(window: WorkerView, slots: list[Slot]) -> list[set[float]]:
    return [set(window.view(slot).flatten().tolist()) for slot in slots]


UNTOUCHED: list[set[float]] = [{1.0}, {2.0}, {3.0}, set(), {5.0}, {6.0}]


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_window_shows_what_is_shared_after_every_refresh(kind: Kind, private: bool) -> None:
    store, slots, (window, _) = make(kind, private)
    assert values(window, slots) == UNTOUCHED
    for slot in slots:
        store.master(slot).mul_(10)
    store.refresh(0)
    assert window.written([]) == []
    window.refresh(slots)
    assert values(window, slots) == [{10 * v for v in each} for each in UNTOUCHED]
    assert [window.view(s).stride() for s in slots] == [s.stride for s in slots]


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_worker_writes_only_it_sees_until_it_refreshes(kind: Kind) -> None:
    store, slots, (one, other) = make(kind)
    one.view(slots[1])[2] = 9.0
    one.view(slots[4]).add_(1.0)
    assert one.written(slots) == [slots[1], slots[4]], "neighbours on the same page are not named"
    assert values(other, slots) == UNTOUCHED
    assert [set(store.master(s).flatten().tolist()) for s in slots] == UNTOUCHED
    one.refresh(slots)
    assert values(one, slots) == UNTOUCHED
    assert one.written(slots) == []


@pytest.mark.parametrize("kind", KINDS)
def test_values_swapped_in_and_out_again_are_no_change(kind: Kind) -> None:
    _, slots, (window, _) = make(kind)
    before = [window.view(slot).clone() for slot in slots]
    for slot in slots:
        window.view(slot).zero_()
    assert len(window.written(slots)) == len([s for s in slots if s.numel])
    for slot, value in zip(slots, before, strict=True):
        window.view(slot).copy_(value)
    assert window.written(slots) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_refreshed_keeps_the_workers_own_values_even_on_a_shared_page(
    kind: Kind,
) -> None:
    store, slots, (window, _) = make(kind)
    for slot in slots:
        window.view(slot).fill_(-1.0)
        store.master(slot).fill_(20.0)
    window.written(slots)
    window.refresh(slots[:1])
    assert values(window, slots) == [{20.0}, {-1.0}, {-1.0}, set(), {-1.0}, {-1.0}]
    window.written(slots)
    window.refresh(slots[2:])
    assert values(window, slots) == [{20.0}, {-1.0}, {20.0}, set(), {20.0}, {20.0}]


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_not_numbers_are_written_too(kind: Kind) -> None:
    _, slots, (window, _) = make(kind)
    window.view(slots[0])[0, 0] = torch.nan
    assert window.written(slots) == [slots[0]]


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_what_was_not_a_number_before_is_no_write(kind: Kind) -> None:
    store, slots, _ = make(kind)
    store.master(slots[0]).fill_(torch.nan)
    window = kind(store, 0)
    window.view(slots[1]).add_(1.0)  # on the same page
    assert window.written(slots) == [slots[1]]


@pytest.mark.parametrize("private", [False, True])
def test_writes_are_taken_over_as_values_in_lock_step_and_as_movements_otherwise(
    private: bool,
) -> None:
    store, slots, (window, _) = make(open_window, private)
    window.view(slots[0]).add_(0.5)
    if private:
        store.master(slots[0]).add_(100.0)  # others have moved it since
    store.take(0, {0: window.view(slots[0]).numpy().tobytes()})
    assert set(store.master(slots[0]).flatten().tolist()) == {101.5 if private else 1.5}


def test_rows_begin_on_pages_of_their_own() -> None:
    store, _, _ = make(Copied, private=True)
    regions = [store.region_of_parameters(worker) for worker in range(2)]
    assert all(edge % mmap.PAGESIZE == 0 for region in regions for edge in region)
    assert regions[0][1] <= regions[1][0]
    last = store.layout.slots[-1]
    assert store.place_of_parameter(1, last) + last.numel * 4 <= regions[1][1]


def test_without_a_map_of_pages_an_ordinary_copy_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "hybridtrain.engine.memory.worker_view.copy_on_write_is_seen", lambda: False
    )
    store, _, _ = make(Copied)
    assert isinstance(open_window(store, 0), Copied)
