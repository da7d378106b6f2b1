"""SignSGD with majority vote: a worker hands over one bit for each element of its gradient.

Bernstein, Wang, Azizzadenesheli, Anandkumar, *signSGD*, ICML 2018 (arXiv:1802.04434), section 5:
the optimizer steps with sign(Σ sign g); SGD makes the paper's step of a learning rate in each
element, and its momentum that of Signum. The sign of zero counts as positive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch

from hybridtrain.engine.exchanges.compression import pack, packed_bytes, unpack
from hybridtrain.engine.exchanges.exchange import MergeRule, WorkerGradients, by_parameter
from hybridtrain.engine.exchanges.gradient import Gradient


@dataclass(frozen=True)
class Signs:
    """Encodes the sign of each element."""

    error_decay: ClassVar[float | None] = None

    def n_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return packed_bytes(prod(shape), 1)

    def encode(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return pack((values.flatten() >= 0).to(torch.uint8), 1)

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        signs = unpack(encoded, out.numel(), 1).to(out.dtype).mul_(2).sub_(1)
        out.copy_(signs.view(out.shape))


@dataclass(frozen=True)
class Majority:
    """The sign that most workers have; 0 where as many have the one as the other."""

    least: ClassVar[int] = 1

    def merge(self, parts: Sequence[WorkerGradients]) -> list[torch.Tensor | None]:
        return by_parameter(parts, lambda stack: stack.sign_().sum(0).sign_())


@dataclass(repr=False)
class SignSGD(Gradient):
    """The signs of every step's gradient are handed over."""

    update: ClassVar[str | MergeRule] = Majority()
    compress: Any = Signs()
