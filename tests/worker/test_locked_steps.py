"""Updates one by one, in shared memory: a lock, a count, and what a death leaves behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from hybridtrain.engine.memory import Arena
from hybridtrain.engine.memory.counters import MadeSteps
from hybridtrain.engine.protocol.locked_steps import LockedSteps, Tried
from tests.support.deaths import Died, Words, dies_at
from tests.worker.test_shared_round import never, process

N_MADE = MadeSteps.n_words(2)


class Shared:
    """What two workers and the server see."""

    def __init__(self) -> None:
        self.arena = Arena.create(8 * (N_MADE + LockedSteps.N_WORDS))
        self.made = MadeSteps(self.arena.words(0, N_MADE), 2)
        words = self.arena.words(8 * N_MADE, LockedSteps.N_WORDS)
        self.locked = LockedSteps(words, self.made, self.arena.fd)

    def make(self, worker: int = 0, generation: int = 0, step: Any = None) -> Tried:
        """An update, which ``step`` may do more in."""

        def stepped() -> None:
            if step is not None:
                step()
            self.made.make(worker, 0)

        return self.locked.make(generation, lambda: None, stepped, 0.05)


def ignore(pid: int, for_s: float) -> None:
    """Nobody is killed."""


def holding(shared: Shared, then: Callable[[int], object]) -> None:
    """``then(pid)``, while another process is in the middle of an update."""
    begun, end = os.pipe(), os.pipe()

    def slow() -> None:
        os.write(begun[1], b"x")
        os.read(end[0], 1)

    pid = os.fork()
    if pid == 0:
        try:
            shared.make(1, step=slow)
        finally:
            os._exit(0)
    os.read(begun[0], 1)
    try:
        then(pid)
    finally:
        os.write(end[1], b"x")
        os.waitpid(pid, 0)
        for end_of_it in (*begun, *end):
            os.close(end_of_it)


def test_an_update_is_counted_once_it_is_made() -> None:
    shared = Shared()
    assert [shared.make(0), shared.make(1), shared.make(1)] == 3 * [Tried.MADE]
    assert shared.made.total == 3 and [shared.made.untold(w) for w in (0, 1)] == [1, 2]


def test_the_state_to_put_back_is_kept_before_the_step() -> None:
    order, shared = list[str](), Shared()
    shared.locked.make(0, lambda: order.append("keep"), lambda: order.append("step"), 0.0)
    assert order == ["keep", "step"]


def test_a_worker_that_knows_an_outdated_state_makes_no_update() -> None:
    shared = Shared()
    shared.locked.renew()
    assert shared.locked.generation == 1
    assert shared.locked.make(0, never, never, 0.05) is Tried.OUTDATED
    assert shared.make(generation=1) is Tried.MADE


def test_only_one_process_makes_an_update_at_a_time() -> None:
    shared = Shared()

    def others(pid: int) -> None:
        assert shared.locked.make(0, never, never, 0.01) is Tried.LEFT

    holding(shared, others)
    assert shared.made.total == 1 and shared.make() is Tried.MADE


def test_the_server_takes_the_lock_from_a_process_that_is_stopped() -> None:
    shared, heard, restored = Shared(), list[float](), list[str]()

    def others(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)

        def frees(holder: int, for_s: float) -> None:
            assert holder == pid and not restored
            heard.append(for_s)
            if len(heard) == 3:
                os.kill(pid, signal.SIGKILL)

        with shared.locked.stopped(lambda: restored.append("x"), frees):
            assert len(heard) >= 3 and sorted(set(heard)) == heard, "longer each time"
            assert restored == ["x"] and shared.made.total == 0

    holding(shared, others)
    assert shared.make() is Tried.MADE


@pytest.mark.parametrize("where", ["before", "in the middle", "behind"])
def test_an_update_begun_by_a_process_that_is_gone_is_put_back(where: str) -> None:
    shared, restored = Shared(), list[str]()

    def body() -> None:
        if where == "before":
            shared.locked.make(0, lambda: os._exit(1), never, 0.05)
        shared.make(1, step=(lambda: os._exit(1)) if where == "in the middle" else None)
        os._exit(1)

    with process(body):
        torn = where == "in the middle"
        assert (shared.make() is Tried.LEFT) == torn, "the server is to see to it"
        with shared.locked.stopped(lambda: restored.append("x"), ignore):
            assert restored == ["x"] * torn
        assert shared.make() is Tried.MADE
        with shared.locked.stopped(never, ignore):
            pass
        assert shared.made.total == {"before": 2, "in the middle": 1, "behind": 3}[where]


def test_a_step_that_fails_is_put_back() -> None:
    shared, restored = Shared(), list[str]()

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError):
        shared.make(step=fails)
    with shared.locked.stopped(lambda: restored.append("x"), ignore):
        pass
    assert restored == ["x"] and shared.made.total == 0


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("at", range(3))
def test_who_dies_at_any_write_has_counted_step_and_mini_batches_or_neither(
    at: int, steps: int
) -> None:
    arena = Arena.create(8 * N_MADE)
    made = MadeSteps(arena.words(0, N_MADE), 2)
    for step in range(steps):
        made.make(1, 5 + step)
    mortal: Any = Words(arena.words(0, N_MADE), dies_at(at))
    with suppress(Died):
        MadeSteps(mortal, 2).make(1, 9)
    before = (steps, 5 if steps else 0)
    assert (made.untold(1), made.covered(1)) == (before if at < 2 else (steps + 1, 9))
    made.cover(1, 0)
    assert made.covered(1) == 0
