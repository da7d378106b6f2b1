"""The shared memory of a run: master parameters and one row per worker, as flat tensors.

Legend: P elements of one dtype's buffer (padding included), W workers.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from math import prod
from typing import Any
from zlib import crc32

import numpy as np
import torch

from hybridtrain.engine.memory.arena import ALIGNMENT_BYTES, Arena, SharedArenas, align
from hybridtrain.engine.memory.counters import N_WORDS, MadeSteps, UpdateProgress
from hybridtrain.engine.memory.layout import Layout, Slot, has_sums
from hybridtrain.engine.memory.sparse_rows import Packed, Rows, Table
from hybridtrain.engine.memory.turns import Turning, Turns

# ---- rows of the masters that have changed since each worker's copy was last updated ------------
# Each free-running worker computes with a copy of the masters, which is updated after every update.
# If an update changes a parameter row by row (an embedding), only those rows are copied; a
# parameter with many outdated rows, or changed in another way, is copied as a whole.
#
# Legend: R rows, n of them, W workers.

Buffers = Mapping[torch.dtype, torch.Tensor]  # dtype -> (P,)

_MOST = 8  # with more than one outdated row in so many, the parameter is copied as a whole


class DirtyRows:
    """The outdated rows of each worker's copy.

    Args:
        layout: the places of the parameters.
        masters: the master buffers.
        copies: each worker's buffers, W of them.
    """

    def __init__(
        self, layout: Layout, masters: Buffers, copies: list[dict[torch.dtype, torch.Tensor]]
    ):
        self._layout, self._masters, self._copies = layout, masters, copies
        self._lacks: dict[int, list[list[Rows] | None]] = {}  # slot -> worker; None: all rows
        self._tables: dict[int, list[Table]] = {}  # slot -> the master's, then each copy's
        self._rest: list[tuple[torch.dtype, slice]] | None = None  # parts not copied by rows
        self.n_changes = 0  # of the masters

    def note(self, numbers: Iterable[int], moved: Mapping[int, Rows]) -> None:
        """Record an update of these parameters; of some it has ``moved`` only these rows."""
        self.n_changes += 1
        if not moved and not self._lacks:
            return
        for number in moved.keys() - self._lacks.keys():
            self._lacks[number] = [None for _ in self._copies]
            self._tables[number] = [
                self._table(each, number) for each in (self._masters, *self._copies)
            ]
            self._rest = None
        for number in self._lacks.keys() & set(numbers):
            self._add(number, moved.get(number))

    def all_of(self, numbers: Iterable[int]) -> None:
        """Record that these parameters have changed as a whole."""
        self.n_changes += 1
        for number in self._lacks.keys() & set(numbers):
            self._add(number, None)

    def _add(self, number: int, rows: Rows | None) -> None:
        workers = self._lacks[number]
        for worker, lacks in enumerate(workers):
            if rows is None or lacks is None:
                workers[worker] = None
                continue
            lacks.append(rows)
            if sum(map(len, lacks)) * _MOST > self._tables[number][0].n_rows:
                workers[worker] = None

    def bring(self, worker: int) -> None:
        """Update the worker's copy from the masters."""
        if not self._lacks:
            for dtype, masters in self._masters.items():
                self._copies[worker][dtype].copy_(masters)
            return
        if self._rest is None:
            others = set(range(len(self._layout.slots))) - self._lacks.keys()
            self._rest = list(self._layout.stretches(others))
        for dtype, part in self._rest:
            self._copies[worker][dtype][part].copy_(self._masters[dtype][part])
        for number, workers in self._lacks.items():
            master, own = self._tables[number][0], self._tables[number][1 + worker]
            lacks, workers[worker] = workers[worker], []
            if lacks is None:
                own.whole.copy_(master.whole)
            elif lacks:
                own.copy_rows(np.concatenate(lacks), master)

    def _table(self, buffers: Buffers, number: int) -> Table:
        slot: Slot = self._layout.slots[number]
        return Table(slot.view(buffers[slot.dtype][slot.offset :][: slot.numel]))


