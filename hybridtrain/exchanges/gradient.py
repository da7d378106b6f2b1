"""Exchanges in which the optimizer belongs to all: each step's gradient, or each step in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.exchanges.exchange import Parameters


@dataclass(frozen=True)
class Gradient:
    """Every step's gradient is handed over, and the newest masters are taken back."""

    parameters: ClassVar[Parameters] = "read"
    update: ClassVar[str] = "user"
    steps: ClassVar[int] = 1


@dataclass(frozen=True)
class InPlace:
    """Workers step the masters themselves, with optimizer state that all share (Hogwild!)."""

    parameters: ClassVar[Parameters] = "shared"
    update: ClassVar[str] = "user"
    steps: ClassVar[int] = 1
