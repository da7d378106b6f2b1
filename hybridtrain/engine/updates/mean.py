"""The weighted mean of the workers' gradients.

Legend: n elements of a stretch of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def merge(
    rows: Sequence[torch.Tensor],  # each (n,) host, shared
    shares: Sequence[float],
    out: torch.Tensor,  # (n,) scratch
) -> torch.Tensor:
    """Σ share · row, added in this order, in ``out``'s dtype (rows may be narrower).

    A lone row of that dtype with share 1 is returned itself.
    """
    narrow = rows[0].dtype != out.dtype
    if len(rows) == 1 and shares[0] == 1.0 and not narrow:
        return rows[0]
    if narrow:
        out.copy_(rows[0]).mul_(shares[0])
    else:
        torch.mul(rows[0], shares[0], out=out)
    for row, share in zip(rows[1:], shares[1:], strict=True):
        out.add_(row, alpha=share)
    return out


def merge_sparse(
    gradients: Sequence[torch.Tensor],  # each sparse, coalesced
    shares: Sequence[float],
) -> torch.Tensor:
    """Σ share · gradient, sparse and coalesced; a lone one with share 1 is returned itself."""
    if len(gradients) == 1 and shares[0] == 1.0:
        return gradients[0]
    indices = torch.cat([gradient.indices() for gradient in gradients], dim=1)
    values = torch.cat([g.values() * share for g, share in zip(gradients, shares, strict=True)])
    size = gradients[0].shape
    return torch.sparse_coo_tensor(indices, values, size, check_invariants=False).coalesce()


def merge_mixed(
    gradients: Sequence[torch.Tensor],  # sparse and dense ones
    shares: Sequence[float],
    memory: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """Σ share · gradient: sparse if all are, else dense, in ``memory()``."""
    if all(gradient.is_sparse for gradient in gradients):
        return merge_sparse(gradients, shares)
    if not any(gradient.is_sparse for gradient in gradients):
        return merge(gradients, shares, memory())
    out = memory().zero_()
    for gradient, share in zip(gradients, shares, strict=True):
        out.add_(gradient, alpha=share)
    return out
