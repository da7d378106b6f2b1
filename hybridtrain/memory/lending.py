"""Optimizer state in shared memory, for workers that step the masters themselves.

An optimizer creates its state in its first step. Each set of new tensors gets a new arena, which
the workers map when the server sends them its places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hybridtrain.memory.arena import Arena, align


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a dense tensor: byte ``offset`` of arena number ``arena``."""

    arena: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, arenas: Mapping[int, Arena]) -> torch.Tensor:
        """The tensor there."""
        numel = torch.Size(self.shape).numel()
        flat = arenas[self.arena].tensor(self.offset, numel, self.dtype)
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class SharedState:
    """An optimizer's state, by slot number and key, for a message.

    ``places``: its tensors; ``steps``: step counts (only their type matters); ``plain``: constants.
    ``generation`` changes with every change. ``offset``: how many steps the optimizer has counted
    beyond :class:`hybridtrain.memory.counters.MadeSteps`; ``None``: it counts them by parameter.
    """

    generation: int = 0
    places: dict[int, dict[str, Place]] = field(default_factory=dict)
    steps: dict[int, torch.Tensor | int | float] = field(default_factory=dict)
    plain: dict[int, dict[str, Any]] = field(default_factory=dict)
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class LentState:
    """The places of a flat update's state.

    ``count_groups``: parameter group, positions of its parameters in the optimizer, scalars,
    whether it has state. ``kept``: room for a backup of the masters, then of each tensor.
    """

    flats: dict[str, Place]
    count_groups: tuple[tuple[int, tuple[int, ...], dict[str, Place], bool], ...]
    kept: tuple[Place, ...]

    @property
    def arenas(self) -> set[int]:
        """The numbers of all arenas that hold a part of it."""
        figures = [place for _, _, mine, _ in self.count_groups for place in mine.values()]
        return {place.arena for place in (*self.flats.values(), *figures, *self.kept)}


class SharedArenas:
    """The arenas lent in one run. None is freed before its end: a worker may still write to it."""

    def __init__(self) -> None:
        self.arenas: dict[int, Arena] = {}
        self._known: dict[int, Place] = {}  # by address
        self._generation = 0

    def next_generation(self) -> int:
        """A new number."""
        self._generation += 1
        return self._generation

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        """The place of this very tensor, if it is lent already."""
        place = self._known.get(tensor.data_ptr())
        same = place is not None and place.dtype == tensor.dtype
        return place if same and place is not None and place.shape == tensor.shape else None

    def placed(self, tensors: Sequence[torch.Tensor]) -> list[Place]:
        """The place of each; those not lent yet are copied first."""
        known = [self.place_of(tensor) for tensor in tensors]
        missing = [tensor for tensor, place in zip(tensors, known, strict=True) if place is None]
        fresh = iter(self.put(missing) if missing else [])
        return [next(fresh) if place is None else place for place in known]

    def put(self, tensors: Sequence[torch.Tensor]) -> list[Place]:
        """Copy these to a new arena.

        Raises:
            UserError: if the machine does not have that much memory.
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
