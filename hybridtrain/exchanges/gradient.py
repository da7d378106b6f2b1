"""Exchanges in which the optimizer belongs to all: each step's gradient, or each step in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.errors import UserError
from hybridtrain.exchanges.exchange import Parameters


@dataclass(frozen=True)
class Gradient:
    """Every step's gradient is handed over, and the newest masters are taken back."""

    parameters: ClassVar[Parameters] = "read"
    update: ClassVar[str] = "user"
    steps: ClassVar[int] = 1


@dataclass(frozen=True)
class InPlace:
    """Workers step the masters themselves (Hogwild!).

    Args:
        optimizer_state: ``"shared"``: moments lie where all workers step them, once, and steps are
            counted together. ``"private"``: every worker's optimizer has its own, as in processes
            that have only a model in shared memory; a checkpoint has worker 0's, and all go on
            with it.

    Raises:
        UserError: for anything else.
    """

    optimizer_state: Literal["shared", "private"] = "shared"
    parameters: ClassVar[Parameters] = "shared"
    update: ClassVar[str] = "user"
    steps: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.optimizer_state not in ("shared", "private"):
            raise UserError(
                f"exchange.optimizer_state={self.optimizer_state} was given; it must be shared or "
                "private"
            )
