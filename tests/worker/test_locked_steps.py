"""Updates one by one, in shared memory: a lock, a count, and what a death leaves behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from hybridtrain.memory import Arena
from hybridtrain.memory.lending import MadeSteps
from hybridtrain.protocol.locked_steps import LockedSteps, Tried
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


def holding(shared: Shared, then: Callable[[], object]) -> None:
    """``then``, while another process is in the middle of an update."""
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
        then()
    finally:
        os.write(end[1], b"x")
        os.waitpid(pid, 0)
        for end_of_it in (*begun, *end):
            os.close(end_of_it)


def test_an_update_is_counted_once_it_is_made() -> None:
    shared = Shared()
    assert [shared.make(0), shared.make(1), shared.make(1)] == 3 * [Tried.MADE]
    assert shared.made.total == 3 and [shared.made.untold(w) for w in (0, 1)] == [1, 2]


def test_what_is_kept_is_kept_before_the_step() -> None:
    order, shared = list[str](), Shared()
    shared.locked.make(0, lambda: order.append("keep"), lambda: order.append("step"), 0.0)
    assert order == ["keep", "step"]


def test_whoever_knows_another_state_makes_none() -> None:
    shared = Shared()
    shared.locked.renew()
    assert shared.locked.generation == 1
    assert shared.locked.make(0, never, never, 0.05) is Tried.OUTDATED
    assert shared.make(generation=1) is Tried.MADE


def test_one_at_a_time() -> None:
    shared = Shared()

    def others() -> None:
        assert shared.locked.make(0, never, never, 0.01) is Tried.LEFT
        assert not shared.locked.is_free(0.01)
        with shared.locked.stopped(never, 0.01):  # the server does not wait for ever
            assert shared.made.total == 0

    holding(shared, others)
    assert shared.locked.is_free(0.0) and shared.made.total == 1
    assert shared.make() is Tried.MADE


@pytest.mark.parametrize("where", ["before", "in the middle", "behind"])
def test_what_was_begun_by_somebody_who_is_gone_is_put_back(where: str) -> None:
    shared, restored = Shared(), list[str]()

    def body() -> None:
        if where == "before":
            shared.locked.make(0, lambda: os._exit(1), never, 0.05)
        shared.make(1, step=(lambda: os._exit(1)) if where == "in the middle" else None)
        os._exit(1)

    with process(body):
        torn = where == "in the middle"
        assert (shared.make() is Tried.LEFT) == torn, "the server is to see to it"
        with shared.locked.stopped(lambda: restored.append("x"), 0.05):
            assert restored == ["x"] * torn
        assert shared.make() is Tried.MADE
        with shared.locked.stopped(never, 0.05):
            pass
        assert shared.made.total == {"before": 2, "in the middle": 1, "behind": 3}[where]


def test_a_step_that_fails_is_put_back() -> None:
    shared, restored = Shared(), list[str]()

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError):
        shared.make(step=fails)
    with shared.locked.stopped(lambda: restored.append("x"), 0.05):
        pass
    assert restored == ["x"] and shared.made.total == 0
