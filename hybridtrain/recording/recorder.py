"""Writes down what the server is handed, as it is handed.

Theory of operation. All that happens in a run reaches the server through five doors: requests,
notes, and the world's news that a worker has finished, that one is lost, or that it is late enough
for a timer. Everything else is deterministic. So a record of who came through which door, in which
order and at which time, is a record of the run. The server sees no other clock than the time that
is written down.

What only asks for figures (``ReadStats``) is not written down: it changes nothing, and how often it
is asked depends on the machine.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, get_args

from hybridtrain.memory import Store
from hybridtrain.protocol.messages import (
    Answer,
    Described,
    Done,
    Install,
    Note,
    Paused,
    Push,
    ReadStats,
    Released,
    Request,
    Resumed,
    Stopped,
)
from hybridtrain.recording.checksums import (
    GradientRows,
    checksum_of,
    checksum_of_parameters,
    checksum_of_state,
)
from hybridtrain.recording.record_file import NOBODY, VERSION, WOKE, Writer
from hybridtrain.server.membership import Membership
from hybridtrain.server.pushes import samples_of
from hybridtrain.server.rounds import Replies
from hybridtrain.server.run_statistics import RunStatistics
from hybridtrain.server.server import Server

FINISHED, LOST, BROKEN, LEFT = "Finished", "Lost", "Broken", "Left"
_SAID = tuple(kind.__name__ for kind in (*get_args(Request), *get_args(Note)))
KINDS = (*_SAID, FINISHED, LOST, WOKE, BROKEN, LEFT)


def kind_of(message: Request | Note) -> str:
    """The name of a message's kind."""
    if isinstance(message, Stopped) and message.broke:
        return BROKEN
    return type(message).__name__


class Stamp:
    """The clock of a server whose events are written down: it shows the time of the event."""

    def __init__(self) -> None:
        self.at_s = time.monotonic()

    def __call__(self) -> float:
        return self.at_s


