"""What cannot be done where workers train parameters of their own: said at the start."""

from __future__ import annotations

from typing import Any

from hybridtrain.errors import UserError


def check_own_parameters(strategy: Any, trainer: Any) -> None:
    """Look at what was asked for beside it.

    Raises:
        UserError: naming the option, and what to do.
    """
    asked = f"exchange={strategy.exchange}"
    if strategy.on_failure.choice != "stop":
        raise UserError(
            f"on_failure={strategy.on_failure.choice} was given with {asked}, but each worker's "
            "optimizer has a state of its own, which is lost with it; use on_failure=stop, or "
            "exchange=gradient"
        )
    if strategy.correction is not None:
        raise UserError(
            f"correction={strategy.correction} was given with {asked}, but no gradient is handed "
            "over that could be corrected; leave it out, or use exchange=gradient"
        )
    if strategy.transport.dtype is not None:
        raise UserError(
            f"transport_dtype=bf16 was given with {asked}, but what workers have come to is handed "
            "over seldom, and would be rounded; leave it out, or use exchange=gradient"
        )
    if trainer.state.fn == "fit" and not trainer.lightning_module.automatic_optimization:
        raise UserError(
            f"{type(trainer.lightning_module).__name__} has automatic_optimization=False, with "
            f"{asked}, but workers that train on their own must count their steps alike, and only "
            "Lightning's own loop tells how many a mini-batch has; use automatic optimization, or "
            "exchange=gradient"
        )
