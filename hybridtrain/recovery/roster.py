"""Which workers train, are restarted, report progress and save: decided without I/O.

Theory of operation. The world tells what has happened (a worker waits, has failed, its process has
ended, a signal has come, it is so late) and does what it is told in return. What is to be known
about the lives of workers (:mod:`hybridtrain.recovery.lifecycle` draws them) is here, and nowhere
else.

A worker that failed is announced to come back (FAILED). When its old process has ended and its time
has come it is CALLED: somebody is asked where training is. That is one who trains, best one who
waits in a step, for it answers at once. Its answer counts once, and only the one to the last
question: where the one asked fails, ends or goes to a meeting, another one is asked. In lock-step
what the lost worker has pushed lies in its row; then nobody is asked before the update is made. If
all are away, one begins where training was some time ago (``kept``), and answers for the others as
soon as it waits in its step, for whatever: it may wait for them. Before the first report all begin
anew.
A process that the system refuses to start is tried again, and its worker is called anew then.

An announced restart happens, or the user is told why not: training is over, or the run ends.

At the end of a run everybody is asked to stop. Who has stopped waits; the first of them (nobody
waits for one that has come back and not come to its step) writes the last checkpoint, the next one
if it cannot; where workers run freely all have stopped before, so that it has every update. If
nobody is left, one more process is started for that. Late, when half of the time given is over,
nobody is waited for any longer; when all of it is over, all are killed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import cast

from hybridtrain.errors import UserError
from hybridtrain.recovery.actions import (
    Act,
    Ask,
    BreakOff,
    GiveUp,
    Kill,
    KillAll,
    Name,
    Say,
    Start,
)
from hybridtrain.recovery.failure_policy import End, Judge, Replace, Verdict, WorkerGone
from hybridtrain.recovery.lifecycle import (
    AWAY,
    LAST,
    TABLE,
    THERE,
    TRAINING,
    LifecycleEvent,
    WorkerState,
)

S, E = WorkerState, LifecycleEvent
_FIRST_DELAY_S, _MOST_TRIES = 0.5, 6  # of starting a process that the system refuses: 15 s


@dataclass
class Roster:
    """The states of all workers.

    Args:
        n_workers: W.
        judge: decides what follows from a failure.
        grace_s: how long workers may take to stop.
        whole_rounds: no update can be made any more when one of them has stopped.
    """

    n_workers: int
    judge: Judge
    grace_s: float = 30.0
    whole_rounds: bool = True
    kept: bytes | None = None  # where training was some time ago; empty: it cannot be told
    written: bool = False  # the last checkpoint
    began_s: float = 0.0  # the end, once it has
    deadline_s: float | None = None  # of the end
    states: list[WorkerState] = field(default_factory=list)
    _bodies: set[int] = field(default_factory=set)  # whose processes have not been reaped
    _due_s: dict[int, float] = field(default_factory=dict)  # when who has failed may come back
    _asked: dict[int, tuple[int, int]] = field(default_factory=dict)  # for whom: who, which time
    _questions: int = 0
    _refused: Counter[int] = field(default_factory=Counter)  # starts, one after the other
    _finished: bool = False  # somebody has done its job
    _home: bool = False  # and that of the first worker, which speaks for all
    _rescued: bool = False
    _broken_off: bool = False

    def __post_init__(self) -> None:
        self.states = [S.STARTING] * self.n_workers
        self._bodies = set(range(self.n_workers))

    def on(self, worker: int, event: LifecycleEvent) -> None:
        """It has happened to this worker."""
        before = self.states[worker]
        self.states[worker] = TABLE.get((before, event), before)

    def those(self, *states: WorkerState) -> list[int]:
        """In any of these states."""
        return [worker for worker, state in enumerate(self.states) if state in states]

    @property
    def ending(self) -> bool:
        """Whether the run ends before its time."""
        return self.deadline_s is not None

    @property
    def over(self) -> bool:
        """Whether nobody is left, and nobody will come."""
        return all(state is S.GONE for state in self.states) and not self._closes

    @property
    def away(self) -> bool:
        """Whether somebody is to come back."""
        # Asked for in each turn.
        return S.FAILED in self.states or S.CALLED in self.states or self._closes

    @property
    def telling(self) -> bool:
        """Whether somebody who can answer was asked where training is."""
        return any(self.states[who] in TRAINING for who, _ in self._asked.values())

    def next_s(self) -> list[float]:
        """When something is due."""
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
        """It has failed; what follows? Before ``training`` there is nothing to go on with.

        ``waits``: if the run ends, it may write the last checkpoint.
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
        """It has done its job; ``first``: as the one that speaks for all."""
        self._finished, self._home = True, self._home or first
        self.on(worker, E.ENDS)

    def stopped(self, worker: int) -> list[Act]:
        """It has stopped as it was asked to, and waits to be told whether to save."""
        self.on(worker, E.STOPS)
        return [] if self.ending else [Name(worker, False)]

    def reaped(self, worker: int) -> None:
        """Its process has ended; what follows from a failure has been decided before."""
        self._bodies.discard(worker)
        if self.states[worker] not in AWAY:
            self.on(worker, E.DIES)

    def saved(self, worker: int, well: bool) -> None:
        """It has written the last checkpoint, or could not."""
        self.written = self.written or well
        self.on(worker, E.ENDS)

    # ---- coming ---------------------------------------------------------------------------------

    def told(self, teller: int, worker: int | None, question: int, payload: bytes) -> list[Act]:
        """Where training is: for a worker, or to be kept."""
        if worker is None:
            self.kept = payload
        elif self._asked.get(worker) == (teller, question) and self.states[worker] is S.CALLED:
            del self._asked[worker]
            return [Start(worker, payload)]
        return []

    def started(self, worker: int) -> None:
        """Another process has been started as this worker."""
        self._refused.pop(worker, None)
        # What its former process was asked the new one has not heard.
        self._asked = {w: asked for w, asked in self._asked.items() if worker not in (w, asked[0])}
        self._bodies.add(worker)
        self.on(worker, E.START)

    def refused(self, worker: int, error: Exception, at_s: float) -> list[Act]:
        """The system could not start one: it is tried again, but not for ever."""
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
        """It is so late; what ``pushed`` workers have computed is no part of an update yet."""
        if self.deadline_s is not None:
            return self._end(at_s, self.deadline_s)
        if not self.away:
            return []
        if self._closes:
            return [] if self._bodies else self._close()
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
        """Who waits answers at once; whoever is in a meeting is not asked, nor waited for."""
        able = [*self.those(S.WAITING), *self.those(S.COMPUTING)]
        acts: list[Act] = []
        for worker in called:
            if able and self._asked.get(worker, (None, 0))[0] not in able:
                self._questions += 1
                self._asked[worker] = able[0], self._questions
                acts.append(Ask(able[0], worker, self._questions))
        return acts

    @property
    def _closes(self) -> bool:
        """Whether one process is to do again what the first worker does behind the last update."""
        lost = self._finished and not self._home and not self.ending
        return bool(lost and self.kept) and not self.those(*THERE)

    def _close(self) -> list[Act]:
        worker = min(self.those(*AWAY), default=0)
        text = f"worker {worker} begins again, to finish: training is over, the first worker lost"
        return [Say(text), Start(worker, self.kept or b"")]

    def _call_off(self) -> list[Act]:
        """The others have done everything."""
        acts: list[Act] = []
        for worker in self.those(*AWAY):
            acts.append(Say(f"worker {worker} is not restarted: training is over"))
            self._leave(worker)
        return acts

    def _leave(self, worker: int) -> None:
        """It is to come back no more."""
        self._asked.pop(worker, None)
        self.on(worker, E.ENDS if worker in self._bodies else E.DIES)

    # ---- the beginning of the end ---------------------------------------------------------------

    def stop(self, at_s: float) -> list[int]:
        """The run ends; nobody is to wait for these."""
        if self.deadline_s is not None:
            return []
        self.began_s, self.deadline_s = at_s, at_s + self.grace_s
        away, back = self.those(*AWAY), self.those(S.RESTARTING)
        for worker in away:
            self._leave(worker)
        return [*away, *back]

    def insist(self) -> None:
        """It ends at once."""
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
        return acts + self._name(late=at_s >= self._late_s)

    def _dismiss(self) -> list[Act]:
        """There is a checkpoint: who has stopped may go, and who has just come back must."""
        stopped, back = self.those(S.STOPPED), self.those(S.RESTARTING)
        for worker in [*stopped, *back]:
            self.on(worker, E.ENDS)
        return [*(Name(worker, False) for worker in stopped), *map(Kill, back)]

    def _name(self, late: bool) -> list[Act]:
        """The first one that has stopped; those before it may still come.

        Where workers run freely, any of them may be about to make an update, which is to be in it.
        """
        stopped = self.those(S.STOPPED)
        if self.those(S.SAVING):
            return []
        if stopped:
            there = self.those(S.STARTING, *TRAINING)
            if any(n < stopped[0] or not self.whole_rounds for n in there) and not late:
                return []
            self.on(stopped[0], E.NAME)
            return [Name(stopped[0], True)]
        able = self.those(*THERE) or self._bodies
        if able or self._rescued or not self.kept or self._finished:
            return []
        self._rescued = True
        return [Start(0, self.kept)]
