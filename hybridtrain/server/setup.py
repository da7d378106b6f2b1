"""What all workers decide together: who knows what, where parameters lie, what steps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridtrain.memory import Store
from hybridtrain.protocol.facts import Began
from hybridtrain.protocol.messages import (
    Done,
    Gather,
    Gathered,
    Install,
    Reply,
    Request,
    Share,
    Shared,
)
from hybridtrain.server.membership import Membership
from hybridtrain.server.rounds import Rounds
from hybridtrain.server.run_statistics import RunStatistics
from hybridtrain.server.shared_parameters import shared_store
from hybridtrain.updates import Optimizers, load_updates
from hybridtrain.updates.staleness.late_gradients import LateGradients
from hybridtrain.updates.thread_pool import Pool


@dataclass
class Setup:
    """Does what a meeting has come to.

    Args:
        rounds: step the parameters.
        membership: who is there.
        statistics: counts.
        pool: does the arithmetic.
        late: what is done about late gradients.
    """

    rounds: Rounds
    membership: Membership
    statistics: RunStatistics
    pool: Pool
    late: LateGradients

    def conclude(self, workers: list[int], requests: Sequence[Request]) -> Reply:
        """The answer for all ``workers``, who have brought these ``requests``, all of one kind.

        Raises:
            UserError: if what they want does not fit together.
        """
        match requests[0]:
            case Gather():
                payloads = tuple(r.payload for r in requests if isinstance(r, Gather))
                return Gathered(payloads, tuple(workers), self.membership.left)
            case Share():
                shares = [r for r in requests if isinstance(r, Share)]
                return self._share(dict(zip(workers, shares, strict=True)))
            case Install():
                return self._install(workers, requests[0])
        raise AssertionError(requests[0])

    def _share(self, shares: dict[int, Share]) -> Shared:
        self.rounds.store = store = shared_store(
            shares, self.statistics.n_workers, self.rounds.requirements
        )
        return Shared(store.arena.n_bytes)

    def _install(self, workers: list[int], install: Install) -> Done:
        store = self.rounds.store
        assert store is not None, "parameters are shared before optimizers are installed"
        known = self.rounds.optimizers.updates
        if not known and store.made is not None:
            store.made.begin(install.version)
        updates = load_updates(install.optimizers, store, self.pool, known)
        if not known:
            self.statistics.start(install.version)
            self.rounds.tell(Began(install.version))
            self.rounds.last = install.last
        self.adopt(store, Optimizers(updates, store, self.pool))
        for worker in workers:
            self.rounds.refresh(worker)
        return Done()

    def adopt(self, store: Store | None, optimizers: Optimizers) -> None:
        """Step these from now on. Without a store there are no parameters, only time passes."""
        self.rounds.store, self.rounds.optimizers = store, optimizers
        optimizers.late = self.late.begun(store)
