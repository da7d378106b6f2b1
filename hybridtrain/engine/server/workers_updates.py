"""The server's part of updates that workers make without it.

In lock-step these are rounds, which the server counts afterwards. Where workers make updates one by
one, each reports its own, and the server holds their lock while it handles an event.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hybridtrain.engine.memory import Store, UpdateMaker
from hybridtrain.engine.memory.arena import LentState
from hybridtrain.engine.protocol.kernel_lock import Frees
from hybridtrain.engine.protocol.locked_steps import LockedSteps
from hybridtrain.engine.protocol.shared_round import SharedRound
from hybridtrain.engine.server.handed_over import HandedOver
from hybridtrain.engine.server.run_statistics import RunStatistics
from hybridtrain.engine.server.shared_parameters import locked_steps_of, round_of
from hybridtrain.engine.updates import Optimizers
from hybridtrain.engine.updates.flat.lent_state import Lender


class WorkersUpdates:
    """Counts and stops the workers' updates of one run.

    Args:
        statistics: counts.
        handed_over: counts bytes.
    """

    def __init__(self, statistics: RunStatistics, handed_over: HandedOver) -> None:
        self._statistics, self._handed_over = statistics, handed_over
        self._store: Store | None = None
        self._round: SharedRound | None = None
        self._locked: LockedSteps | None = None
        self._lender: Lender | None = None
        self._frees: Frees = lambda pid, for_s: None

    def free_by(self, frees: Frees) -> None:
        """Call ``frees`` with a worker process that takes long in an update."""
        self._frees = frees

    def lend(self, store: Store | None, optimizers: Optimizers, number: int) -> LentState | None:
        """The places of the optimizer's state; ``None``: workers may not step it."""
        if store is None or not store.maker.borrows or len(optimizers.updates) != 1:
            return None
        if store is not self._store:
            self._store, self._lender = store, Lender(store)
            if store.maker is UpdateMaker.LAST_WORKER:
                self._round = round_of(store)
            else:
                self._locked = locked_steps_of(store)
        assert self._lender is not None, "there is a store"
        return self._lender.lend(optimizers.updates[number])

    # ---- rounds ---------------------------------------------------------------------------------

    def look(self) -> None:
        """Count the rounds made since; called before every event."""
        if self._round is None or not self._round.used:
            return
        made = self._round.look(self._statistics.version)
        if made is not None:
            self._statistics.made_together(made)
            self._handed_over.count(made.n * self._statistics.n_workers)

    def take_over(self) -> None:
        """A worker is gone: the server makes the rounds from here on."""
        if self._round is not None and self._lender is not None and self._round.used:
            self._round.call_off_next(self._statistics.version, self._lender.restore, self._frees)

    def free(self) -> None:
        """Some time has passed: a worker may have been stopped within a round."""
        if self._round is not None and self._round.used:
            self._round.free(self._frees)

    # ---- one by one -----------------------------------------------------------------------------

    @property
    def one_by_one(self) -> bool:
        """Whether workers make updates one by one."""
        return self._locked is not None and self._lender is not None and self._lender.lends

    @contextmanager
    def stopped(self, optimizers: Optimizers) -> Iterator[None]:
        """Hold the lock, so that no worker makes an update."""
        locked, lender, store = self._locked, self._lender, self._store
        assert locked is not None and lender is not None and store is not None, "they make some"
        assert store.step_counts is not None, "they count them"
        with locked.stopped(lender.restore, self._frees):
            store.step_counts.look()
            yield
            if lender.is_outdated(optimizers.updates):
                locked.renew()
