"""Turns: workers read one of two copies of the masters, and write to one of two rows.

Where an update is made while workers compute (``Needs.delay``), nobody may read what is being
written. The update steps the masters, from the gradients in one row of each worker; meanwhile
workers read one buffer with a copy of the masters, and write the next gradient to their other row.
The update's result then goes to the other buffer, which no worker reads before its next release.

| | buffer that is read | the other one | rows of the update, of the next gradient |
| --- | --- | --- | --- |
| all have been released with update t | t | is written | 0, 1 |
| update t + 1 is made | t | t + 1 | |
| all have been released again | t + 1 | is written | 1, 0 |

With ``extrapolates`` the other buffer gets the masters and their last movement once more, which is
where they will be, about, when the gradient that is computed there is applied. (Chen, Yang, Cheng,
*Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform*, 2018,
arXiv:1809.02839, section 3.2, predict weights so, from the momentum.)

With a ``codec`` it gets what workers have read before, and the encoded movement from there to the
masters: all workers of all hosts compute with the same parameters, and what rounding has left out
of one movement is in the next (error feedback), because that begins where the last one has led.

Where all parameters lie on devices, no worker reads host memory while it computes, so there are no
buffers: each worker copies the masters to spare memory of its device as the update steps them, and
hands its next gradient over when it has them all (:mod:`hybridtrain.engine.worker.device.staged`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

Buffers = Mapping[torch.dtype, torch.Tensor]  # dtype -> (P,)


class Moves(Protocol):
    """Changes of the masters."""

    n_changes: int

    def bring(self, worker: int) -> None:
        """Update the copy of this number from the masters."""


class Encoding(Protocol):
    """Encodes a movement; see :class:`hybridtrain.engine.exchanges.compression.Codec`."""

    def encode(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Numbers to bytes."""

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """Bytes to numbers."""


class Turning(NamedTuple):
    """What the buffers get.

    ``extrapolates``: where the masters will be, about. ``codec``: encodes the movement of what
    workers read. ``on_devices``: there are no buffers, as all workers copy the masters to devices.
    """

    extrapolates: bool = False
    codec: Encoding | None = None
    on_devices: bool = False


