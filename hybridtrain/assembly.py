"""What all workers decide together: who knows what, where parameters lie, what steps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridtrain.events import Began
from hybridtrain.ledger import Ledger
from hybridtrain.memory import Store
from hybridtrain.messages import Done, Gather, Gathered, Install, Reply, Request, Share, Shared
from hybridtrain.rounds import Rounds
from hybridtrain.sharing import shared_store
from hybridtrain.staff import Staff
from hybridtrain.update import Optimizers, load_updates
from hybridtrain.update.late import LateGradients
from hybridtrain.update.pool import Pool


@dataclass
class Assembly:
    """Does what a meeting has come to.

    Args:
        rounds: step the parameters.
        staff: who is there.
        ledger: counts.
        pool: does the arithmetic.
        late: what is done about late gradients.
    """

    rounds: Rounds
    staff: Staff
    ledger: Ledger
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
                return Gathered(payloads, tuple(workers), self.staff.left)
            case Share():
                shares = [r for r in requests if isinstance(r, Share)]
                return self._share(dict(zip(workers, shares, strict=True)))
            case Install():
                return self._install(workers, requests[0])
        raise AssertionError(requests[0])

    def _share(self, shares: dict[int, Share]) -> Shared:
        self.rounds.store = store = shared_store(shares, self.ledger.n_workers, self.rounds.regime)
        return Shared(store.arena.n_bytes)

    def _install(self, workers: list[int], install: Install) -> Done:
        store = self.rounds.store
        assert store is not None, "parameters are shared before optimizers are installed"
        known = self.rounds.optimizers.updates
        updates = load_updates(install.optimizers, store, self.pool, known)
        if not known:
            self.ledger.start(install.version)
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
