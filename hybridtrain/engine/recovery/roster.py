"""Which workers train, are restarted, report progress and save: decided without I/O.

Theory of operation. The world reports events (a worker waits or has failed, a process has ended, a
signal has arrived, the time) and carries out the actions that the roster returns. The state of
every worker (:data:`TABLE`) is kept here and nowhere else.

A failed worker is announced to be restarted (FAILED). When its old process has ended and its delay
is over it is CALLED: the roster asks a training worker for the progress, preferably one that waits
in a step, because it answers at once. Only the answer to the last question counts, and once: if the
worker that was asked fails, ends or enters a meeting, the roster asks another. In lock-step the
lost worker's push still lies in its row, so no worker is asked before that update is made. If no
worker is left, one starts from the last progress report (``kept``) and answers for the others as
soon as it waits in its step, since it may wait for them. Before the first report all begin anew.
If the system refuses to start a process, the roster retries, and calls the worker anew.

If an announced restart is cancelled (training is over, or the run ends), the roster says why.

At the end of a run all workers are asked to stop. When all have, but for restarted ones without a
step, the one with the lowest number writes the last checkpoint, which then has every update; the
next one does if it fails. If no worker is left, the roster starts one process to write it. After
half of ``grace_s`` the roster waits for no worker any longer; after all of it, it kills them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import cast

from hybridtrain.engine.recovery.failure_policy import End, Judge, Replace, Verdict, WorkerGone
from hybridtrain.errors import UserError

# ---- a worker's states --------------------------------------------------------------------------
# The states of a worker over all its processes in a run, and the events that change them.
#                 first step           answered
#    STARTING ────────────────▶ WAITING ◀──────▶ COMPUTING ◀──────▶ MEETING
#        │                         ▲  │               │                │
#        │              first step │  └──── fails, to come back ───────┘
#        └─────────────────────┐   │                  │
#                              │  RESTARTING ───────┐ │
#                              │   ▲                ▼ ▼
#              progress known, │   └─── CALLED ◀── FAILED   its process has ended, its delay is over
#              started again       │        └───────▶ │     no process can be started
#
#    a host comes:  GONE ──▶ CALLED
#    the run ends:  all of them ──▶ STOPPED ──▶ SAVING ──▶ ENDED ──▶ GONE
#
# :data:`TABLE` is the same as data; :class:`Roster` decides what follows.


class WorkerState(StrEnum):
    """The state of one worker."""

    STARTING = "starting"  # first process, no step yet
    COMPUTING = "computing"
    WAITING = "waiting"  # in a step: for a release, its turn or a mean
    MEETING = "meeting"  # in a barrier or reduction
    FAILED = "failed"  # to be restarted
    CALLED = "called"  # to be restarted once another worker has reported the progress
    RESTARTING = "restarting"  # a later process, no step yet
    STOPPED = "stopped"  # waits for the permission to write the last checkpoint
    SAVING = "saving"  # writes it
    ENDED = "ended"  # has nothing left to do
    GONE = "gone"  # no process, and none will follow


class LifecycleEvent(StrEnum):
    """An event that changes the state of one worker."""

    WAITS = "waits"  # in a step
    MEETS = "meets"
    GOES_ON = "goes on"  # the server has answered
    BREAKS = "breaks"  # it has failed, and will be restarted
    CALL = "call"  # its process has ended and its delay is over
    START = "start"  # a new process runs
    REFUSE = "refuse"  # the system could not start one
    STOPS = "stops"
    PERMIT = "permit"  # the roster lets it write the last checkpoint
    ENDS = "ends"  # it has finished, failed for good, or is dismissed
    DIES = "dies"  # its process has ended, and none will follow


S, E = WorkerState, LifecycleEvent
TRAINING = (S.COMPUTING, S.WAITING, S.MEETING)
THERE = (S.STARTING, *TRAINING, S.RESTARTING)
AWAY = (S.FAILED, S.CALLED)
LAST = (S.STOPPED, S.SAVING)

# An event that is not listed for a state comes too late and has no effect.
TABLE: dict[tuple[WorkerState, LifecycleEvent], WorkerState] = {
    **{(state, E.WAITS): S.WAITING for state in (S.STARTING, S.COMPUTING, S.MEETING)},
    (S.RESTARTING, E.WAITS): S.WAITING,  # from here on it can report the progress
    **{(state, E.MEETS): S.MEETING for state in (S.COMPUTING, S.WAITING)},
    **{(state, E.GOES_ON): S.COMPUTING for state in (S.WAITING, S.MEETING)},
    **{(state, E.BREAKS): S.FAILED for state in THERE},
    **{(state, E.CALL): S.CALLED for state in (S.FAILED, S.GONE)},
    **{(state, E.START): S.RESTARTING for state in (S.CALLED, S.FAILED, S.GONE)},
    (S.CALLED, E.REFUSE): S.FAILED,
    **{(state, E.STOPS): S.STOPPED for state in THERE},
    (S.STOPPED, E.PERMIT): S.SAVING,
    **{(state, E.ENDS): S.ENDED for state in (*THERE, *AWAY, *LAST)},
    **{(state, E.DIES): S.GONE for state in (*THERE, *AWAY, *LAST, S.ENDED)},
}


_FIRST_DELAY_S, _MOST_TRIES = 0.5, 6  # retries of a process start: 15 s in all

# ---- actions: what the world is to do next -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask ``teller`` for the progress, for ``worker``; ``question``: the number of the request."""

    teller: int
    worker: int
    question: int


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process as ``worker``, which continues from this progress report."""

    worker: int
    progress: bytes


@dataclass(frozen=True, slots=True)
class PermitSave:
    """Tell ``worker``, which has stopped, whether it writes the last checkpoint."""

    worker: int
    saves: bool


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the run, because of this ``worker``."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class Say:
    """Print ``text`` for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class BreakOff:
    """It is late: release every worker that waits in a step or a meeting."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the process of ``worker``."""

    worker: int


