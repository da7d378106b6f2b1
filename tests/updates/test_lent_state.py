"""The flat pass in several processes: whoever steps, the bits are those of one."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from hybridtrain.engine.memory import Layout
from hybridtrain.engine.memory.arena import LentState
from hybridtrain.engine.memory.store import UpdateMaker
from hybridtrain.engine.protocol.messages import Clip
from hybridtrain.engine.updates.flat import lent_state
from hybridtrain.engine.updates.flat.lent_state import Lender, LentFlatUpdate, borrow, may_be_lent
from tests.support.rows import Pair, make_pair

SHAPES = [[(4, 8), (32,), (40, 32)], [(64,), (2, 4, 8)]]
KINDS: dict[str, Any] = {
    "Adam": partial(torch.optim.Adam, lr=0.1, fused=True),
    "Adam, not fused": partial(torch.optim.Adam, lr=0.1, fused=False),
    "AdamW": partial(torch.optim.AdamW, lr=0.1, fused=True, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "NAdam": partial(torch.optim.NAdam, lr=0.1),
}


def stepped(kind: str = "Adam", steps: int = 2) -> tuple[Pair, torch.Generator]:
    make = KINDS[kind]
    pair = make_pair(lambda groups: make([{"params": group} for group in groups]), SHAPES)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        pair.step(pair.gradients(generator))
    return pair, generator


def borrowed(pair: Pair, lent: LentState) -> LentFlatUpdate:
    numbers = range(len(pair.alone))
    found = borrow(pair.optimizer, numbers, pair.store, lent, pair.store.lending.arenas)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [None, Clip("norm", 0.5)])
def test_whoever_steps_the_bits_are_those_of_one(kind: str, clip: Clip | None) -> None:
    pair, generator = stepped(kind)
    lent = Lender(pair.store).lend(pair.update)
    assert lent is not None
    steppers = [borrowed(pair, lent).update, pair.update, borrowed(pair, lent).update]
    for turn in (0, 0, 1, 2, 1, 0):
        pair.update = steppers[turn]
        pair.step(pair.gradients(generator), clip)
    pair.assert_equal()
    states = [stepper.state().parameters for stepper in steppers]
    for number, kept in states[1].items():
        for name, value in kept.items():
            assert torch.equal(value, states[0][number][name]), (number, name)


def test_a_step_that_was_broken_off_leaves_no_trace() -> None:
    pair, generator = stepped()
    lent = Lender(pair.store).lend(pair.update)
    assert lent is not None
    mine, other = borrowed(pair, lent), borrowed(pair, lent)
    before, kept = pair.masters(), pair.update.state().parameters
    mine.keep()
    server, pair.update = pair.update, mine.update
    pair.step(pair.gradients(generator))
    assert not all(map(torch.equal, pair.masters(), before))
    other.restore()
    assert all(map(torch.equal, pair.masters(), before))
    now = server.state().parameters
    assert all(torch.equal(now[n][name], kept[n][name]) for n in kept for name in kept[n])


def test_lending_again_takes_memory_for_what_is_new_alone() -> None:
    pair, generator = stepped()
    lender, arenas = Lender(pair.store), pair.store.lending.arenas
    first = lender.lend(pair.update)
    n_arenas = len(arenas)
    assert lender.lend(pair.update) == first and len(arenas) == n_arenas
    gradients = pair.gradients(generator)
    gradients[0][2] = gradients[1][2] = None  # counts fewer steps from now on
    pair.step(gradients)
    again = lender.lend(pair.update)
    assert again is not None and first is not None
    assert again.flats == first.flats and len(again.count_groups) == 1 + len(first.count_groups)
    pair.update = borrowed(pair, again).update
    pair.step(pair.gradients(generator))
    pair.assert_equal()


def test_what_is_not_for_workers_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    never, _ = stepped(steps=0)
    assert Lender(never.store).lend(never.update) is None, "it has no state yet"
    pair, _ = stepped()
    assert Lender(pair.store).lend(object()) is None, "of a kind without a flat pass"
    assert may_be_lent(pair.store.layout, UpdateMaker.LAST_WORKER)
    monkeypatch.setattr(lent_state, "LARGEST_ALONE", 0)
    assert not may_be_lent(pair.store.layout, UpdateMaker.ONE_BY_ONE)
    monkeypatch.setattr(lent_state, "LARGEST", pair.store.layout.sizes[torch.float32] - 1)
    assert not may_be_lent(pair.store.layout, UpdateMaker.LAST_WORKER)


def test_one_buffer_of_dense_float32_may_be_lent() -> None:
    def layout(*dtypes: torch.dtype) -> Layout:
        return Layout.of((f"p{n}", torch.zeros(8, dtype=dtype)) for n, dtype in enumerate(dtypes))

    assert may_be_lent(layout(torch.float32, torch.float32), UpdateMaker.LAST_WORKER)
    assert not may_be_lent(layout(torch.float64), UpdateMaker.ONE_BY_ONE)
    assert not may_be_lent(layout(torch.float32, torch.bfloat16), UpdateMaker.ONE_BY_ONE)
    assert not may_be_lent(
        dataclasses.replace(layout(torch.float32), sparse=frozenset([0])), UpdateMaker.ONE_BY_ONE
    )


def test_hyper_parameters_that_change_what_is_kept_are_not_taken_over() -> None:
    pair, _ = stepped("SGD")
    lent = Lender(pair.store).lend(pair.update)
    assert lent is not None
    mine = borrowed(pair, lent)
    assert mine.set_groups(({"lr": 0.5}, {}))
    assert not mine.set_groups(({"momentum": 0.9}, {}))


def test_what_the_server_has_made_of_an_optimizer_a_worker_may_not_be_able_to() -> None:
    pair, _ = stepped()
    lent = Lender(pair.store).lend(pair.update)
    assert lent is not None
    pair.optimizer.param_groups[0]["capturable"] = True  # a matter of the worker's device
    assert borrow(pair.optimizer, range(5), pair.store, lent, pair.store.lending.arenas) is None
