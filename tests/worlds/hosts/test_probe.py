"""What a connection between hosts is measured to carry."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from hybridtrain.hosts.connection import HostConnection, HostLost, Listener
from hybridtrain.hosts.probe import answer, measure
from tests.worlds.hosts.test_connection import HOME, KEY, accepted, call


@pytest.fixture
def ends() -> Iterator[tuple[HostConnection, HostConnection]]:
    """Host 0's end and that of host 1."""
    with (
        closing(Listener(HOME, 0, KEY, {})) as listener,
        closing(call(listener)) as theirs,
        closing(accepted(listener)) as ours,
    ):
        yield ours, theirs


def test_host_0_measures_while_the_other_answers_until_it_hears_something_else(
    ends: tuple[HostConnection, HostConnection],
) -> None:
    ours, theirs = ends
    heard: list[Any] = []
    thread = threading.Thread(target=lambda: heard.append(answer(theirs)))
    thread.start()
    link = measure(ours)
    ours.send("all is well")
    thread.join()
    assert heard == ["all is well"]
    assert link.round_trip_s > 0 and min(link.up, link.down) > 0


def test_a_host_that_ends_in_between_is_lost(
    ends: tuple[HostConnection, HostConnection],
) -> None:
    ours, theirs = ends
    theirs.close()
    with pytest.raises(HostLost, match="host 1: it has closed the connection"):
        measure(ours)
