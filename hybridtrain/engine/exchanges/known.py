"""Exchanges by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hybridtrain.engine.exchanges.accumulated import Accumulated
from hybridtrain.engine.exchanges.compression import CODECS, Codec
from hybridtrain.engine.exchanges.elastic import Elastic
from hybridtrain.engine.exchanges.exchange import Exchange
from hybridtrain.engine.exchanges.gradient import Gradient, InPlace
from hybridtrain.engine.exchanges.movement import Movement
from hybridtrain.engine.exchanges.sign_sgd import SignSGD
from hybridtrain.engine.exchanges.streaming import Streaming
from hybridtrain.engine.exchanges.summed import Summed
from hybridtrain.engine.policies import Policy
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import choose

ExchangeSpec = str | Mapping[str, Any] | Exchange | None  # a name, {"name": ...}, an object

EXCHANGES: dict[str, Callable[..., Exchange]] = {
    "gradient": Gradient,
    "in_place": InPlace,
    "movement": Movement,
    "streaming": Streaming,
    "accumulated": Accumulated,
    "elastic": Elastic,
    "sign_sgd": SignSGD,
    "summed": Summed,
}


def make_exchange(given: ExchangeSpec) -> Exchange:
    """An exchange from its name, its name and parameters, or the object itself.

    Raises:
        UserError: if the name is not known, or a codec's, or the parameters make no sense.
    """
    name = given.get("name") if isinstance(given, Mapping) else given
    if name in [*CODECS] or isinstance(given, Codec):
        raise UserError(
            f"exchange={given} was given, but it encodes what an exchange hands over; use "
            f"exchange={{name: gradient, compress: {given}}}"
        )
    return choose("exchange", given, EXCHANGES, Exchange)  # type: ignore[type-abstract]


def exchange_of(policy: Policy, given: ExchangeSpec = None) -> Exchange:
    """The one that was given, or else what goes with the policy."""
    return make_exchange(getattr(policy, "exchange", "gradient") if given is None else given)
