"""A run without processes in which workers run freely, are lost and come back.

The server, its queue and the roster are the real ones. Workers are generators that ask what a
worker of Lightning asks for; which one goes on next, and who is lost when, is drawn. Time passes
only when nobody can go on.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from hybridtrain.engine.policies import make_policy
from hybridtrain.engine.protocol.events import Completed, Received, Removed, Restarted
from hybridtrain.engine.protocol.messages import (
    Answer,
    Back,
    Begin,
    Draw,
    DrawnBatch,
    Gather,
    Gone,
    Install,
    LoaderPass,
    Pull,
    Push,
    Refused,
    Request,
    Share,
)
from hybridtrain.engine.protocol.spans import Spans, total
from hybridtrain.engine.recovery.failure_policy import Judge, OnFailure, Replace
from hybridtrain.engine.recovery.roster import THERE, Ask, LifecycleEvent, Roster, Say, Start
from hybridtrain.engine.server.rounds import Replies
from tests.support.served import Served

E = LifecycleEvent
EPOCHS, MOST_TURNS = 3, 3000  # an undisturbed run takes a tenth of these
LOST = RuntimeError("killed")
POLICIES = ("async", "backup", "k_async", "k_batch_sync", "k_batch_async", "ssp", "synchronous")
Course = Generator[Request, Any, None]


@dataclass
class Process:
    """One process of a worker: what it asks for next, or waits for, and what it has heard."""

    epoch: int
    course: Course = field(init=False)
    kept_in: int | None = None  # the epoch in which it has said where training is
    request: Request | None = None
    answer: Any = None
    ended: bool = False
    away: set[int] = field(default_factory=set)  # as far as it knows
    asked: dict[int, int] = field(default_factory=dict)  # where training is, for whom: the question

    @property
    def can_go_on(self) -> bool:
        return not self.ended and (self.request is None or bool(self.asked and self.in_step))

    @property
    def in_step(self) -> bool:
        return isinstance(self.request, Push | Begin)


class FreeRun:
    """One run of two to four workers.

    Args:
        rng: draws everything.
        policy: its name.
    """

    def __init__(self, rng: random.Random, policy: str) -> None:
        self.rng, self.n = rng, rng.randint(2, 4)
        self.sizes = tuple(rng.choice([(2,) * self.n, (2, 4, 1, 2)[: self.n]]))
        self.length, self.drop_last = rng.randint(0, rng.choice([16, 40])), rng.random() < 0.3
        self.ahead = rng.choice([1, 1, 4])
        self.turn = int(policy == "synchronous")
        self.speeds = [rng.choice([1.0, 1.0, 10.0]) for _ in self.sizes]
        self.failures_left, self.rate = rng.choice([1, 3, 12]), rng.choice([0.01, 0.05, 0.2])
        self.served = Served(self.n, make_policy(policy))
        self.server = self.served.server
        judge = Judge(OnFailure("restart", max_restarts=None))
        self.roster = Roster(self.n, judge)
        self.now_s = 0.0
        self.over = False  # nobody is left who knows where training is
        self.processes = [self._process(worker, 0, joins=False) for worker in range(self.n)]

    # ---- a worker -------------------------------------------------------------------------------

    def _process(self, worker: int, epoch: int, joins: bool) -> Process:
        made = Process(epoch)
        made.course = self._train(worker, made, joins)
        return made

    def _train(self, worker: int, me: Process, joins: bool) -> Course:
        if joins:
            yield Share(self.served.layout)
            yield Install()
            yield Pull()
        while me.epoch < EPOCHS:
            turn, left = self.turn, True
            while left:
                yield from self._pass(worker, me, turn)
                yield Gather("decision", b"")
                left = (yield Gather("who is there", b"")).remaining
                if left:
                    yield Gather("whether to make it up", b"")
                turn = 0
            yield Gather("metrics", b"")
            me.epoch += 1

    def _pass(self, worker: int, me: Process, turn: int) -> Course:
        """Some mini-batches are fetched ahead; a smaller one is the last of a loader."""
        size, held, more, begins = self.sizes[worker], list[Spans](), True, True
        while held or more:
            self._keep(worker, me)
            while more and len(held) <= self.ahead:
                lap, whole = LoaderPass(0, me.epoch), ((0, self.length),)
                ask = Draw(lap, whole, self.length, self.sizes, self.drop_last, begins, turn)
                drawn: Spans = (yield ask).spans
                held += [drawn] * bool(drawn)
                more, begins = total(drawn) == size, False
            if held:
                yield from self._step(me, held.pop(0))

    def _keep(self, worker: int, me: Process) -> None:
        """The first of those who are there says once in an epoch where training is."""
        if me.kept_in != me.epoch and worker == min({*range(self.n)} - me.away):
            me.kept_in = me.epoch
            self._do(self.roster.progress(worker, None, 0, bytes([me.epoch])))

    def _step(self, me: Process, spans: Spans) -> Course:
        if self.turn:
            yield Begin()
        yield Push(0, float(total(spans)), covers=(DrawnBatch(LoaderPass(0, me.epoch), spans),))

    # ---- the run --------------------------------------------------------------------------------

    def run(self) -> None:
        """To its end; every sample counts once in each epoch, but for what ``drop_last`` leaves."""
        for _ in range(MOST_TURNS):
            self._do(self.roster.advance(self.now_s, self.server.membership.rounds.pushed))
            if self.over or self.roster.over:
                break
            self._happen()
        assert self.over or self.roster.over, f"it hangs: {self.state()}"
        if not self.over:
            least = self.length - (max(self.sizes) - 1) * self.drop_last
            made = self.server.statistics.stats()["samples"]
            assert EPOCHS * least <= made <= EPOCHS * self.length, "each sample once an epoch"
        self.server.close()

    def state(self) -> str:
        """For whoever looks for the fault."""
        waits = [each.request for each in self.processes]
        return f"{self.roster.states} {waits} {self.server.membership.queue}"

    def _happen(self) -> None:
        able = [worker for worker, each in enumerate(self.processes) if each.can_go_on]
        if self.failures_left and self.rng.random() < self.rate:
            self.failures_left -= 1
            self._kill(self.rng.choice([1, self.n, self.n]))
        elif able:
            (worker,) = self.rng.choices(able, [self.speeds[each] for each in able])
            self._go_on(worker, self.processes[worker])
        else:
            due_s = [at_s for at_s in self.roster.next_s() if at_s > self.now_s]
            assert due_s, f"all wait: {self.state()}"
            self.now_s = min(due_s)

    def _go_on(self, worker: int, me: Process) -> None:
        if me.request is not None:
            self._tell(worker, me)
            return
        try:
            me.request = me.course.send(me.answer)
        except StopIteration:
            me.ended = True
            self.roster.finished(worker)
            self._send(self.server.on(Completed(worker)))
            self._reap(worker)
            return
        request = me.request
        if isinstance(request, Push | Begin):
            self.roster.on(worker, E.WAITS)
        elif isinstance(request, Gather | Share | Install):
            self.roster.on(worker, E.MEETS)
        self._send(self.server.on(Received(worker, request)))
        if isinstance(request, Push | Begin) and me.asked:
            self._tell(worker, me)

    def _tell(self, worker: int, me: Process) -> None:
        asked, me.asked = me.asked, {}
        for other, question in asked.items():
            self._do(self.roster.progress(worker, other, question, bytes([me.epoch])))

    def _send(self, replies: Replies) -> None:
        for worker, reply in replies:
            process = self.processes[worker]
            match reply:
                case Gone():
                    process.away.add(reply.worker)
                case Back():
                    process.away.discard(reply.worker)
                case Refused(reason):
                    raise AssertionError(reason)
                case _ if isinstance(reply, Answer) and process.request is not None:
                    process.request, process.answer = None, reply
                    self.roster.on(worker, E.GOES_ON)

    # ---- what goes wrong ------------------------------------------------------------------------

    def _kill(self, most: int) -> None:
        there = self.roster.those(*THERE)
        for worker in self.rng.sample(there, min(most, len(there))):
            self._reap(worker)

    def _reap(self, worker: int) -> None:
        self.processes[worker].ended = True
        mourned = self.roster.states[worker] in THERE
        if mourned:
            verdict = self.roster.failed(worker, LOST, self.now_s, training=True)
            if not isinstance(verdict, Replace) or verdict.anew:
                self.over = True
                return
            self._send(self.server.on(Removed(worker, returns=True)))
        self.roster.reaped(worker)
        if not mourned:
            self._send(self.server.on(Removed(worker)))

    def _do(self, acts: list[Any]) -> None:
        for act in acts:
            match act:
                case Ask(teller, worker, question):
                    self.processes[teller].asked[worker] = question
                case Start(worker, told):
                    self.processes[worker] = self._process(worker, told[0], joins=True)
                    self.roster.started(worker)
                    self.server.on(Restarted(worker))
                case Say():
                    pass
                case _:
                    raise AssertionError(act)
