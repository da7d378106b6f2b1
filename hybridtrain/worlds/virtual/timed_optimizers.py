"""Optimizers whose steps take time: what they come to is kept aside until the time has passed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from hybridtrain.protocol.messages import Push
from hybridtrain.updates import Pending
from hybridtrain.updates.optimizer_set import Optimizers, Stepped

Values = Mapping[int, torch.Tensor]  # number of a parameter -> its value


class TimedOptimizers(Optimizers):
    """Steps at once, and moves the masters when the world says that the update has ended.

    The optimizers' states move at once; nobody looks at them in virtual time.
    """

    def step(self, pushes: Mapping[int, Push], number: int | None = None) -> Stepped | Pending:
        number = next(iter(pushes.values())).optimizer if number is None else number
        holds, before = number in self.holding, self._copied(number)
        stepped = super().step(pushes, number)
        if not isinstance(stepped, Stepped) or not (stepped.workers or holds):
            return stepped  # there was nothing to do
        after = self._copied(number)
        self._put(before)
        return Pending(partial(self._finish, stepped, after))

    def _finish(self, stepped: Stepped, after: Values) -> Stepped:
        self._put(after)
        return stepped

    def _copied(self, number: int) -> Values:
        """What the masters of this optimizer are."""
        assert self._place is not None, "what steps has a store"
        store = self._place[0]
        numbers = [each for group in self.updates[number].members for each in group]
        return {each: store.master(store.layout.slots[each]).clone() for each in numbers}

    def _put(self, values: Values) -> None:
        assert self._place is not None, "what steps has a store"
        store = self._place[0]
        store.moves.all_of(values)  # some may be read before they are there
        for number, value in values.items():
            store.master(store.layout.slots[number]).copy_(value)
