"""Exchanges: workers hand over gradients, movements or nothing, and take parameters back.

Tensors and arithmetic only: no messages, no processes, no Lightning, and no policy's decisions.
"""

from hybridtrain.engine.exchanges.exchange import (
    Await,
    Exchange,
    Leaving,
    Local,
    LocalExchange,
    MergeRule,
    Offer,
    StepFactory,
    WorkerGradients,
    evaluates,
)
from hybridtrain.engine.exchanges.known import EXCHANGES, ExchangeSpec, exchange_of, make_exchange
from hybridtrain.engine.exchanges.own_steps import StepsOwnParameters
from hybridtrain.engine.exchanges.requirements import (
    Inside,
    Requirements,
    begin_policy,
    check_visits,
)

__all__ = [
    "EXCHANGES",
    "Await",
    "Exchange",
    "ExchangeSpec",
    "Inside",
    "Leaving",
    "Local",
    "LocalExchange",
    "MergeRule",
    "Offer",
    "Requirements",
    "StepFactory",
    "StepsOwnParameters",
    "WorkerGradients",
    "begin_policy",
    "check_visits",
    "evaluates",
    "exchange_of",
    "make_exchange",
]
