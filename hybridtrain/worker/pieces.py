"""Copying a large tensor and looking at it in one pass over memory.

A second pass costs as much as the first where a tensor is larger than the caches. So it is copied
in pieces that stay in a core's own cache, and each is summed up while it is there: a sum is finite
only if all its terms are.
"""

from __future__ import annotations

import math

import torch

LARGE = 128 * 1024  # elements: below that, one pass over many tensors costs less than this
PIECE = 64 * 1024  # elements: 256 KiB of source and of copy, of a cache of half a MiB or more


class Pieces:
    """A place for a large tensor, cut into pieces.

    Args:
        place: (n,) or of any dense shape, floating point.
    """

    def __init__(self, place: torch.Tensor) -> None:
        self._shape, self._stride = place.shape, place.stride()
        self._pieces = _flat(place).split(PIECE)
        self._total = torch.zeros((), dtype=_wide(place.dtype))

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether its elements lie in the same order, and are of the same kind."""
        same = tensor.shape == self._shape and tensor.stride() == self._stride
        return same and tensor.dtype == self._pieces[0].dtype and not tensor.is_sparse

    @torch.no_grad()
    def copy(self, source: torch.Tensor) -> bool:
        """Copy a tensor that fits; whether its sum is finite."""
        total = self._total.zero_()
        for piece, part in zip(self._pieces, _flat(source.detach()).split(PIECE), strict=True):
            piece.copy_(part)
            total += piece.sum(dtype=total.dtype)
        return math.isfinite(float(total))


def worth_cutting(place: torch.Tensor) -> bool:
    """Whether a tensor is so large that looking at it afterwards would cost a pass over memory."""
    return place.numel() >= LARGE and place.is_floating_point()


def _flat(dense: torch.Tensor) -> torch.Tensor:
    return dense.as_strided((dense.numel(),), (1,))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype
