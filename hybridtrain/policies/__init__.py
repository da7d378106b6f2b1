"""When does a contribution count, and who may go on? One small state machine for each answer."""

from hybridtrain.policies.asynchronous import LockFree, OnArrival
from hybridtrain.policies.first_k import FirstK, Softsync
from hybridtrain.policies.hybrid import All
from hybridtrain.policies.in_time import InTime
from hybridtrain.policies.known import POLICIES, Spec, make_policy
from hybridtrain.policies.policy import Policy, Regime
from hybridtrain.policies.ssp import Ssp
from hybridtrain.policies.switch import Switch
from hybridtrain.policies.turns import Turns

__all__ = [
    "POLICIES",
    "All",
    "FirstK",
    "InTime",
    "LockFree",
    "OnArrival",
    "Policy",
    "Regime",
    "Softsync",
    "Spec",
    "Ssp",
    "Switch",
    "Turns",
    "make_policy",
]
