"""The contract of an update, and what all kinds of it share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hybridtrain.messages import Clip
from hybridtrain.update.contribution import Contribution


class Update(Protocol):
    """One optimizer on the master parameters.

    ``name`` is that of the optimizer's class.
    """

    name: str

    @property
    def n_groups(self) -> int:
        """How many parameter groups it has."""
        ...

    def step(self, contributions: Sequence[Contribution], clip: Clip | None) -> None:
        """Merge the rows, clip the result, step the masters. Not thread-safe."""
        ...

    def set_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take new hyper-parameters, one dictionary per parameter group."""
        ...

    def state(self) -> dict[int, dict[str, Any]]:
        """The optimizer's state per parameter, numbered and shaped as ``torch`` would save it."""
        ...


def clip_factor(norm: torch.Tensor, limit: float) -> float:
    """What the gradient is multiplied with so that its norm is at most ``limit``.

    The formula of ``torch.nn.utils.clip_grad_norm_``, its 1e-6 included.
    """
    return float(torch.clamp(limit / (norm + 1e-6), max=1.0))
