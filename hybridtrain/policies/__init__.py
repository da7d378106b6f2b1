"""When does a contribution count, and who may go on? One small state machine for each answer."""

from hybridtrain.policies.bounded_staleness import BoundedStaleness
from hybridtrain.policies.deadline import Deadline
from hybridtrain.policies.first_k import FirstK, Softsync
from hybridtrain.policies.on_arrival import LockFree, OnArrival
from hybridtrain.policies.policy import Needs, Policy
from hybridtrain.policies.registry import POLICIES, Spec, make_policy
from hybridtrain.policies.round_robin import RoundRobin
from hybridtrain.policies.switch import Switch
from hybridtrain.policies.wait_for_all import WaitForAll

__all__ = [
    "POLICIES",
    "BoundedStaleness",
    "Deadline",
    "FirstK",
    "LockFree",
    "Needs",
    "OnArrival",
    "Policy",
    "RoundRobin",
    "Softsync",
    "Spec",
    "Switch",
    "WaitForAll",
    "make_policy",
]