class Turns:
    """The present turn, in shared memory: the server moves it on, all others read it.

    Legend: P elements of one dtype's buffer.

    Args:
        words: (N_WORDS,) int64, zero at first.
        masters: the master buffers.
        copies: the two buffers that workers read; none, if devices have copies of their own.
        moves: brings the masters to a copy.
        turning: what the buffers get.
    """

    N_WORDS = 6
    _READ = 0
    _NEWEST = 1
    _NEXT_ROW = 2
    _DUE = 3
    _APART = 4  # the last of both buffers
    MASTERS = 2  # the number of the masters, beside those of both buffers

    def __init__(
        self,
        words: memoryview,
        masters: Buffers,
        copies: Sequence[Buffers],
        moves: Moves,
        turning: Turning,
    ) -> None:
        self._words, self._masters, self._copies, self._moves = words, masters, copies, moves
        self.row = 0  # of each worker: of the update here, of the next gradient in a worker
        self._changes = -1  # of the masters, when they were copied last
        self._extrapolates, self._codec, _ = turning
        self.encoded: dict[torch.dtype, torch.Tensor] = {}  # the last movement, as it travels
        self.states = [0, 0]  # how often each buffer has been written to
        self._before: dict[torch.dtype, torch.Tensor] = {}  # the masters before the last update

    @property
    def read(self) -> int:
        """The number of the buffer that workers read."""
        return self._words[self._READ]

    @property
    def behind(self) -> bool:
        """Whether workers read parameters without the update that was made last, or is due."""
        return self.read != self._words[self._NEWEST]

    @property
    def due(self) -> bool:
        """Whether the masters lack an update, whose workers have been released."""
        return bool(self._words[self._DUE])

    def take(self) -> None:
        """By a worker, which is released: the next gradient goes to this row."""
        self.row = self._words[self._NEXT_ROW]

    @property
    def encodes(self) -> bool:
        """Whether movements are encoded."""
        return self._codec is not None

    @property
    def state(self) -> tuple[int, ...]:
        """All that is shared."""
        return tuple(self._words)

    def follow(self, state: tuple[int, ...]) -> None:
        """By the relay of another host: the turn is the server's, whose buffers have come."""
        for place, word in enumerate(state):
            self._words[place] = word
        self.take()

    # ---- by the server --------------------------------------------------------------------------

    def show_newest(self) -> None:
        """All workers wait: the buffer that they read has the newest masters afterwards."""
        now = self._read_other()
        if self._changes != self._moves.n_changes or self.is_apart(now):
            self._bring(now)

    def begin(self) -> None:
        """Workers are released; an update follows, of the rows of ``row``."""
        self._words[self._NEWEST] = 1 - self._read_other()
        if self._extrapolates and self.is_apart(self.read) and not self._before:  # resumed
            self._before = {dtype: each.clone() for dtype, each in self._masters.items()}
        self._words[self._NEXT_ROW] = 1 - self.row
        self._words[self._DUE] = 1

    def end(self) -> None:
        """The update is made; it goes to the buffer that no worker reads."""
        other = 1 - self.read
        if self._extrapolates or self._codec is not None:
            self._show_apart(other)
        else:
            self._bring(other)
        self.row = self._words[self._NEXT_ROW]
        self._words[self._DUE] = 0

    def _read_other(self) -> int:
        """Workers read the newest buffer from now on; returns its number."""
        self._words[self._READ] = now = self._words[self._NEWEST]
        return now

    def _bring(self, buffer: int) -> None:
        if not self._copies:
            return
        self._moves.bring(buffer)
        self._is_written(buffer, apart=0)

    def is_apart(self, buffer: int) -> bool:
        """Whether the buffer has not the masters, but where they will be, or rounded ones."""
        return bool(self._words[self._APART + buffer])

    @torch.no_grad()
    def _show_apart(self, buffer: int) -> None:
        """The buffer gets what workers are to read, which is not quite the masters."""
        apart = self.is_apart(self.read)
        for dtype, masters in self._masters.items():
            read, target = self._copies[self.read][dtype], self._copies[buffer][dtype]
            if self._extrapolates:
                before = self._before[dtype] if apart else read
                torch.sub(masters, before, out=target)
                target.add_(masters)
                self._before.setdefault(dtype, torch.empty_like(masters)).copy_(masters)
            else:
                target.copy_(masters)
            if self._codec is not None and dtype.is_floating_point:
                self.encoded[dtype] = self._codec.encode(target.sub_(read), dtype)
        if self.encoded:
            self.decode(buffer, self.encoded)
        self._is_written(buffer, apart=1)

    @torch.no_grad()
    def decode(self, buffer: int, encoded: Mapping[torch.dtype, torch.Tensor]) -> None:
        """The buffer gets what workers have read before, and its movement."""
        assert self._codec is not None, "it is encoded"
        for dtype, each in encoded.items():
            target = self._copies[buffer][dtype]
            self._codec.decode(each, target)
            target.add_(self._copies[1 - buffer][dtype])

    def _is_written(self, buffer: int, apart: int) -> None:
        self._changes, self._words[self._APART + buffer] = self._moves.n_changes, apart
        self.states[buffer] += 1

    # ---- a resumed run --------------------------------------------------------------------------

    def held(self) -> list[int]:
        """The numbers of the buffers that a resumed run needs: that which is read, and perhaps the
        other one, which lacks nothing but its update."""
        other = 1 - self.read
        return [self.read, *([other] if self.is_apart(other) else [])] if self.behind else []

    def resume(self, n_held: int) -> list[Buffers]:
        """Training goes on one update behind; returns as many buffers as it had, to be filled, if
        there are buffers.

        Each worker does so, alike, before its first step.
        """
        read, other = self.read, 1 - self.read
        if self._copies:
            self._moves.bring(other)
        self._words[self._NEWEST] = other
        self._words[self._APART + read] = self._words[self._APART + other] = n_held - 1
        return [self._copies[buffer] for buffer in (read, other)[:n_held] if self._copies]
