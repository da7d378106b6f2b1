"""PowerSGD: a matrix travels as the product of two with few columns.

Vogels, Karimireddy, Jaggi, *PowerSGD*, NeurIPS 2019 (arXiv:1905.13727), algorithm 1, with the error
feedback of algorithm 2. There all workers multiply the mean of their matrices; here each worker
factors its own, and the server takes the mean of the products. In place of the warm start, which
would be one more memory of each worker, every encoding makes ``iterations`` from the same matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from hybridtrain.exchanges.compression.compressor import as_bytes, as_numbers, working
from hybridtrain.util.option_types import Checked, Positive, Share


@dataclass(frozen=True)
class PowerSGD(Checked):
    """A tensor of more than two dimensions is a matrix with its first; a vector is not encoded.

    Args:
        rank: r, the columns of both factors, of at most as many as the matrix has rows and columns.
        iterations: of the subspace iteration, from a fixed random matrix.
        error_decay: of what is left out, which the next gradient gets.
    """

    rank: Positive = 4
    iterations: Positive = 2
    error_decay: Share = 1.0

    def _width(self, shape: Sequence[int]) -> int:
        """The columns of both factors."""
        return min(self.rank, shape[0], prod(shape[1:]))

    def n_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        if len(shape) < 2:
            return prod(shape) * dtype.itemsize
        return (shape[0] + prod(shape[1:])) * self._width(shape) * working(dtype).itemsize

    def encode(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        matrix = values.reshape(len(values), -1)  # (n, m)
        seeded = torch.Generator().manual_seed(0)
        right = torch.randn(matrix.shape[1], self._width(values.shape), generator=seeded)  # (m, r)
        right = left = right.to(matrix)
        for _ in range(self.iterations):
            left = torch.linalg.qr(matrix @ right).Q  # (n, r), orthonormal
            right = matrix.T @ left
        return torch.cat([as_bytes(left), as_bytes(right)])

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        factors = as_numbers(encoded, working(out.dtype)).view(-1, self._width(out.shape))
        left, right = factors.split((len(out), len(factors) - len(out)))
        out.copy_((left @ right.T).view(out.shape))
