"""The plain policies: nobody waits (``async``), all wait for all (``hybrid``), or in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.engine.policies.policy import Needs
from hybridtrain.engine.protocol.facts import (
    Apply,
    Drop,
    Fact,
    Joined,
    Left,
    Order,
    Pushed,
    Ready,
    Release,
    Waiting,
)
from hybridtrain.util.option_types import Checked, Natural

PASS = 1 << 30  # mini-batches: more than any pass has


@dataclass
class OnArrival:
    """Apply each gradient when it arrives, and release its worker: asynchronous SGD.

    DeepSpeech's *asynchronous* parallel optimisation: no worker waits, but gradients are stale
    (mozilla/DeepSpeech, ``doc/ParallelOptimization.rst``, "Asynchronous Parallel Optimization").
    """

    def begin(self, n_workers: int) -> Needs:
        self._orders = [(Apply((worker,)), Release((worker,))) for worker in range(n_workers)]
        return Needs(whole_rounds=False, free=True)

    def on(self, fact: Fact) -> Sequence[Order]:
        return self._orders[fact.worker] if isinstance(fact, Pushed) else ()


@dataclass
class NotTooLate(Checked):
    """As ``OnArrival``, but gradients that are too stale are dropped.

    Ringmaster ASGD: Maranjyan, Tyurin, Richtárik 2025 (arXiv:2501.16168), algorithm 1, whose delay
    threshold is ``max_staleness`` + 1.

    Args:
        max_staleness: updates since the worker read the parameters; a staler gradient is dropped,
            and its mini-batch is computed again.
    """

    max_staleness: Natural = 0

    def begin(self, n_workers: int) -> Needs:
        self._updates = 0
        self._read: dict[int, int] = {}  # worker -> updates when it read the parameters
        return Needs(whole_rounds=False, drops_late=n_workers > 1, max_staleness=self.max_staleness)

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Joined(worker, behind):
                self._read[worker] = self._updates - behind
            case Pushed(worker, last=last, empty=empty):
                late = self._updates - self._read.get(worker, self._updates)
                counts = last or late <= self.max_staleness
                self._updates += counts and not empty
                self._read[worker] = self._updates
                return (Apply((worker,)) if counts else Drop((worker,)), Release((worker,)))
        return ()


@dataclass
class LockFree(OnArrival):
    """Workers step the shared parameters themselves, without a lock; the server counts the steps.

    Niu, Recht, Re, Wright, *Hogwild!*, NIPS 2011 (arXiv:1106.5730).
    """

    exchange: ClassVar[str] = "in_place"  # what workers hand over, unless it is chosen


# ---- synchronous SGD: DeepSpeech's *hybrid* parallel optimisation -------------------------------
# Every device reads the same parameters and computes the gradient of its own mini-batch; the host
# waits for all, applies the mean once, and releases all. It equals one device with a mini-batch G
# times larger, and a step takes as long as the slowest device (mozilla/DeepSpeech,
# ``doc/ParallelOptimization.rst``, "Hybrid Parallel Optimization").


@dataclass
class WaitForAll:
    """A round ends when every active worker has pushed.

    Gradients are summed in the order of the workers' numbers, not of arrival, so that the sum has
    the same bits in every run.
    """

    def begin(self, n_workers: int) -> Needs:
        self._expected: set[int] = set()
        self._pushed: set[int] = set()
        return Needs(whole_rounds=True, gathers=n_workers, everyone=True)

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Joined(worker):
                self._expected.add(worker)
            case Pushed(worker):
                self._expected.add(worker)
                self._pushed.add(worker)
            case Waiting(worker) | Left(worker):
                self._expected.discard(worker)
                self._pushed.discard(worker)
        return self._end_of_round()

    def _end_of_round(self) -> Sequence[Order]:
        if not self._pushed or len(self._pushed) != len(self._expected):
            return ()
        workers = tuple(sorted(self._pushed))
        self._pushed.clear()
        return (Apply(workers), Release(workers))


@dataclass
class WholePass(Checked, WaitForAll):
    """An update is one pass over the data, to which each worker gives its part once.

    Workers draw from one queue until it is empty. Before their first mini-batch of a pass they ask
    for the point at which the loss is to be evaluated. The coordinator of Sandblaster (Dean et al.
    2012, appendix, algorithm 1.2).

    Args:
        backups: near the end of a pass an idle worker processes a mini-batch of a slower one, too;
            the first answer counts.
    """

    backups: bool = True
    exchange: ClassVar[str] = "summed"

    def begin(self, n_workers: int) -> Needs:
        super().begin(n_workers)
        twice = self.backups and n_workers > 1
        return Needs(False, holds=True, asks=True, gathers=PASS, whole_pass=True, backs_up=twice)

    def on(self, fact: Fact) -> Sequence[Order]:
        return (Release((fact.worker,)),) if isinstance(fact, Ready) else super().on(fact)


# ---- one worker at a time: DeepSpeech's *synchronous* parallel optimisation ---------------------
# One device reads the parameters and computes, and the server applies its gradient before the next
# device reads them; all others are idle: sequential SGD on alternating devices (mozilla/DeepSpeech,
# ``doc/ParallelOptimization.rst``, "Synchronous Parallel Optimization"). What the literature calls
# synchronous is :class:`hybridtrain.engine.policies.WaitForAll`.


@dataclass
class RoundRobin:
    """Workers compute one at a time, in turn. Not synchronous SGD, which is ``hybrid``.

    The turn passes in the order of the workers' numbers.

    A worker keeps its turn until it asks for the next mini-batch after a push, so that several
    pushes of one mini-batch (several optimizers), or several mini-batches for one push
    (accumulation) belong to one turn. An epoch begins with the first worker.
    """

    def begin(self, n_workers: int) -> Needs:
        self._n, self._holder, self._has_pushed = n_workers, 0, False
        self._active: set[int] = set()
        self._ready: set[int] = set()
        return Needs(whole_rounds=False, turns=True)

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Joined(worker):
                self._active.add(worker)
            case Ready(worker):
                self._active.add(worker)
                self._ready.add(worker)
                done = worker == self._holder and self._has_pushed
                if done or self._holder not in self._active:
                    self._pass_on()
                return self._grant()
            case Pushed(worker):
                self._active.add(worker)
                self._has_pushed = self._has_pushed or worker == self._holder
                return (Apply((worker,)), Release((worker,)))
            case Waiting(worker) | Left(worker):
                self._active.discard(worker)
                self._ready.discard(worker)
                if worker == self._holder:
                    self._pass_on()
                return self._grant()
        return ()

    def _pass_on(self) -> None:
        """To the next active worker; without any, the next turn is the first worker's."""
        self._has_pushed = False
        after = range(self._holder + 1, self._holder + 1 + self._n)
        turns = (worker % self._n for worker in after)
        self._holder = next((w for w in turns if w in self._active), 0)

    def _grant(self) -> Sequence[Order]:
        if self._holder not in self._ready:
            return ()
        self._ready.discard(self._holder)
        return (Release((self._holder,)),)
