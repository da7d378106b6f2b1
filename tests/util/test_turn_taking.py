"""A function that takes turns with its caller: suspended where it asks, never running beside it."""

from __future__ import annotations

import threading

import pytest
import torch

from hybridtrain.util.turn_taking import Abandoned, Asked, FunctionEnded, TurnTaking


def test_a_function_is_suspended_where_it_asks_and_goes_on_with_the_answer() -> None:
    turns, seen = TurnTaking(), []

    def function() -> None:
        seen.append(turns.ask("first"))
        seen.append(turns.ask("second"))

    assert turns.start(function) == Asked("first")
    assert seen == []
    assert turns.answer(1) == Asked("second")
    assert seen == [1]
    assert turns.answer(2) == FunctionEnded()
    assert seen == [1, 2]
    turns.close()


def test_what_the_function_raises_reaches_the_caller() -> None:
    turns = TurnTaking()
    turned = turns.start(lambda: [][0])
    assert isinstance(turned, FunctionEnded) and isinstance(turned.error, IndexError)
    assert turns.start(lambda: None) == FunctionEnded(), "it can be used again"
    turns.close()


@pytest.mark.parametrize("stubborn", [False, True])
def test_closing_unwinds_a_suspended_function(stubborn: bool) -> None:
    turns, unwound = TurnTaking(), []

    def function() -> None:
        try:
            turns.ask("never answered")
        except Abandoned:
            unwound.append(True)
            if stubborn:
                turns.ask("and once more")
            raise

    before = threading.active_count()
    assert turns.start(function) == Asked("never answered")
    turns.close()
    assert unwound == [True]
    assert threading.active_count() == before


def test_one_thread_serves_all_functions_and_computes_without_gradients() -> None:
    turns, seen = TurnTaking(), set()

    def function() -> None:
        seen.add((threading.get_ident(), torch.is_grad_enabled(), torch.get_num_threads()))

    for _ in range(3):
        turns.start(function)
    ((thread, gradients, n_threads),) = seen
    assert thread != threading.get_ident()
    assert not gradients
    assert n_threads == 1
    turns.close()


def test_closing_what_never_started_is_nothing() -> None:
    TurnTaking().close()
