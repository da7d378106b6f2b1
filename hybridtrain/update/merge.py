"""The weighted mean of the workers' gradient rows, a stretch at a time.

Legend: P elements of one dtype's buffer, W workers, n elements of a stretch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def merge(
    rows: Sequence[torch.Tensor],  # each (n,) host, shared
    shares: Sequence[float],
    out: torch.Tensor,  # (n,) scratch
) -> torch.Tensor:
    """Σ share · row, added in the order given. A lone full share returns its row, not a copy."""
    if len(rows) == 1 and shares[0] == 1.0:
        return rows[0]
    torch.mul(rows[0], shares[0], out=out)
    for row, share in zip(rows[1:], shares[1:], strict=True):
        out.add_(row, alpha=share)
    return out