class Recorder:
    """Stands before a server.

    Args:
        server: made with ``stamp`` as its clock.
        stamp: to be set at each event.
        writer: of the record.
        clock: seconds.
    """

    def __init__(
        self,
        server: Server,
        stamp: Stamp,
        writer: Writer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.server, self._stamp, self._writer, self._clock = server, stamp, writer, clock
        self._own = OwnTime(server.statistics.n_workers)
        self._rows: GradientRows | None = None
        self._begun = False
        self._told: set[str] = set()  # of the data

    # ---- what a world needs of a server ---------------------------------------------------------

    @property
    def store(self) -> Store | None:
        return self.server.store

    @property
    def statistics(self) -> RunStatistics:
        return self.server.statistics

    @property
    def failure(self) -> BaseException | None:
        return self.server.failure

    def handle(self, worker: int, request: Request) -> Replies:
        """See :class:`hybridtrain.server.server.Server`."""
        if isinstance(request, ReadStats):
            return self.server.handle(worker, request)
        now_s = self._tick()
        own_s = self._own.stops(worker, now_s)
        samples = samples_of(request) if isinstance(request, Push) else 0.0
        seen = checksum_of(request, worker, self._seen())
        self._writer.event(kind_of(request), worker, seen, now_s, own_s, samples)
        replies = self.server.handle(worker, request)
        self._freed(replies)
        if isinstance(request, Install) and not self._begun and replies and self.store is not None:
            self._begun = True
            self._writer.tell({"begin": {"parameters": checksum_of_parameters(self.store)}})
        return replies

    def note(self, worker: int, note: Note) -> Replies:
        """See :class:`hybridtrain.server.server.Server`."""
        now_s = self._tick()
        match note:
            case Paused():
                self._own.pause(now_s)
            case Resumed():
                self._own.resume(now_s)
            case Described(said):
                self._tell_of_data(said)
        self._writer.event(kind_of(note), worker, 0, now_s, 0.0, 0.0)
        return self._freed(self.server.note(worker, note))

    def finished(self, worker: int) -> Replies:
        """See :class:`hybridtrain.server.server.Server`."""
        self._writer.event(FINISHED, worker, 0, self._tick(), 0.0, 0.0)
        return self._freed(self.server.finished(worker))

    def lost(self, worker: int) -> Replies:
        """See :class:`hybridtrain.server.server.Server`."""
        self._writer.event(LOST, worker, 0, self._tick(), 0.0, 0.0)
        return self._freed(self.server.lost(worker))

    @property
    def training(self) -> bool:
        return self.server.training

    def leave(self, worker: int) -> Replies:
        """See :class:`hybridtrain.server.server.Server`."""
        self._writer.event(LEFT, worker, 0, self._tick(), 0.0, 0.0)
        return self._freed(self.server.leave(worker))

    def miss(self, worker: int) -> Replies:
        """See :class:`~hybridtrain.server.server.Server`. A new process cannot be replayed."""
        self._tick()
        self._refuse(f"worker {worker} was restarted, and what follows cannot be replayed")
        return self._freed(self.server.miss(worker))

    def break_off(self) -> Replies:
        """See :class:`hybridtrain.server.server.Server`. Nobody goes on after it."""
        self._tick()
        self._refuse("workers did not stop in time, and were broken off")
        return self._freed(self.server.break_off())

    def _refuse(self, reason: str) -> None:
        if self._writer.refusal is None:
            self._writer.refusal = OSError(reason)

    @property
    def membership(self) -> Membership:
        return self.server.membership

    @property
    def wake_at_s(self) -> float | None:
        return self.server.wake_at_s

    def wake(self) -> Replies:
        """See :class:`hybridtrain.server.server.Server`."""
        self._writer.event(WOKE, NOBODY, 0, self._tick(), 0.0, 0.0)
        return self._freed(self.server.wake())

    def close(self) -> None:
        """The run is over: the last word."""
        problem: Exception | None = None
        try:
            self._writer.tell({"end": ending(self.server)})
        except Exception as error:  # of a user's optimizer that cannot tell its state
            problem = error
        self._writer.close()
        if problem := problem or self._writer.refusal:
            warnings.warn(f"the record of this run is incomplete: {problem}", stacklevel=2)
        self.server.close()

    def _tell_of_data(self, said: Mapping[str, Any]) -> None:
        """Each worker says the same; once is enough."""
        if fresh := {name: each for name, each in said.items() if name not in self._told}:
            self._told.update(fresh)
            self._writer.tell(fresh)

    # ---- inside ---------------------------------------------------------------------------------

    def _tick(self) -> float:
        self._stamp.at_s = self._clock()
        return self._stamp.at_s

    def _seen(self) -> GradientRows | None:
        store = self.store
        if store is not None and (self._rows is None or self._rows.store is not store):
            self._rows = GradientRows(store)
        return self._rows

    def _freed(self, replies: Replies) -> Replies:
        if replies:
            now_s = self._clock()
            for worker, reply in replies:
                if isinstance(reply, Answer):  # news come to those who compute, or wait, too
                    self._own.goes_on(worker, now_s, fresh=isinstance(reply, Released | Done))
        return replies


class OwnTime:
    """How long each worker has computed since it was released, validation left out.

    Args:
        n_workers: W.
    """

    def __init__(self, n_workers: int) -> None:
        self._since_s: list[float | None] = [None] * n_workers  # when it was last answered
        self._own_s = [0.0] * n_workers
        self._paused_s = 0.0  # in all
        self._paused_at_s: float | None = None

    def _training_s(self, now_s: float) -> float:
        return (now_s if self._paused_at_s is None else self._paused_at_s) - self._paused_s

    def pause(self, now_s: float) -> None:
        """Training stands still."""
        if self._paused_at_s is None:
            self._paused_at_s = now_s

    def resume(self, now_s: float) -> None:
        """Training goes on."""
        if self._paused_at_s is not None:
            self._paused_s += now_s - self._paused_at_s
            self._paused_at_s = None

    def stops(self, worker: int, now_s: float) -> float:
        """The worker asks for something, and waits; its own time since its release."""
        since_s = self._since_s[worker]
        if since_s is not None:
            self._own_s[worker] += max(0.0, self._training_s(now_s) - since_s)
            self._since_s[worker] = None
        return self._own_s[worker]

    def goes_on(self, worker: int, now_s: float, fresh: bool) -> None:
        """It has been answered; ``fresh``: released, to compute something new."""
        if fresh:
            self._own_s[worker] = 0.0
        self._since_s[worker] = self._training_s(now_s)


def ending(server: Server, version: int = VERSION) -> dict[str, object]:
    """What a run has come to, for a record of this version."""
    store, updates = server.store, server.optimizers.updates
    return {
        "parameters": None if store is None else checksum_of_parameters(store),
        "optimizers": checksum_of_state([_plain(x.state()) for x in updates], version),
        "stats": server.statistics.stats(),
    }


def _plain(saved: object) -> tuple[object, ...]:
    return tuple(getattr(saved, name) for name in ("parameters", "others", "groups", "own"))
