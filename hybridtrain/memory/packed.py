"""Sparse gradients in a row that has room for dense ones.

The values of the touched rows lie packed at the beginning of the parameter's place: no index occurs
twice, so they never need more room than the dense gradient. The indices travel with the message.
Nothing is filled with zeros, and nobody reads or writes what was not touched.

Legend: n touched rows, s sparse dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hybridtrain.errors import UserError
from hybridtrain.memory.table import Rows

_INDEX = torch.int64


@dataclass(frozen=True, slots=True)
class Packed:
    """Parameter ``number`` has a sparse gradient: ``indices`` is (s, n) int64."""

    number: int
    sparse_dim: int
    indices: bytes

    @property
    def n_rows(self) -> int:
        """Touched rows, n."""
        return len(self.indices) // (_INDEX.itemsize * max(self.sparse_dim, 1))


def pack(
    number: int,
    gradient: torch.Tensor,  # sparse, coalesced
    place: torch.Tensor,  # host, shared, in the parameter's shape
) -> Packed:
    """Copy the values to the place; the caller waits for the copy if it comes from a device.

    Raises:
        UserError: if the place is narrower than the gradient.
    """
    if place.dtype != gradient.dtype:
        raise UserError(
            f"transport_dtype={str(place.dtype).removeprefix('torch.')} was given, but a parameter "
            f"of shape {tuple(place.shape)} has a sparse gradient, which travels as it is; leave "
            "transport_dtype out, or use sparse=False"
        )
    values, indices = gradient.values(), gradient.indices().cpu()
    _flat(place)[: values.numel()].copy_(values.reshape(-1), non_blocking=True)
    return Packed(number, gradient.sparse_dim(), indices.contiguous().numpy().tobytes())


def unpack(packed: Packed, place: torch.Tensor) -> torch.Tensor:
    """The coalesced sparse gradient; its values are a view of the place."""
    values = used(packed, place).view(packed.n_rows, *place.shape[packed.sparse_dim :])
    return torch.sparse_coo_tensor(
        indices_of(packed), values, place.shape, is_coalesced=True, check_invariants=False
    )


def used(packed: Packed, place: torch.Tensor) -> torch.Tensor:
    """The part of the place that holds the values, 1-D."""
    shape = torch.Size((packed.n_rows, *place.shape[packed.sparse_dim :]))
    return _flat(place)[: shape.numel()]


def indices_of(packed: Packed) -> torch.Tensor:
    """Where the values belong, (s, n) int64."""
    if not packed.indices:
        return torch.empty(packed.sparse_dim, 0, dtype=_INDEX)
    return torch.frombuffer(bytearray(packed.indices), dtype=_INDEX).view(packed.sparse_dim, -1)


def rows_of(packed: Packed) -> Rows:
    """The touched rows, (n,), in ascending order; where there is one sparse dimension."""
    return np.frombuffer(packed.indices, dtype=np.int64)


def _flat(place: torch.Tensor) -> torch.Tensor:
    return place.as_strided((place.numel(),), (1,))
