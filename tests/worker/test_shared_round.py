"""Rounds in shared memory: the last one makes the update, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from hybridtrain.engine.memory import Arena
from hybridtrain.engine.protocol.shared_round import Arrival, ArrivalResult, SharedRound
from tests.support.deaths import Died, Words, dies_at

ONE = Arrival(4.0, 4.0)


def round_of(n_workers: int) -> SharedRound:
    n_words = SharedRound.n_words(n_workers)
    arena = Arena.create(8 * n_words)
    made = SharedRound(arena.words(0, n_words), n_workers, arena.fd)
    made.arena = arena  # type: ignore[attr-defined]
    return made


def never(*_: object) -> None:
    raise AssertionError("not now")


@contextmanager
def process(body: Callable[[], object]) -> Iterator[None]:
    """``body`` in a process of its own, to its end; then what is inside."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    yield


def test_the_last_worker_to_come_makes_the_round_with_the_weights_of_all() -> None:
    shared, seen = round_of(3), list[Sequence[float]]()
    assert shared.is_first(7) and not shared.used
    assert shared.come(2, 7, Arrival(1.0, 10.0), never) is ArrivalResult.WAITS
    assert shared.come(0, 7, Arrival(2.0, 20.0), never) is ArrivalResult.WAITS
    assert not shared.is_first(7) and not shared.is_made(7)
    assert shared.come(1, 7, Arrival(3.0, 30.0), seen.append) is ArrivalResult.MADE
    assert seen == [[2.0, 3.0, 1.0]]
    assert shared.is_made(7) and not shared.is_made(8)


def test_a_round_in_which_workers_differ_is_left_to_the_server() -> None:
    shared = round_of(2)
    shared.come(0, 1, Arrival(1.0, 1.0, token=5), never)
    assert shared.come(1, 1, Arrival(1.0, 1.0, token=6), never) is ArrivalResult.CALLED_OFF
    assert shared.is_off(1) and not shared.is_made(1) and not shared.is_off(2)


@pytest.mark.parametrize("come", [(), (0,), (0, 1)])
def test_a_round_is_called_off_unless_it_is_made(come: tuple[int, ...]) -> None:
    shared = round_of(2)
    for worker in come:
        shared.come(worker, 1, ONE, lambda weights: None)
    assert shared.call_off(1, never) is (len(come) < 2)
    if len(come) < 2:
        assert shared.come(1, 1, ONE, never) is ArrivalResult.CALLED_OFF
    assert shared.come(0, 2, ONE, never) is ArrivalResult.WAITS


def test_a_worker_whose_round_was_called_off_does_not_count_in_the_next_round() -> None:
    shared = round_of(2)
    shared.come(0, 1, ONE, never)
    shared.call_off(1, never)
    assert shared.come(1, 2, ONE, never) is ArrivalResult.WAITS


def test_an_update_that_was_broken_off_is_put_back() -> None:
    shared, restored = round_of(2), list[str]()

    def dies() -> None:
        shared.come(1, 1, ONE, lambda weights: os._exit(1))

    shared.come(0, 1, ONE, never)
    with process(dies):
        assert not shared.is_made(1)
        assert shared.call_off(1, lambda: restored.append("kept"), waits=False)
    assert restored == ["kept"]
    assert shared.call_off(2, never), "once"


def test_an_update_that_fails_is_put_back() -> None:
    shared, restored = round_of(2), list[str]()

    def fails(weights: Sequence[float]) -> None:
        raise ArithmeticError("half of it is made")

    shared.come(0, 1, ONE, never)
    with pytest.raises(ArithmeticError):
        shared.come(1, 1, ONE, fails)
    assert shared.call_off(1, lambda: restored.append("kept"), waits=False)
    assert restored == ["kept"] and not shared.is_made(1)


