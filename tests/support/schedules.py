"""A run without processes: workers, a server and a clock, as far as the roster has to do with them.

What happens next is drawn: a worker computes, answers, fails, is reaped, a signal comes. Time
passes only when nothing else can happen, so a run that ends by a time-out shows.
"""

from __future__ import annotations

import random
from typing import Any

from hybridtrain.engine.recovery.failure_policy import End, Judge, OnFailure, Replace
from hybridtrain.engine.recovery.roster import (
    THERE,
    Ask,
    BreakOff,
    GiveUp,
    Kill,
    KillAll,
    LifecycleEvent,
    PermitSave,
    Roster,
    Say,
    Start,
    WorkerState,
)

E = LifecycleEvent
STEPS, MEET_EVERY = 6, 3
GRACE_S = 30.0
ERROR = RuntimeError("a failure")
REFUSAL = BlockingIOError(11, "no process")


class Process:
    """One process of a worker. ``mode``: what it does."""

    __slots__ = ("asked", "made", "mode", "stop")

    def __init__(self, mode: str) -> None:
        self.mode, self.stop, self.made = mode, False, 0
        self.asked: dict[int, int] = {}  # where training is, for whom: the question


class Schedule:
    """One run of at most four workers.

    Args:
        rng: draws everything.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.n = 1 + int(rng.random() * 4)
        self.lockstep = rng.random() < 0.5
        self.averages = self.lockstep and rng.random() < 0.5
        most = None if rng.random() < 0.7 else 2
        self.roster = Roster(self.n, Judge(OnFailure("restart", max_restarts=most)), GRACE_S)
        self.processes = [Process("boot") for _ in range(self.n)]
        self.now_s, self.step = 0.0, 0
        self.rows: set[int] = set()  # who has pushed, in lock-step
        self.brought: set[int] = set()  # who waits for the mean of all gradients
        self.means: set[int] = set()  # who has it, or had, and has not pushed yet
        self.broken = False  # no round, nor any meeting, any more
        self.failures_left = int(rng.random() * 6)
        self.signals_left = int(rng.random() * 1.6)
        self.refusals_left = int(rng.random() * 9) if rng.random() < 0.2 else 0
        self.frozen = rng.random() < 0.05  # one of them hangs
        self.keeps = rng.random() < 0.8
        self.announced: set[int] = set()  # restarts that are to come
        self.reason = ""  # why the run ends early
        self.written = self.named = 0
        self.able = False  # somebody was there to save
        self.late = False

    # ---- the run --------------------------------------------------------------------------------

    def run(self) -> None:
        """To its end, and look whether all is as it must be."""
        for _ in range(600):
            self._happen()
            self._do(self.roster.advance(self.now_s, self.rows))
            if self.roster.over:
                break
        assert self.roster.over, f"it hangs: {self.roster.states} {self._modes()}"
        assert all(process.mode == "dead" for process in self.processes)
        assert self.reason or not self.announced, f"forgotten: {self.announced}"
        assert self.written <= 1
        assert self.written or not self.able, "somebody could have saved"
        if self.roster.ending and not self.late:
            assert self.now_s - self.roster.began_s <= 1.0, "somebody was waited for in vain"

    def _modes(self) -> list[str]:
        return [process.mode for process in self.processes]

    def _happen(self) -> None:
        """One thing that can happen now."""
        rng, choices = self.rng, []
        for worker, process in enumerate(self.processes):
            mode = process.mode
            if mode in ("boot", "compute", "exit", "save") or (mode == "wait" and process.asked):
                choices.append(worker)
        draw = rng.random()
        if draw < 0.12 and self.failures_left:
            self._fail()
        elif draw > 0.97 and self.signals_left:
            self.signals_left -= 1
            self._end("a signal")
        elif choices and not (self.frozen and len(choices) == 1 and choices[0] == self.n - 1):
            self._live(choices[int(rng.random() * len(choices))])
        else:
            self._let_time_pass()

    def _live(self, worker: int) -> None:
        """It does the next thing."""
        process, roster = self.processes[worker], self.roster
        match process.mode:
            case "wait":
                asked, process.asked = process.asked, {}
                for other, question in asked.items():
                    self._do(roster.progress(worker, other, question, b"told"))
            case "boot" | "compute" if process.stop:
                self._stop(worker)
            case "boot" | "compute":
                self._compute(worker, process)
            case "save":
                well = self.rng.random() < 0.9
                self.written += well
                self.able = self.able or well
                process.mode = "exit"
                roster.saved(worker, well)
            case "exit":
                self._reap(worker)

    def _compute(self, worker: int, process: Process) -> None:
        if self.keeps and not self.roster.kept:
            self._do(self.roster.progress(worker, None, 0, b"kept"))
        if self.broken:
            self._stop(worker)
        elif not self.lockstep:
            self.roster.on(worker, E.WAITS)
            for other, question in process.asked.items():
                self._do(self.roster.progress(worker, other, question, b"told"))
            process.asked, process.mode = {}, "compute"
            self.roster.on(worker, E.GOES_ON)
            self.step += 1
            if self.step >= STEPS * self.n:
                self._meet(worker)
        elif self.averages and worker not in self.means:
            process.mode = "wait"
            self.brought.add(worker)
            self.roster.on(worker, E.WAITS)
            self._average()
        else:
            process.mode = "wait"
            self.means.discard(worker)
            self.rows.add(worker)
            self.roster.on(worker, E.WAITS)
            self._update()

    def _average(self) -> None:
        """When all have brought a gradient; a place is kept for those who are away."""
        if len(self.brought) < self.n:
            return
        for worker in self.brought:
            assert self.processes[worker].mode == "wait", "an answer to who has not asked"
            self.processes[worker].mode = "compute"
            self.roster.on(worker, E.GOES_ON)
        self.means, self.brought = self.brought, set()

    def _update(self) -> None:
        """In lock-step, when all have pushed; a place is kept for those who are away."""
        if len(self.rows) < self.n:
            return
        self.rows.clear()
        self.step += 1
        for worker, process in enumerate(self.processes):
            if process.mode == "wait":
                process.mode = "compute"
                self.roster.on(worker, E.GOES_ON)
                if self.step % MEET_EVERY == 0:
                    self._meet(worker)

    def _meet(self, worker: int) -> None:
        self.processes[worker].mode = "meet"
        self.roster.on(worker, E.MEETS)
        self._close_meeting()

    def _close_meeting(self) -> None:
        """All who are there go on, or have done their job."""
        there = [w for w, p in enumerate(self.processes) if p.mode in ("meet", "compute", "wait")]
        there += [w for w, p in enumerate(self.processes) if p.mode == "boot"]
        if any(self.processes[worker].mode != "meet" for worker in there):
            return
        over = self.step >= STEPS * (1 if self.lockstep else self.n)
        for worker in there:
            if over:
                self.processes[worker].mode = "exit"
                self.roster.finished(worker)
            else:
                self.processes[worker].mode = "compute"
                self.roster.on(worker, E.GOES_ON)

    def _stop(self, worker: int) -> None:
        """Between two steps."""
        self.processes[worker].mode = "stopped"
        self._do(self.roster.stopped(worker))
        self._break(worker)

    def _break(self, worker: int) -> None:
        """Nobody waits for it in lock-step, nor in a meeting."""
        self.rows.discard(worker)
        self.brought.discard(worker)
        self.broken = self.broken or self.lockstep
        free = ("wait", "meet") if self.lockstep else ("meet",)
        for other, process in enumerate(self.processes):
            if process.mode in free and other != worker:
                process.mode = "stopped"
                self._do(self.roster.stopped(other))

    # ---- what goes wrong ------------------------------------------------------------------------

    def _fail(self) -> None:
        """One of those who are there; often several at once."""
        self.failures_left -= 1
        there = [w for w, process in enumerate(self.processes) if process.mode != "dead"]
        if not there:
            return
        worker = there[int(self.rng.random() * len(there))]
        if self.roster.states[worker] in THERE and self.rng.random() < 0.3:
            self._raise(worker)
        else:
            self._reap(worker)

    def _raise(self, worker: int) -> None:
        process, training = self.processes[worker], self.step > 0
        verdict = self.roster.failed(worker, ERROR, self.now_s, training, waits=True)
        self._follow(worker, verdict)
        process.mode = "stopped" if self.roster.states[worker] is WorkerState.STOPPED else "exit"

    def _reap(self, worker: int) -> None:
        self.processes[worker].mode = "dying"
        if self.roster.states[worker] in THERE:
            verdict = self.roster.failed(worker, ERROR, self.now_s, training=self.step > 0)
            self._follow(worker, verdict)
        self.processes[worker].mode = "dead"
        self.roster.reaped(worker)
        self._close_meeting()

    def _follow(self, worker: int, verdict: Any) -> None:
        match verdict:
            case Replace(anew=True):
                self.processes[worker].mode = "lost"
                self._end("all begin anew")
                self._break(worker)
            case Replace():
                self.announced.add(worker)
                self.brought.discard(worker)
                if not self.lockstep:
                    self.rows.discard(worker)
            case End(reason):
                self.processes[worker].mode = "lost"
                self._end(reason or "a failure")
                self._break(worker)

    def _end(self, reason: str) -> None:
        if self.roster.ending:
            return
        self.reason = reason
        asked = self.roster.those(*THERE)
        for worker in asked:
            self.processes[worker].stop = True
        for worker in self.roster.stop(self.now_s):
            self._break(worker)
        assert not self.roster.away

    def _let_time_pass(self) -> None:
        due_s = [at_s for at_s in self.roster.next_s() if at_s > self.now_s]
        if not due_s and self.frozen:  # the watchman kills it
            self.frozen = False
            return
        assert due_s, f"nothing will happen any more: {self.roster.states} {self._modes()}"
        self.now_s = min(due_s)

    # ---- what the roster wants ------------------------------------------------------------------

    def _do(self, acts: list[Any]) -> None:
        for act in acts:
            match act:
                case Ask(teller, worker, question):
                    assert self.processes[teller].mode in ("wait", "compute")
                    assert self.roster.states[worker] is WorkerState.CALLED
                    assert worker not in self.rows
                    self.processes[teller].asked[worker] = question
                case Start(worker, told):
                    self._start(worker, told)
                case PermitSave(worker, saves):
                    self._permit_save(worker, saves)
                case GiveUp(worker, reason):
                    self._end(reason)
                    self._break(worker)
                case Say(text):
                    if text.endswith("training is over"):
                        self.announced.discard(int(text.split()[1]))
                case Kill(worker):
                    self._reap(worker)
                case BreakOff():
                    self.late = self.broken = True
                    self._break(-1)
                case KillAll():
                    for worker, process in enumerate(self.processes):
                        if process.mode != "dead":
                            self._reap(worker)

    def _start(self, worker: int, told: bytes) -> None:
        assert self.processes[worker].mode == "dead", "two processes of one worker"
        if told == b"kept":
            assert not {*self._modes()} & {"boot", "compute", "wait", "meet"}
        if self.refusals_left:
            self.refusals_left -= 1
            self._do(self.roster.refused(worker, REFUSAL, self.now_s))
            return
        self.announced.discard(worker)
        self.processes[worker] = fresh = Process("boot")
        fresh.stop = self.roster.ending
        self.roster.started(worker)

    def _permit_save(self, worker: int, saves: bool) -> None:
        process = self.processes[worker]
        if process.mode != "stopped":
            return
        process.mode = "save" if saves else "exit"
        if saves:
            assert not self.written and self._modes().count("save") == 1, "two writers"
