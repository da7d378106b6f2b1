"""Exchanges in which the optimizer belongs to all: each step's gradient, or each step in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch

from hybridtrain.exchanges.exchange import Local, Offer, Parameters


class _NothingOfItsOwn:
    """There is nothing to decide: every step goes to the server."""

    steps: ClassVar[int] = 1

    def step(self, local: Local) -> Offer | None:
        return self._never()

    def skip(self, local: Local) -> Offer | None:
        return self._never()

    def take(self, local: Local, newest: list[torch.Tensor]) -> None:
        self._never()

    def flush(self, local: Local) -> Offer | None:
        return self._never()

    def _never(self) -> NoReturn:
        raise AssertionError("workers have no parameters of their own")


@dataclass(frozen=True)
class Gradient(_NothingOfItsOwn):
    """Every step's gradient is handed over, and the newest masters are taken back."""

    parameters: ClassVar[Parameters] = "read"
    update: ClassVar[str] = "user"


@dataclass(frozen=True)
class InPlace(_NothingOfItsOwn):
    """Workers step the masters themselves, with optimizer state that all share (Hogwild!)."""

    parameters: ClassVar[Parameters] = "shared"
    update: ClassVar[str] = "user"
