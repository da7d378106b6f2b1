"""A worker's side of rounds in shared memory: it comes, and makes the update if it is the last.

The update is the server's own (:mod:`hybridtrain.updates.flat`), with its state where all can map
it. After any round that the server has made, the state may be another, and is borrowed anew.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from hybridtrain.memory import Arena, Store
from hybridtrain.memory.lending import LentState
from hybridtrain.protocol.messages import Push
from hybridtrain.protocol.shared_round import Arrival, Met, SharedRound
from hybridtrain.server.shared_parameters import round_of
from hybridtrain.updates.contribution import Contribution
from hybridtrain.updates.flat.lent_state import LentFlatUpdate, borrow
from hybridtrain.updates.groups import Groups

Found = Callable[[int], tuple[LentState, dict[int, Arena]] | None]
Stepped = Callable[[], Sequence[tuple[torch.optim.Optimizer, tuple[int, ...]]]]

PATIENCE_S = 0.1  # then the server is to know who waits for whom


class Bells(Protocol):
    """How workers that meet wake one another."""

    def ring(self) -> None:
        """For all others."""
        ...

    def wait(self, for_s: float) -> None:
        """Until somebody has rung, or the server has said something; not longer than so."""
        ...


class RoundMaker:
    """Of one worker.

    Args:
        worker: its number.
        shared: the round.
        bells: the others hear of a round by these.
        borrow: what steps the masters; ``None`` if it is not to be had.
    """

    def __init__(
        self,
        worker: int,
        shared: SharedRound,
        bells: Bells,
        borrow: Callable[[], LentFlatUpdate | None],
    ) -> None:
        self.optimizer = 0  # the number of the only one
        self.shared, self.bells = shared, bells
        self._worker, self._borrow = worker, borrow
        self._lent: LentFlatUpdate | None = None
        self._weights: Sequence[float] = ()
        self._contributions: list[Contribution] = []
        self._clip: Any = None
        self._owed: Groups | None = None  # what the server has not heard of hyper-parameters
        self._begun = False  # a step has been made
        self._never = False  # what steps them is not lent

    @classmethod
    def of(
        cls, worker: int, bells: Bells | None, store: Store, stepped: Stepped, found: Found
    ) -> RoundMaker | None:
        """For this worker, where all may meet. ``stepped``: the optimizers, each with the slot
        numbers of its parameters; ``found``: where the state of one lies.
        """
        shared = round_of(store)
        if shared is None or bells is None:
            return None

        def borrowed() -> LentFlatUpdate | None:
            now = stepped()
            state = found(0) if len(now) == 1 else None
            return None if state is None else borrow(*now[0], store, *state)

        return cls(worker, shared, bells, borrowed)

    def come(self, push: Push, number: int, whole: bool) -> bool:
        """To this round, with a gradient that lies in the row; else the push is to be sent.

        ``whole``: all workers are there.
        """
        if self._never or not self.shared.may_come(number):
            self._lent, self._begun = None, True  # the server may step something else
            return False
        if not (whole and _is_usual(push) and self._is_ready() and self._takes(push)):
            self._begun = True
            self.leave(number)
            return False
        assert self._lent is not None, "it is ready"
        samples = push.weight if push.samples is None else push.samples
        told = push.groups is not None or push.clip is not None
        token = zlib.crc32(pickle.dumps((push.groups, push.clip))) if told else 0
        self._clip = push.clip
        if self.shared.is_first(number):
            self._lent.keep()
        arrival = Arrival(push.weight, samples, token)
        met = self.shared.come(self._worker, number, arrival, self._step)
        if met is Met.CALLED_OFF:
            self.leave(number)
        elif met is Met.MADE:
            self.bells.ring()
        return met is not Met.CALLED_OFF

    def _is_ready(self) -> bool:
        """What a first step keeps is there behind it."""
        if self._lent is None and self._begun:
            self._lent = self._borrow()
            self._never = self._lent is None
        return self._lent is not None

    def _takes(self, push: Push) -> bool:
        """Whether the hyper-parameters are such that the state is the same; they are known then."""
        if push.groups is None:
            return True
        assert self._lent is not None, "it is ready"
        if not self._lent.set_groups(push.groups):
            return False
        self._owed = _merged(self._owed, push.groups)
        return True

    def leave(self, number: int, waits: bool = True) -> bool:
        """The server makes this round, unless it is made here already; who waits in it hears of it.

        Raises:
            BlockingIOError: if somebody makes it now, and the caller does not want to wait.
        """
        if not self.shared.call_off(number, self._restore, waits):
            return False
        self._lent = None
        if not self.shared.is_first(number):
            self.bells.ring()
        return True

    def _restore(self) -> None:
        assert self._lent is not None, "all who come have it, and all have come"
        self._lent.restore()

    def begin(self) -> None:
        """The server has got other optimizers."""
        self._lent, self._begun, self._never = None, False, False

    def with_owed(self, groups: Groups | None) -> Groups | None:
        """All that the server has not been told, these included; it is told now."""
        owed, self._owed = self._owed, None
        return groups if owed is None else _merged(owed, groups)

    @torch.no_grad()
    def _step(self, weights: Sequence[float]) -> None:
        """As the server would, denormal numbers included."""
        assert self._lent is not None, "it is ready"
        if weights != self._weights:
            total = sum(weights)
            self._weights = weights
            self._contributions = [
                Contribution(worker, weight / total) for worker, weight in enumerate(weights)
            ]
        torch.set_flush_denormal(False)
        try:
            self._lent.update.step(self._contributions, self._clip)
        finally:
            torch.set_flush_denormal(True)


def _merged(before: Groups | None, after: Groups | None) -> Groups | None:
    if before is None or after is None:
        return after if before is None else before
    return tuple({**old, **new} for old, new in zip(before, after, strict=True))


def _is_usual(push: Push) -> bool:
    """Whether it is a whole gradient, and nothing else is to be said."""
    number, weight, samples = push.optimizer, push.weight, push.samples
    plain = Push(number, weight, groups=push.groups, clip=push.clip, samples=samples)
    return weight > 0 and push == plain
