"""Who writes the last checkpoint, as the parent decides it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hybridtrain.news import Heir
from hybridtrain.worlds.inheritance import Inheritance


def crew(*there: int, size: int = 3) -> list[Any]:
    """Workers of which only these have not stopped yet."""
    return [SimpleNamespace(number=n, ended=n not in there, gone=False) for n in range(size)]


def test_the_first_is_waited_for_and_the_others_may_go_when_it_has_written() -> None:
    last = Inheritance()
    last.stopped(1)
    assert last.decide(crew(0, 2), late=False) == []
    last.stopped(0)
    assert last.decide(crew(2), late=False) == [(0, Heir(True))]
    assert last.decide(crew(2), late=False) == [], "one at a time"
    last.saved(True)
    assert last.decide(crew(2), late=False) == [(1, Heir(False))]
    last.stopped(2)
    assert last.decide(crew(), late=False) == [(2, Heir(False))]


def test_if_the_heir_cannot_or_is_lost_the_next_one_is_asked() -> None:
    last = Inheritance()
    for worker in range(3):
        last.stopped(worker)
    assert last.decide(crew(), late=False) == [(0, Heir(True))]
    last.saved(False)
    assert last.decide(crew(), late=False) == [(1, Heir(True))]
    last.lost(1)
    assert last.decide(crew(), late=False) == [(2, Heir(True))]
    last.saved(False)
    assert last.decide(crew(), late=False) == [], "nobody is left"


def test_one_that_does_not_come_is_not_waited_for_too_long() -> None:
    last = Inheritance()
    last.stopped(2)
    assert last.decide(crew(0, 1), late=False) == []
    assert last.decide(crew(0, 1), late=True) == [(2, Heir(True))]


def test_a_worker_that_fails_saves_only_if_the_run_ends() -> None:
    last = Inheritance()
    assert last.failed(1, ending=False) == [(1, Heir(False))]
    assert last.failed(0, ending=True) == []
    assert last.decide(crew(), late=False) == [(0, Heir(True))]
