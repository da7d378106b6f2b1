"""Checksums of messages, gradients, parameters and optimizer states, for records."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch

from hybridtrain.engine.memory import Store
from hybridtrain.engine.memory.sparse_rows import Packed
from hybridtrain.engine.protocol.messages import (
    Average,
    Begin,
    Claim,
    Draw,
    Gather,
    GradientPush,
    Install,
    MadeStep,
    Note,
    Pull,
    Push,
    Request,
    Share,
)

_WHOLE_BYTES = 16 * 1024  # a smaller row is read completely
_BLOCKS, _BLOCK_BYTES = 32, 64  # of a larger one so many cache lines, evenly spread
_WRITES_BYTES = 4096
CALLED_AT = ", called at "  # in the tag of a meeting: behind it, where user code calls it


class GradientRows:
    """A sample of each worker's gradient row: 2 KiB, or all of a small one.

    Args:
        store: holds the rows.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._samples = [
            [_spread(row[dtype].view(torch.uint8).numpy()) for dtype in sorted(row, key=str)]
            for row in store.gradients
        ]

    @classmethod
    def of(cls, store: Store | None, known: GradientRows | None) -> GradientRows | None:
        """The ``known`` rows, or new ones if the store has changed."""
        if store is None or (known is not None and known.store is store):
            return known
        return cls(store)

    def print(self, worker: int, start: int) -> int:
        """The checksum ``start``, continued over the worker's sample."""
        for sample in self._samples[self.store.row_of(worker)]:
            start = crc32(sample.tobytes(), start)
        return start


def _spread(raw: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A view of some of the bytes."""
    if raw.nbytes <= _WHOLE_BYTES:
        return raw
    stride = raw.nbytes // _BLOCKS // _BLOCK_BYTES * _BLOCK_BYTES
    return np.lib.stride_tricks.as_strided(raw, (_BLOCKS, _BLOCK_BYTES), (stride, 1))


def checksum_of(message: Request | Note, worker: int, rows: GradientRows | None) -> int:
    """CRC-32 of a message: equal for equal messages of any process.

    Payloads of ``Gather`` are left out (they may contain file names or times), not their tags; of
    these the line of user code, which another comment moves.
    """
    match message:
        case Push():
            told = (*_told(message), *map(_drawn, message.draws))
            # A worker that has made the step itself computes on, and writes to the row.
            return _row(repr(told), worker, None if isinstance(message, MadeStep) else rows)
        case Average(weight, row):
            return _row(repr((weight, row.absent, _indices(row.packed))), worker, rows)
        case Gather(tag, _, patient):
            said = f"{tag.partition(CALLED_AT)[0]} {patient}"
        case Draw():
            said = repr(_drawn(message))
        case Claim(batch):
            said = repr(tuple(batch))
        case Share(layout, averaging):
            said = repr((layout.slots, averaging))
        case Install(optimizers, version):
            said = repr((len(optimizers), version))
        case Pull(writes) | Begin(writes):
            said = repr(_writes(writes))
        case _:
            return 0
    return crc32(said.encode())


def _drawn(draw: Draw) -> tuple[Any, ...]:
    places = (tuple(draw.lap), draw.spans, draw.length, draw.sizes)
    return (*places, draw.drop_last, draw.begins)


def _row(said: str, worker: int, rows: GradientRows | None) -> int:
    start = crc32(said.encode())
    return start if rows is None else rows.print(worker, start)


def _told(push: Push) -> tuple[Any, ...]:
    row, changes, numbers = push.row, push.changes, None
    if changes.groups is not None:
        numbers = [
            sorted((k, v) for k, v in group.items() if isinstance(v, int | float))
            for group in changes.groups
        ]
    written = _writes(push.writes) if push.writes else None
    clip, veto, repeatable = None, False, False
    if isinstance(push, GradientPush):
        veto, repeatable = push.veto, push.repeatable
        clip = None if push.clip is None else (push.clip.algorithm, push.clip.limit)
    state = None if changes.state is None else _state(changes.state)
    who = (push.optimizer, push.weight, push.samples, row.averaged, push.fault, veto)
    told = (*who, row.absent, numbers, changes.members, push.loss, repeatable, written)
    return (*told, clip, state, _indices(row.packed))


def _indices(packed: Sequence[Packed]) -> list[tuple[int, int, int, int]]:
    """Sampled like rows."""
    found = []
    for each in packed:
        sample = _spread(np.frombuffer(each.indices, np.uint8)).tobytes()
        found.append((each.number, each.sparse_dim, len(each.indices), crc32(sample)))
    return found


def _state(content: bytes) -> str | int:
    """Checksum of the tensors: the bytes that ``torch.save`` writes depend on the process."""
    try:
        return checksum_of_state([torch.load(io.BytesIO(content), weights_only=True)])
    except Exception:  # it contains a user's own objects
        return crc32(content)


def _writes(writes: Mapping[int, bytes]) -> list[tuple[int, int, int]]:
    return [(n, len(each), crc32(each[:_WRITES_BYTES])) for n, each in sorted(writes.items())]


# ---- of all bits, at the beginning and at the end -----------------------------------------------


def checksum_of_parameters(store: Store) -> str:
    """Checksum of all bits of the master parameters."""
    found = hashlib.blake2b(digest_size=16)
    for dtype in sorted(store.masters, key=str):
        found.update(str(dtype).encode())
        found.update(store.masters[dtype].view(torch.uint8).numpy().data)
    return found.hexdigest()


def checksum_of_state(states: Sequence[Any]) -> str:
    """Checksum of all bits of optimizer states (nested tensors, numbers and texts)."""
    found = hashlib.blake2b(digest_size=16)
    _feed(found, list(states))
    return found.hexdigest()


def _feed(found: Any, value: Any) -> None:
    match value:
        case torch.Tensor():
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            if value.layout == torch.strided:
                flat = value.detach().cpu().contiguous().flatten()
                found.update(flat.view(torch.uint8).numpy().data)
            elif value.layout == torch.sparse_coo:
                whole = value.detach().coalesce()
                _feed(found, [whole.indices(), whole.values()])
        case Mapping():
            for key in sorted(value, key=repr):
                found.update(repr(key).encode())
                _feed(found, value[key])
        case list() | tuple():
            found.update(str(len(value)).encode())
            for each in value:
                _feed(found, each)
        case int() | float() | str() | bytes() | None:
            found.update(repr(value).encode())
        case _:  # its repr may contain an address
            found.update(type(value).__qualname__.encode())
