"""A server that records all events it receives.

Theory of operation. All nondeterminism of a run reaches the server as events. So a record of the
events, in their order and with their times, suffices to replay the run; the server's clock is the
recorded time of the current event.

Workers that make updates themselves log their pushes in shared memory
(:mod:`hybridtrain.engine.protocol.step_log`). The server records those made since before each
event; the worker's later report of them is an event of its own kind, ``Told``.

``ReadStats`` and ``GetState`` are not recorded: they change no bits, and their number depends on
the machine.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, get_args

from hybridtrain.engine.memory import Store
from hybridtrain.engine.policies import Policy
from hybridtrain.engine.protocol.checksums import (
    GradientRows,
    checksum_of,
    checksum_of_parameters,
    checksum_of_state,
)
from hybridtrain.engine.protocol.events import (
    BrokenOff,
    Completed,
    Event,
    Received,
    Removed,
    TimerExpired,
    UpdateDue,
)
from hybridtrain.engine.protocol.messages import (
    NOTES,
    Answer,
    Described,
    Done,
    GetState,
    Install,
    MadeStep,
    Note,
    Paused,
    Push,
    ReadStats,
    Released,
    Request,
    Resumed,
    Share,
    Stopped,
    name_of,
)
from hybridtrain.engine.protocol.step_log import TOLD, StepLog
from hybridtrain.engine.recording.record_file import (
    DROPPED,
    DUE,
    NOBODY,
    OUTCOMES,
    UPDATED,
    WAITED,
    WOKE,
    Writer,
)
from hybridtrain.engine.server.rounds import Replies, samples_of
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.server.shared_parameters import step_log_of
from hybridtrain.engine.server.timeline import TrainingTime

FINISHED, LOST, BROKEN, LEFT = "Finished", "Lost", "Broken", "Left"
_SAID = tuple(kind.__name__ for kind in (*get_args(Request), *NOTES))
KINDS = (*_SAID, FINISHED, LOST, WOKE, BROKEN, LEFT, TOLD, DUE, *OUTCOMES)
UNRECORDED = ReadStats | GetState


def kind_of(event: Event) -> str | None:
    """The name of an event's kind in records; ``None`` for events that cannot be replayed."""
    match event:
        case Received(_, Stopped(broke=True)):
            return BROKEN
        case Received(_, MadeStep()):
            return TOLD
        case Received(_, message):
            return name_of(message)
        case Removed(returns=False):
            return LEFT if event.announced else LOST
        case Completed():
            return FINISHED
        case TimerExpired():
            return WOKE
        case UpdateDue():
            return DUE
    return None


class Stamp:
    """The clock of a recorded or replayed server: the time of the current event."""

    def __init__(self) -> None:
        self.at_s = time.monotonic()

    def __call__(self) -> float:
        return self.at_s

    def stand(self, at_s: float) -> float:
        """Set the clock to this time, which it returns."""
        self.at_s = at_s
        return at_s


