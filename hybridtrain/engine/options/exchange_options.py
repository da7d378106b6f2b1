"""Options of each exchange: types, ranges, defaults.

They lie apart from what exchanges do, so that they can be checked without importing torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

from hybridtrain.util.option_types import (
    FILLED,
    Above0,
    Checked,
    Natural,
    Part,
    Positive,
    Several,
    Share,
)

Compress = Literal["int8", "int4", "topk", "power_sgd"] | Mapping[str, Any] | Part | None


class _Then(TypedDict):
    then: Positive
    at: Positive | Literal["first_decay"]


class Then(_Then, total=False):
    """``first`` (1) steps between two exchanges until step ``at``, then ``then``."""

    first: Positive


class BySpeed(TypedDict):
    """As many steps as each worker makes while the fastest makes ``longest``."""

    longest: Positive
    seconds_per_step: Annotated[
        Sequence[Above0], FILLED, "as a run with every worker at work has measured (service_s)"
    ]


Every = Positive | Several | Then | BySpeed


class ExchangeOptions(Checked):
    """The base of each exchange's options; some exchanges have none."""

    prefix = "exchange."


@dataclass(repr=False)
class GradientOptions(ExchangeOptions):
    """How gradients are encoded.

    Args:
        compress: one of :data:`hybridtrain.engine.exchanges.compression.CODECS`.
    """

    compress: Compress = None


@dataclass(frozen=True)
class InPlaceOptions(ExchangeOptions):
    """Where optimizer state lies.

    Args:
        optimizer_state: ``"shared"``: moments lie where all workers step them, once, and steps are
            counted together. ``"private"``: every worker's optimizer has its own, as in processes
            that have only a model in shared memory; a checkpoint has worker 0's, and all go on
            with it.
    """

    optimizer_state: Literal["shared", "private"] = "shared"


@dataclass(repr=False)
class MovementOptions(ExchangeOptions):
    """How often, and how it is encoded.

    Args:
        every: a worker's own steps between two exchanges. A list: those of each worker. ``then``,
            ``at``, ``first`` (1): ``first`` until step ``at``, or until the learning rate falls for
            the first time, then ``then``. ``longest``, ``seconds_per_step``: as many as each
            worker makes while the fastest makes ``longest``.
        compress: how movements are encoded, one of
            :data:`hybridtrain.engine.exchanges.compression.CODECS`.
    """

    every: Every = 8
    compress: Compress = None


@dataclass(repr=False)
class StreamingOptions(ExchangeOptions):
    """How often, in how many parts, and how these are mixed.

    Args:
        every: H, a worker's own steps between two exchanges of a fragment.
        fragments: P, how many parts the parameters are cut into.
        overlap: τ, steps that a worker makes before it takes over what comes back.
        mix: α, the share of its own parameters that a worker keeps then.
        compress: one of :data:`hybridtrain.engine.exchanges.compression.CODECS`.
    """

    every: Positive = 30
    fragments: Positive = 3
    overlap: Natural = 1
    mix: Share = 0.5
    compress: Compress = None


@dataclass(repr=False)
class AccumulatedOptions(ExchangeOptions):
    """How often each way.

    Args:
        n_push: steps between two pushes.
        n_fetch: steps between two fetches.
        compress: how sums are encoded, one of
            :data:`hybridtrain.engine.exchanges.compression.CODECS`.
        fetch: ``"overlapped"``: computing goes on meanwhile; ``None``: the worker waits.
    """

    n_push: Positive = 1
    n_fetch: Positive = 1
    compress: Compress = None
    fetch: Literal["overlapped"] | None = None


@dataclass
class ElasticOptions(ExchangeOptions):
    """How often, and how strong the force is.

    Args:
        every: τ, a worker's own steps between two exchanges.
        alpha: α; ``None``: ``beta`` divided by the number of workers.
        beta: by how much of the way the centre moves where all workers pull at once.
    """

    every: Positive = 10
    alpha: Share | None = None
    beta: Share = 0.9


# ---- what the workers of one host do together, between two exchanges with other hosts ----------


class InsideOptions(Checked):
    """``every``: steps between two means of parameters; 0: gradients are averaged."""

    prefix = "inside."
    every: int


@dataclass(frozen=True)
class MeanGradients(InsideOptions):
    """The workers of a host step with the mean of their gradients."""

    every: int = field(default=0, init=False)


@dataclass(frozen=True)
class MeanParameters(InsideOptions):
    """The workers of a host take the mean of their parameters now and then.

    Args:
        every: a worker's own steps between two means.
    """

    every: Positive = 8


INSIDE: dict[str, type[InsideOptions]] = {"hybrid": MeanGradients, "local_sgd": MeanParameters}

EXCHANGE_OPTIONS: dict[str, type] = {
    "gradient": GradientOptions,
    "in_place": InPlaceOptions,
    "movement": MovementOptions,
    "streaming": StreamingOptions,
    "accumulated": AccumulatedOptions,
    "elastic": ElasticOptions,
    "sign_sgd": ExchangeOptions,
    "summed": ExchangeOptions,
}
