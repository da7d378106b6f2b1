"""What cannot be done where workers train parameters of their own: said at the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.callbacks import StochasticWeightAveraging, WeightAveraging
from pytorch_lightning.utilities.model_helpers import is_overridden

from hybridtrain.errors import UserError
from hybridtrain.exchanges import Exchange
from hybridtrain.lightning.run_context import RunContext
from hybridtrain.lightning.step.remote_optimizer import RemoteOptimizer


def check_own_parameters(strategy: RunContext, trainer: Any) -> None:
    """Look at what was asked for beside it.

    Raises:
        UserError: naming the option, and what to do.
    """
    asked = f"exchange={strategy.exchange}"
    fault, state = strategy.on_fault, "each worker's optimizer has a state of its own, which "
    free = not strategy.requirements.whole_rounds
    survives = ("continue", "restart", "stop") if free else ("stop",)
    lost = "the others wait for the steps that it has made since the last exchange"
    for name, choice, allowed, reason in (
        ("on_failure", strategy.on_failure.choice, survives, lost),
        (
            "on_nonfinite",
            fault.nonfinite,
            ("auto", "raise"),
            f"{state}would not be finite any more",
        ),
        ("on_oom", fault.oom, ("raise",), "a worker cannot take back its own steps"),
    ):
        if choice not in allowed:
            raise UserError(
                f"{name}={choice} was given with {asked}, but {reason}; use {name}={allowed[-1]}, "
                "or exchange=gradient"
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
    if strategy.world_size > 1:
        _check_callbacks(trainer, asked)
    _check_module(strategy, trainer, asked)


def _check_module(strategy: RunContext, trainer: Any, asked: str) -> None:
    module = trainer.lightning_module
    check = getattr(strategy.exchange, "check_tensors", None)
    if check is not None and not is_overridden("configure_model", module):
        check(sum(parameter.requires_grad for parameter in module.parameters()))
    if trainer.state.fn == "fit" and not module.automatic_optimization:
        raise UserError(
            f"{type(module).__name__} has automatic_optimization=False, with {asked}, but workers "
            "that train on their own must count their steps alike, and only Lightning's own loop "
            "tells how many a mini-batch has; use automatic optimization, or exchange=gradient"
        )


def _check_callbacks(trainer: Any, asked: str) -> None:
    for callback in trainer.callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise UserError(
                f"{type(callback).__name__} was given with {asked}, but it would average each "
                "worker's own parameters, and what is validated and saved are the masters; leave "
                "it out, or use exchange=gradient"
            )


def advise_on_interval(exchange: Exchange, steps: Sequence[RemoteOptimizer]) -> None:
    """Warn, behind the first epoch, of exchanges that are further apart than that was long."""
    made = max((step.count for step in steps if step.local is not None), default=None)
    if made is not None and exchange.steps > made:
        rank_zero_warn(
            f"a worker has made {made} steps in the first epoch, and exchange={exchange} makes an "
            f"exchange every {exchange.steps}: workers exchange only where all meet, such as the "
            "end of an epoch; give a smaller interval, or see that this is meant"
        )
