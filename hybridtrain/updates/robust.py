"""Merge rules that bear workers whose gradients are garbage.

Yin, Chen, Ramchandran, Bartlett, *Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates*, ICML 2018 (arXiv:1803.01498), definitions 1 and 2. Workers count alike, however
many samples they have, as the paper's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from hybridtrain.exchanges.merge import MergeRule, WorkerGradients, by_parameter
from hybridtrain.util.option_types import Checked, Range


@dataclass(frozen=True)
class Median:
    """The coordinate-wise median: of an even number of workers, the mean of the middle two."""

    least: ClassVar[int] = 3

    def merge(self, parts: Sequence[WorkerGradients]) -> list[torch.Tensor | None]:
        """It bears garbage of less than half of the workers."""
        return by_parameter(parts, lambda stack: _middle(stack, (len(stack) - 1) // 2))


@dataclass(frozen=True)
class TrimmedMean(Checked):
    """The coordinate-wise mean without the ``trim`` share of the largest and of the smallest.

    Args:
        trim: β, the share of the workers that is left out at each end; of fewer workers than
            1 / β, one at each end.
    """

    prefix: ClassVar[str] = "update."
    least: ClassVar[int] = 3
    trim: Annotated[float, Range(0, 0.5, "()")] = 0.2

    def merge(self, parts: Sequence[WorkerGradients]) -> list[torch.Tensor | None]:
        """It bears garbage of as many workers as it leaves out at one end."""

        def mean(stack: torch.Tensor) -> torch.Tensor:
            most = (len(stack) - 1) // 2
            return _middle(stack, min(max(1, int(self.trim * len(stack))), most))

        return by_parameter(parts, mean)


def _middle(stack: torch.Tensor, trim: int) -> torch.Tensor:
    """(W, *shape), sorted by worker in each place; the mean without ``trim`` at each end."""
    return stack.sort(0).values[trim : len(stack) - trim].mean(0)


MERGE_RULES: dict[str, Callable[..., MergeRule]] = {
    "median": Median,
    "trimmed_mean": TrimmedMean,
}
