"""The chunks of an update, planned once, so that a step creates no tensors.

Legend: P elements of the buffer (padding included), n elements of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from hybridtrain.memory import Store
from hybridtrain.memory.arena import ALIGNMENT_BYTES, align
from hybridtrain.updates.flat.step_counters import StepCountGroup

_VECTOR = ALIGNMENT_BYTES // 4  # elements of a cache line

Present = tuple[int, ...] | None  # indices of the contributions with a gradient; None: all
Absent = tuple[frozenset[int], ...]  # slot numbers without a gradient, of each contribution


@dataclass(frozen=True, slots=True)
class ChunkStretch:
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
