"""The contributions of workers: count their bytes, and decode encoded ones."""

from __future__ import annotations

from math import prod

import torch

from hybridtrain.engine.exchanges.compression import Codec, decode
from hybridtrain.engine.memory import Packed, Store
from hybridtrain.engine.protocol.messages import OWN_STEPS, Push, Row
from hybridtrain.engine.server.run_statistics import RunStatistics
from hybridtrain.engine.updates import Optimizers
from hybridtrain.engine.updates.groups import Members


class HandedOver:
    """Counts the bytes of contributions, and decodes them.

    Args:
        codec: of encoded contributions, if any.
        statistics: holds the counts.
    """

    def __init__(self, codec: Codec | None, statistics: RunStatistics) -> None:
        self._codec, self._statistics = codec, statistics
        self._whole: dict[int, tuple[Members, int]] = {}  # optimizer -> its groups, their bytes

    def take(self, worker: int, push: Push, store: Store | None, optimizers: Optimizers) -> None:
        """Count a push, and decode its row in place if it is encoded."""
        own = isinstance(push, OWN_STEPS)
        elsewhere = push.row.within not in (None, worker)
        if store is None or push.weight <= 0 or (own and store.lock_free) or elsewhere:
            return
        members = optimizers.members(worker, push)
        known = self._whole.get(push.optimizer)
        if known is None or known[0] is not members:
            whole = sum(_place_bytes(store, number) for group in members for number in group)
            known = self._whole[push.optimizer] = members, whole
        n_bytes, row = known[1], push.row
        if row.absent or row.packed:
            n_bytes -= sum(_place_bytes(store, number) for number in row.absent)
            n_bytes -= sum(_unused_bytes(store, packed) for packed in row.packed)
        if row.encoded is None:
            self._statistics.count_bytes(n_bytes)
        else:
            self._statistics.count_bytes(row.encoded, saved=n_bytes - row.encoded)
            self._decode(worker, row, members, store)

    def count(self, n: int) -> None:
        """Count ``n`` whole gradients for the only optimizer."""
        self._statistics.count_bytes(n * sum(whole for _, whole in self._whole.values()))

    def take_for_mean(self, worker: int, row: Row, store: Store) -> None:
        """A gradient is to be averaged; decoded, it lies at its places afterwards."""
        if row.encoded is not None:
            everything = (tuple(range(len(store.layout.slots))),)
            self._decode(worker, row, everything, store)
            for number in row.absent:
                store.gradient(store.row_of(worker), store.layout.slots[number]).zero_()

    @torch.no_grad()
    def _decode(self, worker: int, row: Row, members: Members, store: Store) -> None:
        assert self._codec is not None and row.encoded is not None, "it is encoded"
        absent = frozenset(row.absent)
        numbers = [n for group in members for n in group if n not in absent]
        place, slots = store.row_of(worker), store.layout.slots
        encoded = store.front(place)[: row.encoded].clone()  # decoding overwrites the row
        decode(self._codec, encoded, [store.gradient(place, slots[n]) for n in numbers])


def _place_bytes(store: Store, number: int) -> int:
    """The size of a parameter's place in a row."""
    slot = store.layout.slots[number]
    return slot.numel * store.layout.travels_as(slot.dtype).itemsize


def _unused_bytes(store: Store, packed: Packed) -> int:
    """The unused bytes of a sparse gradient's place, less its indices, sent in the message."""
    slot = store.layout.slots[packed.number]
    item = store.layout.travels_as(slot.dtype).itemsize
    used = prod(packed.shape_in(slot.shape)) * item
    return _place_bytes(store, packed.number) - used - len(packed.indices)
