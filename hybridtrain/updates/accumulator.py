"""Gradient accumulation on the server, for policies that release workers before the update.

Legend: P elements of one dtype's buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hybridtrain.errors import UserError
from hybridtrain.memory import Packed, Store, pack, unpack
from hybridtrain.protocol.messages import Clip, Push
from hybridtrain.updates.base import Contribution
from hybridtrain.updates.flat.reduce import merge_mixed


@dataclass
class Accumulator:
    """The weighted sum of one optimizer's gradients.

    Args:
        store: the shared rows; the last one holds the sum.
        numbers: the optimizer's parameters.
    """

    store: Store
    numbers: frozenset[int]
    weight: float = 0.0
    count: float = 0.0  # the weights, each times its staleness factor
    clip: Clip | None = None
    _present: set[int] = field(default_factory=set)
    _packed: dict[int, Packed] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, worker: int, push: Push, absent: frozenset[int], factor: float = 1.0) -> None:
        """Add the worker's row, times its weight and this factor."""
        count = push.weight * factor
        whole = len(self.numbers) == len(self.store.layout.slots)
        dense = whole and not absent and not push.packed and not self._packed
        if dense and len(self._present) in (0, len(self.numbers)):
            self._add_rows(worker, count)
        else:
            packed = {each.number: each for each in push.packed}
            for number in self.numbers - absent:
                self._add_one(worker, number, packed.get(number), count)
        self._present |= self.numbers - absent
        self.weight += push.weight
        self.count += count
        self.clip = push.clip or self.clip

    def _add_rows(self, worker: int, weight: float) -> None:
        """Add whole buffers: no gradient is absent or sparse."""
        for dtype, held in self.store.gradients[self.store.held].items():  # (P,)
            row = self.store.gradients[worker][dtype]
            if self._present:
                held.add_(row, alpha=weight)
            else:
                held.copy_(row).mul_(weight)  # the row may be narrower

    def _add_one(self, worker: int, number: int, packed: Packed | None, weight: float) -> None:
        slot = self.store.layout.slots[number]
        row, place = self.store.gradient(worker, slot), self.store.gradient(self.store.held, slot)
        parts, shares = [row if packed is None else unpack(packed, row)], [weight]
        if number in self._present:
            known = self._packed.pop(number, None)
            parts.insert(0, place.clone() if known is None else unpack(known, place.clone()))
            shares.insert(0, 1.0)
        merged = merge_mixed(parts, shares, lambda: place)
        if merged.is_sparse:
            self._packed[number] = pack(number, merged.coalesce(), place)
        elif merged.data_ptr() != place.data_ptr():
            place.copy_(merged)

    def contribution(self, total: float) -> Contribution:
        """The sum as a contribution; ``total``: the weight of all contributions of the update."""
        return Contribution(
            self.store.held, 1.0 / total, self.numbers - self._present, dict(self._packed)
        )


def check_held(held: dict[int, Accumulator], number: int, numbers: frozenset[int]) -> None:
    """Refuse to accumulate for two optimizers of the same parameters.

    Raises:
        UserError: naming them.
    """
    for other, each in held.items():
        if other != number and each.numbers & numbers:
            raise UserError(
                f"optimizers {other} and {number} step the same parameters, whose gradients cannot "
                "be put aside for both; use a policy in which workers wait for their update "
                "(hybrid, backup, k_async) or async"
            )