class RecordingServer(ParameterServer):
    """A server that records each event, and what workers have made before, before it handles it.

    Args:
        writer: writes the record.
        policy, n_workers, threads, options: as for
        :class:`~hybridtrain.engine.server.server.ParameterServer`.
        clock: in seconds, read once for each event.
    """

    def __init__(
        self,
        writer: Writer,
        policy: Policy,
        n_workers: int,
        threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        self._stamp, self._writer, self._real_clock = Stamp(), writer, clock
        super().__init__(policy, n_workers, threads, self._stamp, **options)
        self._own = OwnTime(n_workers)
        self._rows: GradientRows | None = None
        self._log: StepLog | None = None
        self._begun = False
        self._told: set[str] = set()  # data sets that the record describes

    def _on(self, event: Event) -> Replies:
        """Between the updates of workers: see
        :class:`~hybridtrain.engine.server.server.ParameterServer`."""
        message = event.message if isinstance(event, Received) else None
        self._workers_made()
        if isinstance(message, UNRECORDED):
            return super()._on(event)
        now_s = self._stamp.stand(self._real_clock())
        if isinstance(event, Received) and not isinstance(message, NOTES):
            self._asked(event.worker, event.message, now_s)
        else:
            self._happened(event, now_s)
        before = self.statistics.version
        replies = super()._on(event)
        self._answered(replies)
        untold = message is None and self.workers_updates.one_by_one  # by a worker that is gone
        if self._log is None or not (untold or isinstance(message, MadeStep)):  # these are recorded
            for _ in range(self.statistics.version - before):
                self._writer.event(UPDATED, NOBODY, 0, self._stamp.at_s, 0.0, 0.0)
        if self._log is not None:
            self._log.skip(self.version)
        if self.store is not None and replies:
            self._began(message, self.store)
        return replies

    def _workers_made(self) -> None:
        """Record the pushes of updates that workers have made since the last event."""
        if self._log is None:
            return
        for contributions in self._log.read(self.version):
            for worker, print, own_s, samples, at_s in contributions:
                at_s = self._stamp.stand(max(at_s, self._stamp.at_s))
                self._writer.event("Push", worker, print, at_s, own_s, samples, made=True)
            for each in contributions:
                self._own.goes_on(each.worker, self._stamp.at_s, fresh=True)
        self._log.skip(self.version)

    def _began(self, message: Request | Note | None, store: Store) -> None:
        if isinstance(message, Share) and store.maker.borrows:
            self._log = step_log_of(store)
            self._log.switch_on()
        if isinstance(message, Install) and not self._begun:
            self._begun = True
            size = sum(n * dtype.itemsize for dtype, n in store.layout.sizes.items())
            begin = {"parameters": checksum_of_parameters(store), "bytes": size}
            self._writer.tell({"begin": begin})

    def close(self) -> None:
        """Record the final checksums and statistics, and close the record."""
        problem: Exception | None = None
        try:
            self._writer.tell({"end": ending(self)})
        except Exception as error:  # of a user's optimizer whose state cannot be read
            problem = error
        self._writer.close()
        if problem := problem or self._writer.refusal:
            warnings.warn(f"the record of this run is incomplete: {problem}", stacklevel=2)
        super().close()

    # ---- inside ---------------------------------------------------------------------------------

    def _asked(self, worker: int, request: Request | Note, now_s: float) -> None:
        waited_s = request.waited_s if isinstance(request, Push) else 0.0
        own_s, samples = self._own.stops(worker, now_s - waited_s), [0.0]
        if waited_s:
            self._writer.event(WAITED, worker, 0, now_s, waited_s, 0.0)
        if isinstance(request, Push):
            former = request.former if isinstance(request, MadeStep) else ()
            together = (*former, request)  # one message, several mini-batches
            own_s, samples = own_s / len(together), [*map(samples_of, together)]
        self._rows = GradientRows.of(self.store, self._rows)
        seen, kind = checksum_of(request, worker, self._rows), name_of(request)
        if self._log is not None and isinstance(request, MadeStep):
            kind, own_s, samples = TOLD, 0.0, [0.0]  # its parts are recorded
        for each in samples:
            self._writer.event(kind, worker, seen, now_s, own_s, each)

    def _happened(self, event: Event, now_s: float) -> None:
        match event:
            case Received(_, Paused()):
                self._own.pause(now_s)
            case Received(_, Resumed()):
                self._own.resume(now_s)
            case Received(_, Described(said)):
                self._tell_of_data(said)
            case Removed(worker, returns=True):
                self._end_record(f"worker {worker} was restarted; what follows cannot be replayed")
            case BrokenOff():
                self._end_record("workers did not stop in time, and were broken off")
        if (kind := kind_of(event)) is not None:
            self._writer.event(kind, getattr(event, "worker", NOBODY), 0, now_s, 0.0, 0.0)

    def _end_record(self, reason: str) -> None:
        self._writer.refuse(OSError(reason))

    def _tell_of_data(self, said: Mapping[str, Any]) -> None:
        """Record each description once; all workers send the same."""
        if fresh := {name: each for name, each in said.items() if name not in self._told}:
            self._told.update(fresh)
            self._writer.tell(fresh)

    def _answered(self, replies: Replies) -> None:
        if not replies:
            return
        now_s = self._real_clock()
        for worker, reply in replies:
            if isinstance(reply, Answer):  # news also reach workers that compute or wait
                self._own.goes_on(worker, now_s, fresh=isinstance(reply, Released | Done))
            if isinstance(reply, Released) and not reply.counted:
                self._writer.event(DROPPED, worker, 0, self._stamp.at_s, 0.0, 0.0)


class OwnTime(TrainingTime):
    """Each worker's computing time since its release, without validation.

    Args:
        n_workers: W.
    """

    def __init__(self, n_workers: int) -> None:
        super().__init__()
        self._since_s: list[float | None] = [None] * n_workers  # time of the last answer
        self._own_s = [0.0] * n_workers

    def stops(self, worker: int, now_s: float) -> float:
        """The worker sends a request; its computing time since its release."""
        since_s = self._since_s[worker]
        if since_s is not None:
            self._own_s[worker] += max(0.0, self.of(now_s) - since_s)
            self._since_s[worker] = None
        return self._own_s[worker]

    def goes_on(self, worker: int, now_s: float, fresh: bool) -> None:
        """The worker has been answered; ``fresh``: released for a new mini-batch."""
        if fresh:
            self._own_s[worker] = 0.0
        self._since_s[worker] = self.of(now_s)


def ending(server: ParameterServer) -> dict[str, object]:
    """Checksums of the final parameters and optimizer states, and the run's statistics."""
    store, updates = server.store, server.optimizers.updates
    return {
        "parameters": None if store is None else checksum_of_parameters(store),
        "optimizers": checksum_of_state([_plain(x.state()) for x in updates]),
        "stats": server.statistics.stats(),
    }


def _plain(saved: object) -> tuple[object, ...]:
    return tuple(getattr(saved, name) for name in ("parameters", "others", "groups", "own"))
