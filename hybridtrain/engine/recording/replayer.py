"""Replays a recorded run in one process.

Theory of operation. The server receives the recorded events in the same order at the same times;
each worker runs just until it sends its next recorded message. Contents of messages are computed
anew and compared with the record's checksums, which locates the first difference.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridtrain.engine.protocol.checksums import GradientRows, checksum_of, checksum_of_parameters
from hybridtrain.engine.protocol.events import (
    Completed,
    Event,
    Received,
    Removed,
    TimerExpired,
    UpdateDue,
)
from hybridtrain.engine.protocol.messages import Described, Install, Note, Request, Stopped
from hybridtrain.engine.protocol.step_log import MADE
from hybridtrain.engine.recording.record_file import (
    DUE,
    NOBODY,
    OUTCOMES,
    WOKE,
    Record,
    RecordEvent,
)
from hybridtrain.engine.recording.recorder import (
    BROKEN,
    FINISHED,
    LEFT,
    LOST,
    Stamp,
    ending,
    kind_of,
)
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.worlds.in_process import Body, Cell, MadePush, Stuck, ThreadWorld, Word
from hybridtrain.util.turn_taking import FunctionEnded

_STOPPED = Stopped.__name__


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.

    ``events``, ``updates``: number of equal ones; ``parted``: describes the first difference;
    ``whole``: the record is complete; ``errors``: exceptions that workers raised, as recorded.
    """

    events: int
    updates: int
    parted: str = ""
    whole: bool = True
    errors: tuple[BaseException, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all recorded bits are the same."""
        return not self.parted


class _Parted(Exception):
    """The replay differs from the record."""


class Replayer:
    """Runs bodies in the order of a record.

    Args:
        record: of the run.
        server: its clock is ``stamp``.
        stamp: set to the time of each event.
        check_data: receives descriptions of the workers' data before training; may raise.
        cells: see :class:`hybridtrain.engine.worlds.in_process.ThreadWorld`.
    """

    def __init__(
        self,
        record: Record,
        server: ParameterServer,
        stamp: Stamp,
        check_data: Callable[[Mapping[str, Any]], None],
        cells: Sequence[Cell] = (),
    ) -> None:
        self._record, self._server, self._stamp = record, server, stamp
        self._check_data = check_data
        self._due: dict[int, deque[str]] = defaultdict(deque)  # the kinds of each worker's events
        for event in record.events():
            if event.kind not in OUTCOMES:
                self._due[event.worker].append(MADE if event.made else event.kind)
        self._world = ThreadWorld(
            server, record.n_workers, int(record.header["threads"]), self._next_kind, cells
        )
        self._rows: GradientRows | None = None
        self._begun = False
        self._errors: list[BaseException] = []
        self._broken: set[int] = set()  # workers that have failed

    def run(self, bodies: Sequence[Body]) -> tuple[Replayed, list[Any]]:
        """The report, and the results of the bodies (``None`` of those that did not finish)."""
        self._world.start(bodies, make=bool(self._record.cells["made"].any()))
        done = 0
        try:
            for event in self._record.events():
                self._stamp.stand(event.at_s)
                if event.kind not in OUTCOMES:
                    self._repeat(event)
                done += 1
            parted = self._compare_ends()
        except _Parted as difference:
            parted = str(difference)
        finally:
            self._world.close()
        errors = tuple(self._errors)
        report = Replayed(done, self._updates, parted, self._record.whole, errors)
        return report, [self._world.result(n) for n in range(self._record.n_workers)]

    # ---- one event ------------------------------------------------------------------------------

    def _next_kind(self, worker: int) -> str:
        """The kind of the worker's next recorded event."""
        return next(iter(self._due[worker]), "")

    @property
    def _updates(self) -> int:
        self._server.workers_updates.look()
        return self._server.version - self._server.statistics.first_version

    def _repeat(self, event: RecordEvent) -> None:
        if event.made:
            self._make_again(event)
        else:
            self._hand_over(event)
        if event.kind == BROKEN or (event.kind == _STOPPED and self._broken):
            self._broken.add(event.worker)  # or stopped by that of another
        self._due[event.worker].popleft()

    def _hand_over(self, event: RecordEvent) -> None:
        """The server receives the event."""
        if event.worker in self._broken and event.kind not in (LOST, LEFT):
            return  # for the checkpoint of a run that failed, which a replay does not write
        replies = self._server.on(self._again(event))
        self._world.answer(replies)
        if replies and event.kind == Install.__name__:
            self._compare_beginnings(event)

    def _make_again(self, event: RecordEvent) -> None:
        """The worker makes the update itself, or arrives in its round."""
        named, word = self._named(event), self._next(event)
        if not isinstance(word, MadePush):
            raise _Parted(f"{named}: in the replay the worker does not make the update")
        self._compare_prints(event, word.print, named)

    def _again(self, event: RecordEvent) -> Event:
        """Let the worker run to its next message; the server's next event."""
        worker = event.worker
        if event.kind == WOKE:
            return TimerExpired()
        if event.kind == DUE:
            return UpdateDue()
        if event.kind in (LOST, LEFT):
            self._world.abandon(worker)
            return Removed(worker, announced=event.kind == LEFT)
        word = self._next(event)
        if isinstance(word, MadePush):
            raise _Parted(f"{self._named(event)}: in the replay the worker makes an update itself")
        if isinstance(word, FunctionEnded):
            return self._ended(event, word.error)
        if event.kind == BROKEN:  # by an error from outside (out of memory?)
            self._world.abandon(worker)
            return Received(worker, Stopped(broke=True))
        self._compare(event, word)
        if isinstance(word, Described):
            self._check_data(word.said)
        return Received(worker, word)

    def _next(self, event: RecordEvent) -> Word:
        try:
            return self._world.next(event.worker)
        except Stuck:
            raise _Parted(
                f"{self._named(event)}: in the replay this worker still waits for an answer"
            ) from None

    def _ended(self, event: RecordEvent, error: BaseException | None) -> Event:
        worker = event.worker
        if event.kind == FINISHED and error is None:
            return Completed(worker)
        if event.kind == BROKEN and error is not None:
            self._errors.append(error)
            return Received(worker, Stopped(broke=True))
        if event.kind == _STOPPED:
            return Received(worker, Stopped())
        if error is not None and not self._errors:
            raise error
        raise _Parted(f"{self._named(event)}: in the replay this worker has ended before")

    def _compare(self, event: RecordEvent, word: Request | Note) -> None:
        kind = kind_of(Received(event.worker, word))
        if kind != event.kind:
            raise _Parted(f"{self._named(event)}: in the replay the worker's next is a {kind}")
        self._rows = GradientRows.of(self._server.store, self._rows)
        now = checksum_of(word, event.worker, self._rows)
        self._compare_prints(event, now, self._named(event))

    def _compare_prints(self, event: RecordEvent, now: int, named: str) -> None:
        if now != event.print:
            what = "its gradient, or what goes with it," if event.kind == "Push" else "what it says"
            raise _Parted(f"{named}: in the replay {what} has other bits")

    def _compare_beginnings(self, event: RecordEvent) -> None:
        then, store = self._record.told.get("begin"), self._server.store
        if self._begun or then is None or store is None:
            return
        self._begun = True
        if then["parameters"] != checksum_of_parameters(store):
            raise _Parted(
                f"{self._named(event)}: in the replay the initial parameters have other bits "
                "(another seed, another initialisation, another checkpoint?)"
            )

    def _compare_ends(self) -> str:
        """How the final states differ; empty if they do not."""
        then = self._record.told.get("end")
        if then is None:
            return ""
        now = ending(self._server)
        names = {"parameters": "final parameters", "optimizers": "optimizers' final states"}
        found = [text for name, text in names.items() if then[name] != now[name]]
        return f"after the last event: the {' and the '.join(found)} differ" if found else ""

    def _named(self, event: RecordEvent) -> str:
        who = "" if event.worker == NOBODY else f" of worker {event.worker}"
        return f"event {event.number} ({event.kind}{who}, in update {self._updates + 1})"
