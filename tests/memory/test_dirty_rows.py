"""Own copies of the parameters are brought up to date by the rows that have moved."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hybridtrain.engine.memory import Layout, Store, Table
from hybridtrain.engine.memory.sparse_rows import Block

ROWS = [50, 3, 400]


def make(workers: int = 2) -> Store:
    values = [torch.zeros(n, 4) for n in ROWS] + [torch.zeros(9, 2, dtype=torch.float64)]
    return Store(Layout.of((f"p{n}", v) for n, v in enumerate(values)), workers, True)


def equal(store: Store, worker: int) -> bool:
    return all(
        torch.equal(store.master(slot), store.parameter(worker, slot))
        for slot in store.layout.slots
    )


@pytest.mark.parametrize("seed", range(20))
def test_whatever_moved_in_whatever_order_a_refreshed_copy_is_what_the_masters_are(
    seed: int,
) -> None:
    store, dice = make(3), random.Random(seed)
    masters = [store.master(slot) for slot in store.layout.slots]
    for step in range(60):
        match dice.choice(["rows", "rows", "rows", "step", "write", "refresh"]):
            case "rows":
                number = dice.choice([0, 2])
                rows = np.array(dice.sample(range(ROWS[number]), dice.randrange(0, 20)), np.int64)
                masters[number][rows] += step + 1.0
                masters[1].add_(1.0)
                store.moves.note([1, number], {number: rows})
            case "step":
                for master in masters:
                    master.add_(0.5)
                store.moves.note(range(4), {})
            case "write":
                value = torch.full((ROWS[0], 4), float(step))
                store.take(dice.randrange(3), {0: value.numpy().tobytes()})
            case "refresh":
                worker = dice.randrange(3)
                store.refresh(worker)
                assert equal(store, worker)
    for worker in range(3):
        store.refresh(worker)
        assert equal(store, worker)


def test_only_rows_that_have_moved_are_copied() -> None:
    store = make()
    large = store.layout.slots[2]
    store.moves.note([2], {2: np.array([1])})
    store.refresh(0)
    store.parameter(0, large).fill_(-1.0)  # would be seen if it were written to
    store.master(large)[[5, 7]] = 3.0
    store.moves.note([2], {2: np.array([5])})
    store.moves.note([2], {2: np.array([7, 5])})
    store.refresh(0)
    values = store.parameter(0, large)[:, 0]
    assert values[[5, 7]].tolist() == [3.0, 3.0] and (values == -1.0).sum() == ROWS[2] - 2


def test_a_worker_that_lags_far_behind_is_given_all_rows_and_no_list_grows() -> None:
    store = make()
    for _ in range(1000):
        store.moves.note([2], {2: np.arange(10)})
    kept = store.moves._lacks[2]
    assert kept == [None, None]
    store.refresh(0)
    assert kept == [[], None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int8])
@pytest.mark.parametrize("shape", [(9,), (9, 4), (9, 2, 3)])
def test_a_table_reads_and_writes_rows_of_any_kind(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    table, rows = Table(whole), np.array([7, 0, 3])
    out = Block(5, whole)
    taken = table.take(rows, out)
    assert torch.equal(taken, whole[rows]) and taken.data_ptr() == out.tensor.data_ptr()
    table.put(np.array([1, 8, 2]), out)
    assert torch.equal(whole[[1, 8, 2]], whole[rows])
    assert len(table.take(np.empty(0, np.int64), out)) == 0


def test_a_write_is_a_difference_where_the_masters_have_moved_and_else_a_value() -> None:
    store = Store(Layout.of([("p", torch.zeros(3))]), 2, True)
    master = store.master(store.layout.slots[0])
    master.copy_(torch.tensor([0.1, 1.0, float("nan")]))
    store.refresh(0)
    master[1] += 1.0
    store.take(0, {0: torch.tensor([0.3, 0.5, 0.0]).numpy().tobytes()})
    assert torch.equal(master, torch.tensor([0.3, 1.5, 0.0]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.int8])
def test_a_write_to_what_torch_cannot_add_is_a_value(dtype: torch.dtype) -> None:
    store = Store(Layout.of([("p", torch.zeros(2).to(dtype))]), 2, True)
    written = torch.tensor([1.0, 0.0]).to(dtype)
    store.take(0, {0: written.view(torch.uint8).numpy().tobytes()})
    slot = store.layout.slots[0]
    for found in (store.master(slot), store.parameter(0, slot)):
        assert torch.equal(found.view(torch.uint8), written.view(torch.uint8))