@dataclass(frozen=True, slots=True)
class KillAll:
    """Kill all processes at once."""


Act = Ask | Start | PermitSave | GiveUp | Say | BreakOff | Kill | KillAll

# --------------------------------------------------------------------------------------------------


@dataclass
class Roster:
    """The states of all workers.

    Args:
        n_workers: W.
        judge: decides what follows from a failure.
        grace_s: how long workers may take to stop.
    """

    n_workers: int
    judge: Judge
    grace_s: float = 30.0
    kept: bytes | None = None  # the last progress report; empty: the module cannot make one
    written: bool = False  # the last checkpoint
    began_s: float = 0.0  # when the end of the run began
    deadline_s: float | None = None  # of the end
    states: list[WorkerState] = field(default_factory=list)
    _bodies: set[int] = field(default_factory=set)  # workers whose process has not been reaped
    _due_s: dict[int, float] = field(default_factory=dict)  # when a failed worker may restart
    _asked: dict[int, tuple[int, int]] = field(default_factory=dict)  # worker: teller, question
    _questions: int = 0
    _refused: Counter[int] = field(default_factory=Counter)  # consecutive failed starts
    _finished: bool = False  # a worker has finished
    _leader_finished: bool = False  # the first worker, which logs and saves for all, has finished
    _rescued: bool = False
    _broken_off: bool = False

    def __post_init__(self) -> None:
        self.states = [S.STARTING] * self.n_workers
        self._bodies = set(range(self.n_workers))

    def on(self, worker: int, event: LifecycleEvent) -> None:
        """Move the worker to its next state."""
        before = self.states[worker]
        self.states[worker] = TABLE.get((before, event), before)

    def those(self, *states: WorkerState) -> list[int]:
        """The workers in any of these states."""
        return [worker for worker, state in enumerate(self.states) if state in states]

    @property
    def ending(self) -> bool:
        """Whether the run ends early."""
        return self.deadline_s is not None

    @property
    def over(self) -> bool:
        """Whether no process is left, and none will be started."""
        return all(state is S.GONE for state in self.states) and not self._must_finish_for_leader

    @property
    def away(self) -> bool:
        """Whether a worker is to be restarted. Read in every turn of the event loop."""
        return S.FAILED in self.states or S.CALLED in self.states or self._must_finish_for_leader

    @property
    def telling(self) -> bool:
        """Whether a worker that can answer was asked for the progress."""
        return any(self.states[who] in TRAINING for who, _ in self._asked.values())

    def next_s(self) -> list[float]:
        """The times at which :meth:`advance` has something to do."""
        if self.deadline_s is None:
            return [self._due_s[worker] for worker in self.those(S.FAILED)]
        return [self.deadline_s] if self._broken_off else [self._late_s, self.deadline_s]

    @property
    def _late_s(self) -> float:
        return self.began_s + self.grace_s / 2

    # ---- going ----------------------------------------------------------------------------------

    def failed(
        self, worker: int, error: BaseException, at_s: float, training: bool, waits: bool = False
    ) -> Verdict:
        """Decide what follows from a failure. Before ``training`` the run can only end.

        ``waits``: if the run ends, this worker may write the last checkpoint.
        """
        others = sum(state in THERE for n, state in enumerate(self.states) if n != worker)
        early = self.kept is None and not self._finished
        gone, verdict = WorkerGone(others, bool(self.kept), early), cast(Verdict, End())
        if training and not self.ending:
            verdict = self.judge.failed(worker, error, gone, at_s)
        elif not (self.ending or self.judge.ends_all or isinstance(error, UserError)):
            verdict = End("training had not begun, so there is nothing to go on from")
        if isinstance(verdict, Replace):
            self.on(worker, E.BREAKS)
            self._due_s[worker] = at_s + verdict.delay_s
        else:
            self.on(worker, E.STOPS if waits and isinstance(verdict, End) else E.ENDS)
        return verdict

    def finished(self, worker: int, first: bool = True) -> None:
        """The worker has finished; ``first``: it is the one that logs and saves for all."""
        self._finished, self._leader_finished = True, self._leader_finished or first
        self.on(worker, E.ENDS)

    def stopped(self, worker: int) -> list[Act]:
        """The worker has stopped as requested, and waits for the permission to save."""
        self.on(worker, E.STOPS)
        return [] if self.ending else [PermitSave(worker, False)]

    def reaped(self, worker: int) -> None:
        """The worker's process has ended; :meth:`failed` was called before if it failed."""
        self._bodies.discard(worker)
        if self.states[worker] not in AWAY:
            self.on(worker, E.DIES)

    def saved(self, worker: int, well: bool) -> None:
        """The worker has written the last checkpoint, or failed to."""
        self.written = self.written or well
        self.on(worker, E.ENDS)

    # ---- coming ---------------------------------------------------------------------------------

    def progress(self, teller: int, worker: int | None, question: int, payload: bytes) -> list[Act]:
        """A progress report, for ``worker`` or to be kept."""
        if worker is None:
            self.kept = payload
        elif self._asked.get(worker) == (teller, question) and self.states[worker] is S.CALLED:
            del self._asked[worker]
            return [Start(worker, payload)]
        return []

    def comes(self, worker: int) -> None:
        """There is room for this worker, which has none so far, or was lost."""
        if not self.ending and self.states[worker] is S.GONE:
            self.on(worker, E.CALL)

    def started(self, worker: int) -> None:
        """A new process runs as this worker."""
        self._refused.pop(worker, None)
        # The new process has not received the questions to its predecessor.
        self._asked = {w: asked for w, asked in self._asked.items() if worker not in (w, asked[0])}
        self._bodies.add(worker)
        self.on(worker, E.START)

    def refused(self, worker: int, error: Exception, at_s: float) -> list[Act]:
        """The system could not start a process: retry a few times."""
        self._refused[worker] += 1
        if self.ending:
            self.on(worker, E.DIES)
            return []
        if self._refused[worker] >= _MOST_TRIES:
            tries = f"tried {_MOST_TRIES} times"
            return [GiveUp(worker, f"no process could be started for it ({tries}): {error!r}")]
        delay_s = _FIRST_DELAY_S * 2 ** (self._refused[worker] - 1)
        self.on(worker, E.REFUSE)
        self._due_s[worker] = at_s + delay_s
        return [Say(f"worker {worker} cannot be started ({error}); again in {delay_s:g} s")]

    def advance(self, at_s: float, pushed: Collection[int] = ()) -> list[Act]:
        """Act on the time.

        ``pushed``: workers not to be restarted yet: an update lacks their push, or they their host.
        """
        if self.deadline_s is not None:
            return self._end(at_s, self.deadline_s)
        if not self.away:
            return []
        if self._must_finish_for_leader:
            return [] if self._bodies else self._finish_for_leader()
        if self._finished and not self.those(*THERE):
            return self._call_off()
        for worker in self.those(S.FAILED):
            if worker not in self._bodies and at_s >= self._due_s[worker]:
                self.on(worker, E.CALL)
        called = [worker for worker in self.those(S.CALLED) if worker not in pushed]
        if not self.those(*THERE, *LAST) and not self._bodies & {*self.those(S.ENDED)}:
            return [Start(worker, self.kept) for worker in called[:1] if self.kept]
        return self._ask(called)

    def _ask(self, called: list[int]) -> list[Act]:
        """Ask a waiting worker first: it answers at once. Workers in a meeting are not asked."""
        able = [*self.those(S.WAITING), *self.those(S.COMPUTING)]
        acts: list[Act] = []
        for worker in called:
            if able and self._asked.get(worker, (None, 0))[0] not in able:
                self._questions += 1
                self._asked[worker] = able[0], self._questions
                acts.append(Ask(able[0], worker, self._questions))
        return acts

    @property
    def _must_finish_for_leader(self) -> bool:
        """Whether one process must repeat what the first worker does after the last update."""
        lost = self._finished and not self._leader_finished and not self.ending
        return bool(lost and self.kept) and not self.those(*THERE)

    def _finish_for_leader(self) -> list[Act]:
        worker = min(self.those(*AWAY), default=0)
        text = f"worker {worker} begins again, to finish: training is over, the first worker lost"
        return [Say(text), Start(worker, self.kept or b"")]

    def _call_off(self) -> list[Act]:
        """The others have finished: restart no worker."""
        acts: list[Act] = []
        for worker in self.those(*AWAY):
            acts.append(Say(f"worker {worker} is not restarted: training is over"))
            self.leave(worker)
        return acts

    def leave(self, worker: int) -> None:
        """Do not restart the worker."""
        self._asked.pop(worker, None)
        self.on(worker, E.ENDS if worker in self._bodies else E.DIES)

    # ---- the beginning of the end ---------------------------------------------------------------

    def stop(self, at_s: float) -> list[int]:
        """The run ends; no worker waits for the returned ones any more."""
        if self.deadline_s is not None:
            return []
        self.began_s, self.deadline_s = at_s, at_s + self.grace_s
        away, back = self.those(*AWAY), self.those(S.RESTARTING)
        for worker in away:
            self.leave(worker)
        return [*away, *back]

    def insist(self) -> None:
        """End at once."""
        self.deadline_s = 0.0

    def _end(self, at_s: float, deadline_s: float) -> list[Act]:
        if at_s >= deadline_s:
            return [KillAll()]
        acts: list[Act] = []
        if at_s >= self._late_s and not self._broken_off:
            self._broken_off = True
            acts.append(BreakOff())
        if self.written:
            return acts + self._dismiss()
        return acts + self._choose_saver(late=at_s >= self._late_s)

    def _dismiss(self) -> list[Act]:
        """The checkpoint is written: dismiss stopped workers, kill those just restarted."""
        stopped, back = self.those(S.STOPPED), self.those(S.RESTARTING)
        for worker in [*stopped, *back]:
            self.on(worker, E.ENDS)
        return [*(PermitSave(worker, False) for worker in stopped), *map(Kill, back)]

    def _choose_saver(self, late: bool) -> list[Act]:
        """Let the first stopped worker save, once all have stopped.

        A free-running worker may still make an update until then, and each leaves its random
        numbers.
        """
        stopped = self.those(S.STOPPED)
        if self.those(S.SAVING):
            return []
        if stopped:
            if self.those(S.STARTING, *TRAINING) and not late:
                return []
            self.on(stopped[0], E.PERMIT)
            return [PermitSave(stopped[0], True)]
        able = self.those(*THERE) or self._bodies
        if able or self._rescued or not self.kept or self._finished:
            return []
        self._rescued = True
        return [Start(0, self.kept)]
