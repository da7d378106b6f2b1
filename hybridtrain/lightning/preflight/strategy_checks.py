"""Refuse or warn of options that contradict the strategy's policy or exchange."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.callbacks import StochasticWeightAveraging, WeightAveraging
from pytorch_lightning.utilities.model_helpers import is_overridden

from hybridtrain.errors import UserError
from hybridtrain.exchanges import Exchange, Requirements
from hybridtrain.exchanges.compression import codec_of
from hybridtrain.lightning.step.worker_step import WorkerStep
from hybridtrain.updates.staleness import Correction

if TYPE_CHECKING:
    from hybridtrain.lightning.strategy import HybridStrategy

# ---- the option transport_dtype: rounding of gradients between device and host memory -----------

_DTYPES = {None: None, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Transport:
    """``dtype``: float32 gradients are rounded to it for the transfer."""

    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, dtype: Any) -> Transport:
        """Make it from the option's checked value."""
        return cls(_DTYPES[dtype])

    def check(self, strategy: Any, trainer: Any, requirements: Requirements) -> None:
        """Check it against the other options.

        Raises:
            UserError: naming the options.
        """
        if self.dtype is not None and strategy.correction is not None:
            raise UserError(
                f"transport_dtype=bf16 was given with correction={strategy.correction}, which "
                "changes gradients where they lie and would round them once more; leave one out"
            )
        if self.dtype is not None and codec_of(strategy.exchange) is not None:
            raise UserError(
                f"transport_dtype=bf16 was given with exchange={strategy.exchange}, which encodes "
                "what workers hand over, from the dtype that it has; leave one out"
            )
        if self.dtype is not None and requirements.in_place:
            raise UserError(
                "transport_dtype=bf16 was given, but workers without a lock send no gradients; "
                "leave it out, or use strategy=async"
            )


_NOTEWORTHY = 0.5  # updates: as stale as with one and a half workers


def check_own_parameters(strategy: HybridStrategy, trainer: Any) -> None:
    """Check the options beside an exchange with own parameters in each worker.

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


def _check_module(strategy: HybridStrategy, trainer: Any, asked: str) -> None:
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


def advise_on_interval(exchange: Exchange, steps: Sequence[WorkerStep]) -> None:
    """After the first epoch, warn if the interval between exchanges is longer than it was."""
    made = max((step.count for step in steps), default=None)
    if exchange.parameters == "own" and made is not None and exchange.steps > made:
        rank_zero_warn(
            f"a worker has made {made} steps in the first epoch, and exchange={exchange} makes an "
            f"exchange every {exchange.steps}: workers exchange only at the end of an epoch; "
            "give a smaller interval, or see that this is meant"
        )


# ---- workers that write without a lock -----------------------------------------------------------


def check_lock_free(trainer: Any, n_workers: int, correction: Correction | None) -> None:
    """Check the options beside workers that write the shared parameters themselves.

    Raises:
        UserError: naming the option, and what to do.
    """
    if not isinstance(trainer.accelerator, CPUAccelerator):
        name = type(trainer.accelerator).name()
        raise UserError(
            f"accelerator={name!r} was given, but workers without a lock write to parameters in "
            "host memory; use Trainer(accelerator='cpu'), or strategy=async"
        )
    if correction is not None:
        raise UserError(
            f"correction={correction} was given, but under hogwild no gradient is ever sent that "
            "could be corrected; leave it out, or use strategy=async"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging) and n_workers > 1:
            raise UserError(
                f"the callback {type(callback).__name__} was given, which swaps parameters, but "
                f"these are shared by all {n_workers} workers, each of which would swap them; "
                "leave it out, or use strategy=async"
            )


# ---- late gradients ------------------------------------------------------------------------------


def check_correction(
    correction: Correction | None, requirements: Requirements, policy: Any
) -> None:
    """Warn where a correction has no effect; a sweep over strategies may keep it."""
    if correction is not None and requirements.whole_rounds:
        warnings.warn(
            f"correction={correction} was given, but under policy {policy} no gradient is ever "
            "late, so it changes nothing",
            stacklevel=2,
        )


def advise(optimizers: Iterable[torch.optim.Optimizer], staleness: float) -> None:
    """Warn of a momentum in addition to that of late gradients.

    Gradients that are tau updates late on average act like a momentum of tau / (1 + tau): for M
    workers of random speed 1 - 1/M (Mitliagkas et al., *Asynchrony begets Momentum*, 2016,
    arXiv:1605.09774, theorem 3).
    """
    momenta = [(o, g.get("momentum")) for o in optimizers for g in o.param_groups]
    for optimizer, momentum in momenta:
        if staleness >= _NOTEWORTHY and isinstance(momentum, float) and momentum > 0:
            warnings.warn(
                f"gradients are {staleness:.1f} updates late on average, which acts like a "
                f"momentum of {staleness / (1 + staleness):.2f} on top of the {momentum:g} of "
                f"{type(optimizer).__name__} (Mitliagkas et al. 2016); try a smaller momentum or "
                "learning rate, or strategy.correction=gap_aware",
                stacklevel=2,
            )
            return