def test_behind_a_round_that_was_called_off_the_server_makes_more_each_time_somebody_had_come() -> (
    None
):
    shared, number, gaps = round_of(2), 1, list[int]()
    for come in (False, True, True, False):
        if come:
            assert shared.come(0, number, ONE, never) is ArrivalResult.WAITS
        shared.call_off(number, never)
        after = next(n for n in range(number + 1, number + 99) if shared.may_come(n))
        gaps.append(after - number - 1)
        number = after
    assert gaps == [2, 2, 4, 8]


def test_nobody_goes_on_behind_an_update_that_was_broken_off() -> None:
    shared = round_of(2)
    shared.come(0, 1, ONE, never)
    with process(lambda: shared.come(1, 1, ONE, lambda weights: os._exit(1))):
        assert shared.come(0, 2, ONE, never) is ArrivalResult.CALLED_OFF


def test_an_update_under_way_is_not_called_off() -> None:
    shared, begun, end = round_of(2), os.pipe(), os.pipe()

    def slow(weights: Sequence[float]) -> None:
        os.write(begun[1], b"x")
        os.read(end[0], 1)

    shared.come(0, 1, ONE, never)
    pid = os.fork()
    if pid == 0:
        shared.come(1, 1, ONE, slow)
        os._exit(0)
    os.read(begun[0], 1)
    with pytest.raises(BlockingIOError):
        shared.call_off(1, never, waits=False)
    os.write(end[1], b"x")
    os.waitpid(pid, 0)
    assert not shared.call_off(1, never)
    assert shared.is_made(1)


def test_the_server_counts_what_was_made_once() -> None:
    shared = round_of(2)
    assert shared.look(0) is None
    for number in (1, 2, 3):
        shared.come(0, number, Arrival(4.0, 4.0), never)
        shared.come(1, number, Arrival(2.0, 2.0), lambda weights: None)
    made = shared.look(0)
    assert made is not None and (made.n, list(made.samples)) == (3, [12.0, 6.0])
    assert min(made.waited_s) >= 0 and made.awaited_s[1] >= made.waited_s[1]
    assert made.awaited_s[0] == 0, "nobody has waited for worker 0"
    assert shared.look(3) is None
    shared.come(0, 4, ONE, never)
    shared.come(1, 4, ONE, lambda weights: None)
    again = shared.look(3)
    assert again is not None and (again.n, list(again.samples)) == (1, [4.0, 4.0])


@pytest.mark.parametrize("at", range(18))
def test_who_dies_at_any_write_leaves_a_round_that_is_made_and_counted_or_neither(at: int) -> None:
    shared, round_words, masters = round_of(2), SharedRound.n_words(2), [0]
    words = shared.arena.words(0, round_words)  # type: ignore[attr-defined]
    for number in (1, 2):
        shared.come(0, number, ONE, never)
        shared.come(1, number, ONE, lambda weights: None)
    assert shared.look(0) is not None
    shared.come(0, 3, ONE, never)
    mortal: Any = Words(words, dies_at(at))
    dying = SharedRound(mortal, 2, shared.arena.fd)  # type: ignore[attr-defined]
    with suppress(Died):
        dying.come(1, 3, ONE, lambda weights: masters.append(1))
        assert at > 10, "it makes the round"
    shared.call_off_next(2, lambda: masters.pop(), lambda pid, for_s: None)
    made = shared.look(2)
    assert shared.is_made(3) == (made is not None) == (len(masters) == 2)
    if made is not None:
        assert list(made.samples) == [4.0, 4.0]
    shared.come(0, 9, ONE, never)
    assert shared.come(1, 9, ONE, lambda weights: None) is ArrivalResult.MADE
    after = shared.look(3 if made else 2)
    assert after is not None and list(after.samples) == [4.0, 4.0]


def test_the_next_round_is_the_servers_where_a_worker_is_gone() -> None:
    shared = round_of(2)
    shared.come(0, 5, ONE, never)
    shared.call_off_next(4, never, lambda pid, for_s: None)
    assert shared.is_off(5) and shared.come(1, 5, ONE, never) is ArrivalResult.CALLED_OFF
    assert shared.come(1, 6, ONE, never) is ArrivalResult.WAITS
