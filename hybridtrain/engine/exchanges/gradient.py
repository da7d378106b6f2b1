"""Exchanges in which the optimizer belongs to all: each step's gradient, or each step in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hybridtrain.engine.exchanges.compression import codec_of, make_codec
from hybridtrain.engine.exchanges.exchange import MergeRule, Parameters, StepFactory
from hybridtrain.engine.options.exchange_options import GradientOptions, InPlaceOptions
from hybridtrain.util.option_types import BriefRepr


class EveryStep:
    """An exchange at each step of a worker."""

    keeps: ClassVar[bool] = False
    steps: ClassVar[int] = 1

    def check(self, n_workers: int, whole_rounds: bool) -> None:
        """It fits any number of workers, and any policy that :func:`begin_policy` admits."""


@dataclass(repr=False)
class Gradient(EveryStep, GradientOptions, BriefRepr):
    """Every step's gradient is handed over, and the newest masters are taken back."""

    parameters: ClassVar[Parameters] = "read"
    update: ClassVar[str | MergeRule] = "user"

    def __post_init__(self) -> None:
        super().__post_init__()
        own = type(self).compress  # of a subclass that is no dataclass itself
        self.compress = make_codec(own if self.compress is None else self.compress)

    def worker_steps(self, factory: StepFactory) -> Any:
        return factory.hand_over_gradients(codec_of(self))


@dataclass(frozen=True)
class InPlace(EveryStep, InPlaceOptions):
    """Workers step the masters themselves (Hogwild!)."""

    parameters: ClassVar[Parameters] = "shared"
    update: ClassVar[str] = "user"

    def worker_steps(self, factory: StepFactory) -> Any:
        return factory.write_to_masters(self.optimizer_state == "private")
