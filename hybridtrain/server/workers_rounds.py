"""Rounds that workers have made among themselves: what the server has to know of them."""

from __future__ import annotations

from hybridtrain.memory import Store
from hybridtrain.memory.lending import LentState
from hybridtrain.protocol.shared_round import SharedRound
from hybridtrain.server.handed_over import HandedOver
from hybridtrain.server.run_statistics import RunStatistics
from hybridtrain.server.shared_parameters import round_of
from hybridtrain.updates import Optimizers
from hybridtrain.updates.flat.lent_state import Lender

_PATIENCE_S = 0.5  # with a worker that makes an update, and may be stopped


class WorkersRounds:
    """Counts them, and takes the next one over when somebody is gone.

    Args:
        statistics: counts.
        handed_over: counts bytes.
    """

    def __init__(self, statistics: RunStatistics, handed_over: HandedOver) -> None:
        self._statistics, self._handed_over = statistics, handed_over
        self._store: Store | None = None
        self._shared: SharedRound | None = None
        self._lender: Lender | None = None

    def lend(self, store: Store | None, optimizers: Optimizers, number: int) -> LentState | None:
        """Where the optimizer's state lies, for workers that step it; ``None``: they do not."""
        if store is None or len(optimizers.updates) != 1:
            return None
        if store is not self._store:
            self._store, self._shared, self._lender = store, round_of(store), Lender(store)
        assert self._lender is not None, "there is a store"
        return None if self._shared is None else self._lender.lend(optimizers.updates[number])

    def look(self) -> None:
        """Whatever has happened, those made before come first."""
        if self._shared is None or not self._shared.used:
            return
        made = self._shared.look(self._statistics.version)
        if made is not None:
            self._statistics.made_together(made)
            self._handed_over.count(made.n * self._statistics.n_workers)

    def take_over(self) -> None:
        """Somebody is gone: the server makes the rounds from here on."""
        if self._shared is not None and self._lender is not None and self._shared.used:
            self._shared.call_off_next(self._statistics.version, self._lender.restore, _PATIENCE_S)
