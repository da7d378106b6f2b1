"""Measure a connection between hosts: its round trip, and bytes a second in each direction.

Host 0 asks, the other host answers; both see the time that rows and messages of a run would take,
TLS included.
"""

from __future__ import annotations

import select
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from hybridtrain.hosts.transport import HostConnection

_N_BYTES = 16 << 20
_ROUNDS = 21
_TRIALS = 3
_LONG_S = 1.0  # a trial that takes longer is not repeated
_SPAN = [(0, _N_BYTES)]


class Link(NamedTuple):
    """Seconds of a round trip (median), and bytes a second to host 0 and from it (best)."""

    round_trip_s: float
    up: float
    down: float


def measure(connection: HostConnection) -> Link:
    """On host 0: measure the connection to a host that runs :func:`answer`.

    Raises:
        HostLost: if the connection ends.
    """
    connection.attach(memoryview(bytearray(_N_BYTES)), _SPAN)
    answers = _messages(connection)

    def trial(message: str) -> float:
        began_s = time.perf_counter()
        connection.send(message, _SPAN if message == "take" else [])
        next(answers)
        return time.perf_counter() - began_s

    def best(message: str) -> float:
        shortest_s = trial(message)
        for _ in range(_TRIALS):
            if shortest_s < _LONG_S:
                shortest_s = min(shortest_s, trial(message))
        return _N_BYTES / shortest_s

    round_trip_s = statistics.median(trial("echo") for _ in range(_ROUNDS))
    return Link(round_trip_s, best("give"), best("take"))


def answer(connection: HostConnection) -> Any:
    """On another host: answer until host 0 sends something else, and return it.

    Raises:
        HostLost: if the connection ends.
    """
    connection.attach(memoryview(bytearray(_N_BYTES)), _SPAN)
    for message in _messages(connection):
        if message not in ("echo", "give", "take"):
            return message
        connection.send("done", _SPAN if message == "give" else [])
    raise AssertionError("a connection ends with HostLost")


def _messages(connection: HostConnection) -> Iterator[Any]:
    while True:
        select.select([connection], [], [])
        yield from connection.receive()
