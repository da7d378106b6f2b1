"""An anonymous block of shared host memory.

It has no name, so nothing is left behind: the kernel frees it with the last process that maps it,
however that process ends. ``memfd_create`` does not use ``/dev/shm`` (64 MB in a default
container). Reserving the pages at once turns "too big" into an error, instead of a SIGBUS or the
out-of-memory killer in the middle of a step.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hybridtrain.engine.memory.limits import check_available
from hybridtrain.errors import UserError
from hybridtrain.util.anonymous_files import anonymous_descriptor, shared_map

# A cache line, and 16 float32: what the vectorised kernels need for equal bits.
ALIGNMENT_BYTES = 64


def align(n_bytes: int) -> int:
    """Round up to :data:`ALIGNMENT_BYTES`."""
    return -(-n_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's stride if it has no gaps (``channels_last``), else the contiguous one."""
    dense = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
    return tuple(dense.stride())


class Arena:
    """A mapped, nameless file.

    The kernel frees the memory when the arena and all its tensors are gone in every process.

    Args:
        fd: the descriptor; the arena owns and closes it.
        n_bytes: its size.
    """

    def __init__(self, fd: int, n_bytes: int) -> None:
        self.fd = fd
        self.n_bytes = n_bytes
        self._map = shared_map(self, fd, n_bytes)
        weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, n_bytes: int, unused: Sequence[tuple[int, int]] = ()) -> Arena:
        """Make a zero-filled arena of ``n_bytes`` bytes.

        ``unused``: byte ranges, ascending, that are written to rarely or never; their pages are
        not reserved.

        Raises:
            UserError: if the machine does not have that much memory.
        """
        n_bytes = max(align(n_bytes), ALIGNMENT_BYTES)
        fd = anonymous_descriptor()
        try:
            _reserve(fd, n_bytes, unused)
            return cls(fd, n_bytes)
        except OSError as error:
            os.close(fd)
            advice = "use fewer workers, a smaller model, or a machine with more memory"
            if error.errno == errno.EFBIG:
                advice = "raise its limit of file sizes: ulimit -f unlimited"
            raise UserError(
                f"{_asked(n_bytes, unused) / 2**20:,.1f} MiB of shared host memory were asked for "
                "parameters and gradients, but the system refused them "
                f"({error.strerror}); {advice}"
            ) from error

    def tensor(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor over a part of the arena.

        Its storage has the same size, so ``torch.save`` of a view writes only the view.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset_bytes)

    @property
    def memory(self) -> memoryview:
        """All bytes."""
        return memoryview(self._map)

    def words(self, offset_bytes: int, n: int) -> memoryview:
        """(n,) int64 of the arena; reads and writes of one word are atomic."""
        return memoryview(self._map)[offset_bytes : offset_bytes + 8 * n].cast("q")


def _asked(n_bytes: int, unused: Sequence[tuple[int, int]]) -> int:
    return n_bytes - sum(stop - start for start, stop in unused)


def _reserve(fd: int, n_bytes: int, unused: Sequence[tuple[int, int]]) -> None:
    """Set the file's size, and reserve its pages where the system can."""
    check_available(_asked(n_bytes, unused))
    os.ftruncate(fd, n_bytes)
    if hasattr(os, "posix_fallocate"):
        first = 0
        for start, stop in (*unused, (n_bytes, n_bytes)):
            if start > first:
                os.posix_fallocate(fd, first, start - first)
            first = stop


# ---- optimizer state in shared memory, for workers that step the masters themselves -------------
# An optimizer creates its state in its first step. Each set of new tensors gets a new arena, which
# the workers map when the server sends them its places.


@dataclass(frozen=True, slots=True)
class TensorPlace:
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
    beyond :class:`hybridtrain.engine.memory.counters.MadeSteps`; ``None``: it counts them by
    parameter.
    """

    generation: int = 0
    places: dict[int, dict[str, TensorPlace]] = field(default_factory=dict)
    steps: dict[int, torch.Tensor | int | float] = field(default_factory=dict)
    plain: dict[int, dict[str, Any]] = field(default_factory=dict)
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class LentState:
    """The places of a flat update's state.

    ``count_groups``: parameter group, positions of its parameters in the optimizer, scalars,
    whether it has state. ``kept``: room for a backup of the masters, then of each tensor.
    ``members``: slot numbers of its parameters, group by group.
    """

    flats: dict[str, TensorPlace]
    count_groups: tuple[tuple[int, tuple[int, ...], dict[str, TensorPlace], bool], ...]
    kept: tuple[TensorPlace, ...]
    members: tuple[tuple[int, ...], ...]

    @property
    def arenas(self) -> set[int]:
        """The numbers of all arenas that hold a part of it."""
        figures = [place for _, _, mine, _ in self.count_groups for place in mine.values()]
        return {place.arena for place in (*self.flats.values(), *figures, *self.kept)}


class SharedArenas:
    """The arenas lent in one run. None is freed before its end: a worker may still write to it."""

    def __init__(self) -> None:
        self.arenas: dict[int, Arena] = {}
        self._known: dict[int, TensorPlace] = {}  # by address
        self._generation = 0

    def next_generation(self) -> int:
        """A new number."""
        self._generation += 1
        return self._generation

    def place_of(self, tensor: torch.Tensor) -> TensorPlace | None:
        """The place of this very tensor, if it is lent already."""
        place = self._known.get(tensor.data_ptr())
        same = place is not None and place.dtype == tensor.dtype
        return place if same and place is not None and place.shape == tensor.shape else None

    def placed(self, tensors: Sequence[torch.Tensor]) -> list[TensorPlace]:
        """The place of each; those not lent yet are copied first."""
        known = [self.place_of(tensor) for tensor in tensors]
        missing = [tensor for tensor, place in zip(tensors, known, strict=True) if place is None]
        fresh = iter(self.put(missing) if missing else [])
        return [next(fresh) if place is None else place for place in known]

    def put(self, tensors: Sequence[torch.Tensor]) -> list[TensorPlace]:
        """Copy these to a new arena.

        Raises:
            UserError: if the machine does not have that much memory.
        """
        places, end = [], 0
        for tensor in tensors:
            shape, stride = tuple(tensor.shape), dense_stride(tensor)
            places.append(TensorPlace(len(self.arenas), end, tensor.dtype, shape, stride))
            end = align(end + tensor.numel() * tensor.dtype.itemsize)
        self.arenas[len(self.arenas)] = Arena.create(end)
        for place, tensor in zip(places, tensors, strict=True):
            view = place.view(self.arenas)
            view.copy_(tensor)
            if view.numel():
                self._known[view.data_ptr()] = place
        return places
