"""Tensors that the server lends to the workers: in arenas that are made when they are needed.

Under a policy without a lock the workers step the optimizer themselves, so its state must lie where
all can write to it. What an optimizer keeps is only known once it has stepped, so each lot of new
tensors gets an arena of its own, and the workers map it when they hear of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hybridtrain.memory.arena import Arena, align


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: from byte ``offset`` of arena number ``arena`` on, without gaps."""

    arena: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, arenas: Mapping[int, Arena]) -> torch.Tensor:
        """The tensor itself."""
        numel = torch.Size(self.shape).numel()
        flat = arenas[self.arena].tensor(self.offset, numel, self.dtype)
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class SharedState:
    """An optimizer's state, by slot number and key, as it can be sent.

    ``places`` are its tensors, ``steps`` the step counts (of any value, for their type), ``plain``
    what never changes. ``generation`` is another one whenever there is something new. ``offset``:
    the optimizer has counted so many steps more than :class:`MadeSteps`; ``None``: it counts them
    by parameter.
    """

    generation: int = 0
    places: dict[int, dict[str, Place]] = field(default_factory=dict)
    steps: dict[int, torch.Tensor | int | float] = field(default_factory=dict)
    plain: dict[int, dict[str, Any]] = field(default_factory=dict)
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class LentState:
    """The state of a flat pass: where each tensor lies, and each count group's (its group, places
    of its parameters in the optimizer, figures, whether anything is kept).

    ``kept`` has room for the masters and for each of the others, in that order.
    """

    flats: dict[str, Place]
    count_groups: tuple[tuple[int, tuple[int, ...], dict[str, Place], bool], ...]
    kept: tuple[Place, ...]

    @property
    def arenas(self) -> set[int]:
        """The numbers of those that all of it lies in."""
        figures = [place for _, _, mine, _ in self.count_groups for place in mine.values()]
        return {place.arena for place in (*self.flats.values(), *figures, *self.kept)}


class MadeSteps:
    """How many steps have been made, of which workers make some without asking anybody.

    Each worker has a cache line of its own, and so has the server, for all other steps. Behind the
    steps of a worker stand its mini-batches, twice: those that are done with an even number of
    steps, and with an odd one. So one write says both, and a death leaves both or none.

    Args:
        words: (:meth:`n_words`,) int64 in shared memory, zero at the beginning.
        n_workers: W.
    """

    _LINE = 8  # words

    def __init__(self, words: memoryview, n_workers: int) -> None:
        self._words, self._servers = words, self._LINE * n_workers
        self._told = [0] * n_workers  # of what workers have made unasked; known to the server
        self.ahead = 0  # of what was told, when the server has looked

    @classmethod
    def n_words(cls, n_workers: int) -> int:
        """So many there must be."""
        return cls._LINE * (n_workers + 1)

    @property
    def total(self) -> int:
        """By all."""
        return sum(self._words[:: self._LINE])

    def begin(self, version: int) -> None:
        """By the server: nobody steps, and so many steps are behind the masters."""
        self._words[self._servers] += version - self.total

    def count(self, by: Sequence[int] = ()) -> None:
        """By the server: it has heard of one more, which these workers have counted themselves."""
        for worker in by:
            self._told[worker] += 1
        self._words[self._servers] += not by

    @property
    def told(self) -> int:
        """For the server: so many it has heard of, or counted itself."""
        return self._words[self._servers] + sum(self._told)

    def untold(self, worker: int) -> int:
        """For the server: so many the worker has made that it has not heard of."""
        return self._words[self._LINE * worker] - self._told[worker]

    def look(self) -> int:
        """By the server: how many of all workers it has not heard of, now."""
        self.ahead = sum(map(self.untold, range(len(self._told))))
        return self.ahead

    def make(self, worker: int, covered: int) -> None:
        """By a worker: it has made a step; ``covered`` mini-batches are done with all its own."""
        made = self._words[self._LINE * worker] + 1
        self._words[self._LINE * worker + 1 + made % 2] = covered
        self._words[self._LINE * worker] = made

    def cover(self, worker: int, covered: int) -> None:
        """By a worker, or for one that is gone: so many mini-batches are done, of those it drew."""
        self._words[self._place_of_covered(worker)] = covered

    def covered(self, worker: int) -> int:
        """What the worker has said last."""
        return self._words[self._place_of_covered(worker)]

    def _place_of_covered(self, worker: int) -> int:
        return self._LINE * worker + 1 + self._words[self._LINE * worker] % 2


@dataclass(frozen=True, slots=True)
class GetState:
    """Request: the state of optimizer ``optimizer`` (``SharedState``), or arena ``arena``.

    ``flat``: where the flat pass has it (``Lent``).
    """

    optimizer: int = 0
    arena: int | None = None
    flat: bool = False


@dataclass(frozen=True, slots=True)
class StepNumber:
    """Answer to a push: what is lent is ``generation``; the steps made before this one.

    ``steps`` is one number, or, where parameters differ, by slot number; ``None``: the server has
    made the step.
    """

    generation: int
    steps: int | dict[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Lent:
    """Where an optimizer's state lies; ``None``: it is not for workers."""

    state: LentState | None


class SharedArenas:
    """All that is lent in one run. Nothing is ever taken back, so that nobody writes to nowhere."""

    def __init__(self) -> None:
        self.arenas: dict[int, Arena] = {}
        self._known: dict[int, Place] = {}  # by address
        self._generation = 0

    def next_generation(self) -> int:
        """A number that nobody has had."""
        self._generation += 1
        return self._generation

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        """Where this very tensor lies, if it is lent already."""
        place = self._known.get(tensor.data_ptr())
        same = place is not None and place.dtype == tensor.dtype
        return place if same and place is not None and place.shape == tensor.shape else None

    def placed(self, tensors: Sequence[torch.Tensor]) -> list[Place]:
        """Where each lies, once those that are not lent yet have been copied."""
        known = [self.place_of(tensor) for tensor in tensors]
        missing = [tensor for tensor, place in zip(tensors, known, strict=True) if place is None]
        fresh = iter(self.put(missing) if missing else [])
        return [next(fresh) if place is None else place for place in known]

    def put(self, tensors: Sequence[torch.Tensor]) -> list[Place]:
        """Copy these to where they can be lent.

        Raises:
            UserError: if the machine has not that much memory.
        """
        places, end = [], 0
        for tensor in tensors:
            dense = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
            shape, stride = tuple(tensor.shape), tuple(dense.stride())
            places.append(Place(len(self.arenas), end, tensor.dtype, shape, stride))
            end = align(end + tensor.numel() * tensor.dtype.itemsize)
        self.arenas[len(self.arenas)] = Arena.create(end)
        for place, tensor in zip(places, tensors, strict=True):
            view = place.view(self.arenas)
            view.copy_(tensor)
            if view.numel():
                self._known[view.data_ptr()] = place
        return places
