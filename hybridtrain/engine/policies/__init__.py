"""Policies: small state machines that decide when gradients are applied and workers released.

A policy maps facts to orders (:mod:`hybridtrain.engine.protocol.facts`); it sees no tensors,
processes or clocks.
"""

from __future__ import annotations

from hybridtrain.engine.policies.basic import (
    LockFree,
    NotTooLate,
    OnArrival,
    RoundRobin,
    WaitForAll,
)
from hybridtrain.engine.policies.bounded_staleness import BoundedStaleness
from hybridtrain.engine.policies.first_k import Deadline, FirstK, Softsync
from hybridtrain.engine.policies.grace import Grace
from hybridtrain.engine.policies.pipe_sgd import PipeSGD
from hybridtrain.engine.policies.policy import Needs, Policy
from hybridtrain.engine.policies.registry import (
    POLICIES,
    STRATEGIES,
    Spec,
    check_no_scheme,
    make_policy,
)
from hybridtrain.engine.policies.switch import Switch
from hybridtrain.engine.protocol.facts import (
    Accumulate,
    Apply,
    Began,
    Drop,
    Fact,
    Joined,
    Left,
    Order,
    Pushed,
    Ready,
    Release,
    ReleaseThenApply,
    SetTimer,
    TimerFired,
    Waiting,
)

__all__ = [
    "POLICIES",
    "STRATEGIES",
    "Accumulate",
    "Apply",
    "Began",
    "BoundedStaleness",
    "Deadline",
    "Drop",
    "Fact",
    "FirstK",
    "Grace",
    "Joined",
    "Left",
    "LockFree",
    "Needs",
    "NotTooLate",
    "OnArrival",
    "Order",
    "PipeSGD",
    "Policy",
    "Pushed",
    "Ready",
    "Release",
    "ReleaseThenApply",
    "RoundRobin",
    "SetTimer",
    "Softsync",
    "Spec",
    "Switch",
    "TimerFired",
    "WaitForAll",
    "Waiting",
    "check_no_scheme",
    "make_policy",
]
