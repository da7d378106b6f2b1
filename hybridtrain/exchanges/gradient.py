"""Exchanges in which the optimizer belongs to all: each step's gradient, or each step in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.exchanges.exchange import Parameters
from hybridtrain.options.exchange_options import InPlaceOptions


@dataclass(frozen=True)
class Gradient:
    """Every step's gradient is handed over, and the newest masters are taken back."""

    parameters: ClassVar[Parameters] = "read"
    update: ClassVar[str] = "user"
    steps: ClassVar[int] = 1


@dataclass(frozen=True)
class InPlace(InPlaceOptions):
    """Workers step the masters themselves (Hogwild!)."""

    parameters: ClassVar[Parameters] = "shared"
    update: ClassVar[str] = "user"
    steps: ClassVar[int] = 1
