"""The chunks of an update, planned once, so that a step creates no tensors.

Legend: P elements of the buffer (padding included), n elements of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hybridtrain.engine.memory import Store
from hybridtrain.engine.memory.arena import ALIGNMENT_BYTES, align
from hybridtrain.engine.memory.layout import Slot
from hybridtrain.engine.updates.kernels import Figures

# ---- step counts, shared by parameters that have always been stepped together -------------------
# Torch counts the steps of each parameter. Nearly always all of a parameter group have the same
# count, so it is kept once per *count group*. A step without gradients for some of a group splits
# it permanently.


@dataclass(eq=False, slots=True)
class StepCountGroup:
    """Parameters of one parameter group, by their index in the optimizer."""

    group: int
    members: list[int]
    figures: Figures
    begun: bool = False  # its members have state

    def begin(self, begun: bool) -> None:
        """Its members have state now, or none."""
        self.begun = begun

    def split_off(self, leaving: Collection[int]) -> StepCountGroup:
        """Move these members to a new group."""
        self.members = [index for index in self.members if index not in leaving]
        figures = {name: figure.clone() for name, figure in self.figures.items()}
        return StepCountGroup(self.group, sorted(leaving), figures, self.begun)


class StepCountGroups:
    """The count groups of an optimizer.

    Args:
        begun: each parameter's group, its figures, and whether it has state.
    """

    def __init__(self, begun: Iterable[tuple[int, Figures, bool]]) -> None:
        self.of: list[StepCountGroup] = []  # by parameter
        known: dict[object, StepCountGroup] = {}
        for index, (group, figures, kept) in enumerate(begun):
            key = group, kept, tuple((f.dtype, f.item()) for f in figures.values())
            count_group = known.setdefault(key, StepCountGroup(group, [], figures, kept))
            count_group.members.append(index)
            self.of.append(count_group)

    @property
    def all(self) -> list[StepCountGroup]:
        """All count groups, in the order of their first parameters."""
        return list(dict.fromkeys(self.of))

    def take_over(self, groups: Iterable[StepCountGroup]) -> None:
        """Replace all count groups."""
        for group in groups:
            for index in group.members:
                self.of[index] = group

    def part(self, moving: Collection[int]) -> bool:
        """Split groups of which only some members are stepped; whether any was split."""
        leaving: dict[StepCountGroup, list[int]] = {}
        for index in moving:
            leaving.setdefault(self.of[index], []).append(index)
        split = {c: set(some) for c, some in leaving.items() if len(some) < len(c.members)}
        for count_group, some in split.items():
            fresh = count_group.split_off(some)
            for index in fresh.members:
                self.of[index] = fresh
        return bool(split)


def scalar(value: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A new figure, (); a saved one keeps its precision."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().cpu().clone()
    return torch.tensor(float(value), dtype=dtype)


_VECTOR = ALIGNMENT_BYTES // 4  # elements of a cache line

Present = tuple[int, ...] | None  # indices of the contributions with a gradient; None: all
Absent = tuple[frozenset[int], ...]  # slot numbers without a gradient, of each contribution


class ChunkStretch(NamedTuple):
    """Whole cache lines of one count group, with gradients from the same contributions."""

    count_group: StepCountGroup
    start: int
    stop: int
    present: Present


@dataclass(slots=True)
class Chunk:
    """The elements of one kernel call."""

    count_group: int  # index in the plan
    start: int  # in the buffer
    size: int  # n
    parameter: torch.Tensor  # (n,) view of the masters
    state: tuple[torch.Tensor, ...]  # (n,) each
    rows: tuple[torch.Tensor, ...]  # of each worker, and the accumulated one: (n,)
    present: Present
    number: int = 0  # in the order of the buffer


@dataclass(slots=True)
class ChunkPlan:
    """The count groups of a step, and their chunks."""

    places: list[tuple[int, Present]]  # the slot number of each parameter in the step
    count_groups: list[StepCountGroup] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    backwards: list[Chunk] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)  # end of each chunk in the buffer
    size: int = 0  # elements of all chunks


def present_in(absent: Absent, number: int) -> Present:
    """The contributions with a gradient of this parameter."""
    found = tuple(place for place, without in enumerate(absent) if number not in without)
    return None if len(found) == len(absent) else found


def stretches(
    places: Iterable[tuple[int, StepCountGroup, Present]], store: Store
) -> Iterator[ChunkStretch]:
    """Join neighbours; ``places``: slot number, count group, contributions of each parameter."""
    last: ChunkStretch | None = None
    for number, count_group, present in places:
        slot = store.layout.slots[number]
        start, stop = slot.offset, slot.offset + align(slot.numel * 4) // 4
        if last and (last.stop, last.count_group, last.present) == (start, count_group, present):
            last = ChunkStretch(count_group, last.start, stop, present)
            continue
        if last:
            yield last
        last = ChunkStretch(count_group, start, stop, present)
    if last:
        yield last


def cut(start: int, stop: int, chunk: int) -> list[tuple[int, int]]:
    """Pieces of nearly equal size, at most ``chunk``, each a whole number of cache lines.

    Their number is even, so that two threads end together, and does not depend on the number of
    threads, so that a norm is always summed in the same order.
    """
    size = stop - start
    pieces = 1 if size <= chunk else 2 * -(-size // (2 * chunk))
    step = max(1, -(-size // (pieces * _VECTOR))) * _VECTOR
    return [(at, min(at + step, stop)) for at in range(start, stop, step)]


def make_plan(
    places: Sequence[tuple[int, StepCountGroup, Present]],  # as for stretches
    store: Store,
    state: dict[StepCountGroup, tuple[torch.Tensor, ...]],  # (P,) each
    longest: int,
) -> ChunkPlan:
    """Join parameters that step alike, and cut them into chunks of at most ``longest`` elements."""
    plan = ChunkPlan([(number, present) for number, _, present in places])
    dtype = torch.float32
    numbers: dict[StepCountGroup, int] = {}
    flats = [store.masters[dtype], *(row[dtype] for row in store.gradients)]
    for stretch in stretches(places, store):
        count_group = numbers.setdefault(stretch.count_group, len(numbers))
        for start, stop in cut(stretch.start, stretch.stop, longest):
            own = tuple([flat[start:stop] for flat in state[stretch.count_group]])
            parameter, *rows = [flat[start:stop] for flat in flats]
            size, present = stop - start, stretch.present
            made = Chunk(count_group, start, size, parameter, own, tuple(rows), present)
            plan.chunks.append(made)
    plan.chunks.sort(key=lambda chunk: chunk.start)  # groups may lie between one another
    for number, chunk in enumerate(plan.chunks):
        chunk.number = number
    plan.count_groups, plan.backwards = list(numbers), plan.chunks[::-1]
    plan.stops = [chunk.start + chunk.size for chunk in plan.chunks]
    plan.size = sum(made.size for made in plan.chunks)
    return plan


# ---- the norm of the mean gradient, as in torch.nn.utils.clip_grad_norm_ ------------------------
# Torch computes the norm of each parameter's gradient, and the norm of these. Here the rows are
# merged piece by piece, several whole parameters at a time, with torch's bits. A parameter that is
# larger than a piece is summed in parts, which may round differently.
#
# Legend: n elements of a piece.

Merged = Callable[["NormPiece", torch.Tensor], torch.Tensor]  # piece, scratch -> mean


@dataclass(slots=True)
class NormPiece:
    """Neighbours with gradients from the same contributions, or a part of one parameter."""

    size: int  # n
    rows: tuple[torch.Tensor, ...]  # of each worker, and the accumulated one: (n,)
    present: Present
    spans: tuple[tuple[int, int], ...]  # of the parameters in it, without padding
    parts: int = 1  # number of parts, if this is a parameter's first; 0: a later one
    views: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # of each lane's scratch

    def norms(self, merged: Merged, lane: int, scratch: torch.Tensor) -> list[torch.Tensor]:
        """The norm of each span, ()."""
        mean = merged(self, scratch)
        if mean is not scratch:
            return list(torch._foreach_norm([mean[start:stop] for start, stop in self.spans]))
        if lane not in self.views:
            self.views[lane] = [scratch[start:stop] for start, stop in self.spans]
        return list(torch._foreach_norm(self.views[lane]))


def pieces(places: Iterable[tuple[int, Present]], store: Store, chunk: int) -> list[NormPiece]:
    """Cut into pieces; ``places``: slot number and contributions of each parameter."""
    found: list[NormPiece] = []
    waiting: list[Slot] = []
    known: Present = None
    for number, present in places:
        slot = store.layout.slots[number]
        if waiting and not (present == known and _follows(waiting, slot, chunk)):
            found.append(_together(waiting, known, store))
            waiting = []
        known = present
        if slot.numel > chunk:
            found += _apart(slot, present, store, chunk)
        elif slot.numel:
            waiting.append(slot)
    return found + ([_together(waiting, known, store)] if waiting else [])


def _follows(before: list[Slot], slot: Slot, chunk: int) -> bool:
    """Whether the slot follows these, and all fit into a piece."""
    near = 0 <= slot.offset - (before[-1].offset + before[-1].numel) < 16
    return near and slot.offset + slot.numel - before[0].offset <= chunk


def _together(slots: list[Slot], present: Present, store: Store) -> NormPiece:
    start, stop = slots[0].offset, slots[-1].offset + slots[-1].numel
    spans = tuple((slot.offset - start, slot.offset - start + slot.numel) for slot in slots)
    return NormPiece(stop - start, _rows(store, start, stop), present, spans)


def _apart(slot: Slot, present: Present, store: Store, chunk: int) -> Iterator[NormPiece]:
    bounds = cut(slot.offset, slot.offset + slot.numel, chunk)
    for place, (start, stop) in enumerate(bounds):
        parts = 0 if place else len(bounds)
        yield NormPiece(
            stop - start, _rows(store, start, stop), present, ((0, stop - start),), parts
        )


def _rows(store: Store, start: int, stop: int) -> tuple[torch.Tensor, ...]:
    return tuple([row[torch.float32][start:stop] for row in store.gradients])


def total(found: Iterable[NormPiece], norms: Iterable[list[torch.Tensor]]) -> torch.Tensor:
    """The norm of all, (), from the norms of each piece's spans."""
    whole: list[torch.Tensor] = []
    parts: list[torch.Tensor] = []
    missing = 0
    for piece, own in zip(found, norms, strict=True):
        missing = (piece.parts or missing) - 1
        if piece.parts == 1:
            whole += own
            continue
        parts += own
        if not missing:
            whole.append(torch.linalg.vector_norm(torch.stack(parts)))
            parts = []
    return torch.linalg.vector_norm(torch.stack(whole))