class UpdateMaker(Enum):
    """The process that applies an update.

    :func:`hybridtrain.engine.server.shared_parameters.made_store` chooses it once per run, in the
    server and in each worker alike; ``docs/ways.md`` says which one when.
    """

    SERVER = "the server"
    LAST_WORKER = "the worker that comes last"
    ONE_BY_ONE = "workers one by one"
    IN_PLACE = "workers in place"

    @property
    def borrows(self) -> bool:
        """Whether a worker steps with the server's optimizer state, under a lock."""
        return self in (UpdateMaker.LAST_WORKER, UpdateMaker.ONE_BY_ONE)

    @property
    def counts_steps(self) -> bool:
        """Whether each worker counts its own steps in shared memory."""
        return self in (UpdateMaker.ONE_BY_ONE, UpdateMaker.IN_PLACE)


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the elements, wherever and however they lie."""
    return crc32(_flat_bytes(tensor))


def elements(tensor: torch.Tensor) -> bytes:
    """A tensor's elements, in the order of its shape."""
    return _flat_bytes(tensor).tobytes()


def _flat_bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def tensor_of(elements: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The reverse of :func:`elements`."""
    return torch.frombuffer(bytearray(elements), dtype=dtype).view(tuple(shape))


class Store:
    """Flat views of one arena.

    Args:
        layout: the places of the parameters.
        n_workers: W.
        private_parameters: each worker has a copy of the parameters, for policies under which
            the masters change while workers compute.
        arena: that of another process's ``Store`` of the same shape; else a new one.
        averaging: add a row for the mean of the gradients.
        holding: add a row of gradients for contributions that are held back.
        maker: who makes the updates.
        n_words: int64 words, zero at first, of the protocol by which workers make updates.
        here: the workers of this host, if not all are: the rows of others are not reserved.
        turning: an update is made while workers compute: they read one of two copies of the
            masters in turn, and each has two rows (:mod:`hybridtrain.engine.memory.turns`).
    """

    def __init__(
        self,
        layout: Layout,
        n_workers: int,
        private_parameters: bool,
        arena: Arena | None = None,
        averaging: bool = False,
        holding: bool = False,
        maker: UpdateMaker = UpdateMaker.SERVER,
        n_words: int = 0,
        here: Collection[int] | None = None,
        turning: Turning | None = None,
    ) -> None:
        self.layout, self.n_workers = layout, n_workers
        self.private_parameters = private_parameters
        self.averaging = averaging
        self.holding, self._n_protocol_words = holding, n_words
        self.maker, self.lending = maker, SharedArenas()
        self._n_rows = n_workers * (1 if turning is None else 2)
        self.held = self._n_rows  # the number of the row for held contributions
        private = n_workers * private_parameters
        self._n_copies = private if turning is None else 2 * (not turning.on_devices)
        self._n_turn_words = 0 if turning is None else Turns.N_WORDS
        self._starts: dict[tuple[str, torch.dtype, int], int] = {}  # kind, dtype, row -> byte
        self._regions: dict[tuple[str, int], tuple[int, int]] = {}  # kind, row -> first byte, end
        n_bytes = self._place_buffers()
        self._here = range(n_workers) if here is None else here
        self.arena = arena or Arena.create(n_bytes, self._unused())
        self.masters = self._flat("masters", 0)  # dtype -> (P,) host, shared
        self.gradients = [  # W, or 2 W (and the held one) × dtype -> (P,)
            self._flat("gradients", row) for row in range(self._n_rows + holding)
        ]
        # W, two, or none × dtype -> (P,)
        self.copies = [self._flat("copies", row) for row in range(self._n_copies)]
        self.moves = DirtyRows(layout, self.masters, self.copies)
        self.means = self._flat("means", 0) if averaging else {}  # dtype -> (P,), or nothing
        self._refreshed: set[int] = set()
        self._written_behind: dict[int, int] = {}  # slot -> meeting: all workers write alike
        self.progress = UpdateProgress(self.arena.words(self._words, N_WORDS))
        self._n_epochs = self.arena.words(self._words + 8 * N_WORDS, 1)
        made = self.arena.words(self._words + ALIGNMENT_BYTES, self._n_made)
        self.step_counts = MadeSteps(made, n_workers) if self._n_made else None
        behind = self._words + ALIGNMENT_BYTES + 8 * self._n_made
        self.protocol_words = self.arena.words(behind, n_words)
        self.turns = None if turning is None else self._made_turns(behind + 8 * n_words, turning)

    def _made_turns(self, words: int, turning: Turning) -> Turns:
        """``words``: the byte of the arena at which they begin."""
        place = self.arena.words(words, Turns.N_WORDS)
        return Turns(place, self.masters, self.copies, self.moves, turning)

    @property
    def n_epochs(self) -> int:
        """How many epochs all workers have ended, as they have said last."""
        return self._n_epochs[0]

    def end_epoch(self, n: int) -> None:
        """By workers that have met at the end of the n-th epoch."""
        self._n_epochs[0] = n

    @property
    def on_devices(self) -> bool:
        """Whether workers copy the masters to devices, while updates are made."""
        return self.turns is not None and not self.copies

    @property
    def lock_free(self) -> bool:
        """Whether workers write to the masters and to the optimizer state without a lock."""
        return self.maker is UpdateMaker.IN_PLACE

    def _place_buffers(self) -> int:
        end = 0
        rows = {"masters": 1, "gradients": self._n_rows + self.holding}
        rows["copies"] = self._n_copies
        rows["means"] = int(self.averaging)
        for kind, count in rows.items():
            for row in range(count):
                start = end
                for dtype, size in self.layout.sizes.items():
                    self._starts[kind, dtype, row] = end
                    end = align(end + size * self._stored(kind, row, dtype).itemsize)
                end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE  # rows can be mapped one by one
                self._regions[kind, row] = start, end
        self._state = end
        self._words = end + 2 * align(self.layout.state_bytes)
        self._n_made = MadeSteps.n_words(self.n_workers) if self.maker.counts_steps else 0
        n_words = self._n_made + self._n_protocol_words + self._n_turn_words
        return self._words + ALIGNMENT_BYTES + 8 * n_words

    def _unused(self) -> list[tuple[int, int]]:
        """The pages of workers' rows that will hold no gradients, or sparse ones."""
        elsewhere = [worker for worker in range(self.n_workers) if worker not in self._here]
        rows = [row for row in range(self._n_rows) if row % self.n_workers in self._here]
        found = [self._regions["gradients", row] for row in range(self._n_rows) if row not in rows]
        if self.private_parameters:
            found += [self._regions["copies", worker] for worker in elsewhere]
        for row in rows:
            if not self.layout.gradients:
                found.append(self._regions["gradients", row])
            for number in self.layout.sparse if self.layout.gradients else ():
                slot = self.layout.slots[number]
                start = self._place("gradients", row, slot)
                stop = start + slot.numel * self._stored("gradients", row, slot.dtype).itemsize
                first, last = -(-start // mmap.PAGESIZE), stop // mmap.PAGESIZE
                if last > first:
                    found.append((first * mmap.PAGESIZE, last * mmap.PAGESIZE))
        return sorted(found)

    def _stored(self, kind: str, row: int, dtype: torch.dtype) -> torch.dtype:
        """The dtype in the arena: workers may send a narrower one; sums and means keep theirs."""
        sent = kind == "gradients" and row < self._n_rows
        return self.layout.travels_as(dtype) if sent else dtype

    def _flat(self, kind: str, row: int) -> dict[torch.dtype, torch.Tensor]:
        return {
            dtype: self.arena.tensor(
                self._starts[kind, dtype, row], size, self._stored(kind, row, dtype)
            )
            for dtype, size in self.layout.sizes.items()
        }

    def _place(self, kind: str, row: int, slot: Slot) -> int:
        size = self._stored(kind, row, slot.dtype).itemsize
        return self._starts[kind, slot.dtype, row] + slot.offset * size

    def _view(self, kind: str, row: int, slot: Slot) -> torch.Tensor:
        start, stored = self._place(kind, row, slot), self._stored(kind, row, slot.dtype)
        return slot.view(self.arena.tensor(start, slot.numel, stored))

    def master(self, slot: Slot) -> torch.Tensor:
        """The master parameter, in its own shape."""
        return self._view("masters", 0, slot)

    def row_of(self, worker: int) -> int:
        """The number of the worker's row; of two, the one of the present turn."""
        return worker if self.turns is None else worker + self.n_workers * self.turns.row

    def rows_of(self, worker: int) -> range:
        """The numbers of all rows of the worker, in the order of turns."""
        return range(worker, self._n_rows, self.n_workers)

    def gradient(self, row: int, slot: Slot) -> torch.Tensor:
        """The place of this parameter's gradient in the row, in the parameter's shape."""
        return self._view("gradients", row, slot)

    def front(self, row: int) -> torch.Tensor:
        """The bytes of the row, (n,) uint8, for an encoded contribution."""
        start, end = self._regions["gradients", row]
        return self.arena.tensor(start, end - start, torch.uint8)

    def mean(self, slot: Slot) -> torch.Tensor:
        """The place of the mean gradient of this parameter, in the parameter's shape."""
        return self._view("means", 0, slot)

    @property
    def buffers(self) -> range:
        """The numbers of the buffers from which a worker reads its parameters in turn.

        The last of several is that of the masters, which it reads where nobody trains; the only one
        where its parameters lie on a device.
        """
        last = Turns.MASTERS
        return range(1) if self.turns is None else range(last - self._n_copies, last + 1)

    def parameter(self, worker: int, slot: Slot, buffer: int | None = None) -> torch.Tensor:
        """The parameter that the worker computes with: its copy, or the master in lock-step.

        ``buffer``: of two shared copies, this one; else the present one.
        """
        return self._view(*self._row_of_parameters(worker, buffer), slot)

    def place_of_parameter(self, worker: int, slot: Slot, buffer: int | None = None) -> int:
        """The byte of the arena at which :meth:`parameter` begins."""
        return self._place(*self._row_of_parameters(worker, buffer), slot)

    def region_of_parameters(self, worker: int, buffer: int | None = None) -> tuple[int, int]:
        """The whole pages of the arena, in bytes, that hold the worker's parameters."""
        return self._regions[self._row_of_parameters(worker, buffer)]

    def regions_of_gradients(self, worker: int) -> list[tuple[int, int]]:
        """The whole pages of the arena, in bytes, that hold each of the worker's rows."""
        return [self._regions["gradients", row] for row in self.rows_of(worker)]

    def region_of_means(self) -> tuple[int, int]:
        """The whole pages of the arena, in bytes, that hold the mean, with ``averaging``."""
        return self._regions["means", 0]

    def region_of_masters(self) -> tuple[int, int]:
        """The whole pages of the arena, in bytes, that hold the masters."""
        return self._regions["masters", 0]

    def stepped_masters(self, elements: int) -> tuple[int, int]:
        """The bytes of the arena that hold the first ``elements`` of the float32 masters."""
        start = self._starts["masters", torch.float32, 0]
        return start, start + elements * torch.float32.itemsize

    def region_of_state(self) -> tuple[int, int]:
        """The bytes of the arena that hold both places of the state that worker 0 shares."""
        return self._state, self._words

    def spans_of(
        self, worker: int, absent: Collection[int], packed: Iterable[Packed], encoded: int | None
    ) -> list[tuple[int, int]]:
        """The byte ranges of the arena that hold a contribution in the worker's row.

        ``absent``, ``packed``, ``encoded``: see :class:`hybridtrain.engine.protocol.messages.Row`.
        """
        row, slots = self.row_of(worker), self.layout.slots
        start, _ = self._regions["gradients", row]
        used = {each.number: prod(each.shape_in(slots[each.number].shape)) for each in packed}
        spans = [] if encoded is None else [(start, start + encoded)]
        whole = range(len(slots)) if encoded is None else sorted(used)
        for number in whole:
            if number in absent:
                continue
            slot = slots[number]
            first = self._place("gradients", row, slot)
            n_bytes = self._stored("gradients", row, slot.dtype).itemsize
            n_bytes *= used.get(number, slot.numel)
            if spans and 0 <= first - spans[-1][1] <= ALIGNMENT_BYTES:
                spans[-1] = spans[-1][0], max(first + n_bytes, spans[-1][1])
            else:
                spans.append((first, first + n_bytes))
        return spans

    def span_of_row(
        self, worker: int, dtype: torch.dtype, start: int, stop: int
    ) -> tuple[int, int]:
        """The bytes of the arena that hold these elements of the worker's row."""
        row = self.row_of(worker)
        first = self._starts["gradients", dtype, row]
        size = self._stored("gradients", row, dtype).itemsize
        return first + start * size, first + stop * size

    def _row_of_parameters(self, worker: int, buffer: int | None) -> tuple[str, int]:
        if self.turns is not None and self._n_copies and buffer != Turns.MASTERS:
            return "copies", self.turns.read if buffer is None else buffer
        return ("copies", worker) if self.private_parameters else ("masters", 0)

    @torch.no_grad()
    def take(self, worker: int, writes: Mapping[int, bytes], meeting: int | None = None) -> None:
        """Apply the writes of a worker's user code to the masters.

        With ``private_parameters`` the masters may have changed since the worker read them: where
        they have, the difference to the values it had read is added.

        Args:
            worker: the number of the worker.
            writes: slot number -> elements, in the order of the slot's shape.
            meeting: all workers make these writes behind the meeting of this number, so those of
                the first one count; ``None``: each worker has its own.
        """
        self.moves.all_of(writes)
        for number, elements in writes.items():
            slot = self.layout.slots[number]
            value = tensor_of(elements, slot.dtype, slot.shape)
            if self.private_parameters:
                read, master = self.parameter(worker, slot), self.master(slot)
                if not has_sums(slot.dtype):
                    master.copy_(value)
                elif meeting is None or self._written_behind.get(number) != meeting:
                    moved = torch.add(master, value - read)
                    rests = (master == read) | master.isnan()
                    torch.where(rests, value, moved, out=master)  # to the bit
                if meeting is not None:
                    self._written_behind[number] = meeting
                read.copy_(value)  # the worker computes with it from here on
            else:
                self.master(slot).copy_(value)
                if self.turns is not None:  # all workers make it alike, in what they read
                    self.parameter(worker, slot).copy_(value)

    def state(self, turn: int) -> torch.Tensor:
        """One of two places for the state that worker 0 shares, (state_bytes,) uint8."""
        n_bytes = self.layout.state_bytes
        return self.arena.tensor(self._state + turn * align(n_bytes), n_bytes, torch.uint8)

    def refresh(self, worker: int) -> None:
        """Copy the masters to the worker's copy, if it has one; else it reads the newest."""
        self._refreshed.add(worker)
        if self.private_parameters:
            self.moves.bring(worker)
        elif self.turns is not None:
            self.turns.show_newest()

    def was_refreshed(self, worker: int) -> bool:
        """Whether the worker's parameters may have changed since this was asked last."""
        known = worker in self._refreshed
        self._refreshed.discard(worker)
        return known

    def descriptor(self, lent: int | None) -> int:
        """The descriptor of this arena, or of the lent one of that number."""
        return self.arena.fd if lent is None else self.lending.arenas[lent].fd
