"""Rounds: who has pushed, when that counts, and who may go on.

The part of the server between the policy, which decides, and the optimizers, which step. Whatever a
round cannot accept is raised; the server then refuses all who wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from hybridtrain.averaging import Averaging
from hybridtrain.errors import UserError
from hybridtrain.events import Apply, Fact, Joined, Left, Parked, Pushed, Release
from hybridtrain.ledger import Ledger
from hybridtrain.memory import Store
from hybridtrain.messages import Average, Push, Released, Reply, Writes
from hybridtrain.policies import Policy
from hybridtrain.update import Optimizers, Stepped

Replies = list[tuple[int, Reply]]


class Rounds:
    """Collects pushes and does what the policy orders.

    Args:
        policy: when a contribution counts, and who may go on.
        ledger: counts.
        workers: all that are there from the start.
    """

    def __init__(self, policy: Policy, ledger: Ledger, workers: Iterable[int]) -> None:
        workers = sorted(workers)
        self.store: Store | None = None
        self.optimizers = Optimizers()
        self.broken = False  # somebody has stopped: no round can be a whole one any more
        self._policy, self._ledger = policy, ledger
        self._averaging = Averaging(workers)
        self._pushes: dict[int, Push] = {}
        self._stepped = Stepped(())  # in the round that ends
        for worker in workers:
            policy.on(Joined(worker))

    @property
    def waiting(self) -> frozenset[int]:
        """Who waits for a release or a mean."""
        return self._averaging.waiting | self._pushes.keys()

    def push(self, worker: int, push: Push) -> Replies:
        """The worker's contribution lies in its row.

        Raises:
            UserError: if the push makes no sense; ``OptimizerFailed`` if the step failed.
        """
        if (reason := self._objection(worker, push)) is not None:
            raise UserError(reason)
        self._pushes[worker] = push
        # A mini-batch that several optimizers or evaluations use is counted by the first of them.
        first = push.optimizer == 0 and self.optimizers.under_way is None
        samples = push.weight if push.samples is None else push.samples
        self._ledger.pushed(worker, samples if first else 0.0, push.fault)
        freed: Replies = [*self._averaging.busy(worker, self.store)]
        return freed + self._obey(Pushed(worker))

    def average(self, worker: int, request: Average) -> Replies:
        """The worker wants the mean of all gradients before it pushes."""
        assert self.store is not None, "parameters are shared before gradients are averaged"
        return [*self._averaging.ask(worker, request, self.store)]

    def park(self, worker: int) -> Replies:
        """The worker waits for something else; who waits for it in a round need not any longer."""
        freed: Replies = [*self._averaging.busy(worker, self.store)]
        return freed + self._obey(Parked(worker))

    def join(self, worker: int) -> None:
        """The worker computes again."""
        self._policy.on(Joined(worker))
        self._averaging.back(worker)

    def admit(self, worker: int) -> Replies:
        """The worker is there, with the newest parameters."""
        self.join(worker)
        return [self._release(worker)]

    def lost(self, worker: int) -> Replies:
        """The worker is gone, with whatever it had not pushed."""
        self._pushes.pop(worker, None)
        self._ledger.left(worker)
        freed: Replies = [*self._averaging.left(worker, self.store)]
        return freed + self._obey(Left(worker))

    def refresh(self, worker: int) -> None:
        """Bring the worker's own parameters up to date."""
        if self.store is not None:
            self.store.refresh(worker)
        self._ledger.read(worker)

    def take(self, worker: int, writes: Writes) -> None:
        """User code in the worker has written to parameters itself."""
        if writes:
            assert self.store is not None, "parameters are shared before they are written to"
            self.store.take(worker, writes)

    def dissolve(self) -> None:
        """Forget who has pushed or asked."""
        self._pushes.clear()
        self._averaging.dissolve()

    def _objection(self, worker: int, push: Push) -> str | None:
        """Why this push makes no sense, if so."""
        other = next((p.optimizer for p in self._pushes.values()), push.optimizer)
        if self._policy.lockstep and other != push.optimizer:
            return (
                f"worker {worker} steps optimizer {push.optimizer} while others step optimizer "
                f"{other}; in lock-step all workers must step their optimizers in the same order"
            )
        if (reason := self.optimizers.objection(worker, push)) is not None:
            return reason
        return self._disagreement(worker, push) if self._policy.lockstep else None

    def _disagreement(self, worker: int, push: Push) -> str | None:
        """In lock-step everybody's optimizer must have the same parameters."""
        for other, pushed in islice(self._pushes.items(), 1):  # who agree among themselves
            members = self.optimizers.members(worker, push)
            if self.optimizers.members(other, pushed) != members:
                return (
                    f"the parameter groups of optimizer {push.optimizer} differ between worker "
                    f"{worker} and worker {other}; unfreeze, add or remove parameters in the same "
                    "step of all workers (the same epoch, the same global_step)"
                )
        return None

    def _obey(self, fact: Fact) -> Replies:
        if self.broken:
            return []
        replies: Replies = []
        for order in self._policy.on(fact):
            match order:
                case Apply(workers):
                    self._apply(workers)
                case Release(workers):
                    replies += [self._release(worker) for worker in workers]
        return replies

    def _apply(self, workers: tuple[int, ...]) -> None:
        pushes = {worker: self._pushes[worker] for worker in workers}
        for worker, push in pushes.items():
            self.take(worker, push.writes)
        self._stepped = self.optimizers.step(pushes)
        if self._stepped.again is None:
            self._ledger.updated(self._stepped.workers)

    def _release(self, worker: int) -> tuple[int, Reply]:
        self._pushes.pop(worker, None)
        self._averaging.back(worker)
        self.refresh(worker)
        self._ledger.released(worker)
        again, news = self._stepped.again, self._stepped.news
        cleared = again is not None and again.cleared
        return worker, Released(self._ledger.version, again is not None, cleared, news)