# ---- a step that may have to be undone -----------------------------------------------------------


class Undo:
    """Keeps the chunks and step counts of one step.

    Args:
        buffers: (P,) each, for the masters and as many state tensors as a chunk may have.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = buffers
        self._chunks: list[Chunk] = []
        self._counts: list[tuple[StepCountGroup, dict[str, torch.Tensor], bool]] = []

    def begin(self, count_groups: Sequence[StepCountGroup]) -> None:
        """A step of these begins; forget the last one."""
        self._chunks = []
        self._counts = [
            (each, {name: figure.clone() for name, figure in each.figures.items()}, each.begun)
            for each in count_groups
        ]

    def keep(self, chunk: Chunk) -> None:
        """The chunk is about to be stepped; by any thread."""
        end = chunk.start + chunk.size
        for buffer, part in zip(self._buffers, (chunk.parameter, *chunk.state), strict=False):
            buffer[chunk.start : end].copy_(part)
        self._chunks.append(chunk)

    def undo(self) -> None:
        """Bring all that back."""
        for chunk in self._chunks:
            end = chunk.start + chunk.size
            for buffer, part in zip(self._buffers, (chunk.parameter, *chunk.state), strict=False):
                part.copy_(buffer[chunk.start : end])
        for count_group, figures, begun in self._counts:
            count_group.begin(begun)
            for name, figure in figures.items():
                count_group.figures[name].copy_(figure)
        self.begin(())
