"""When does a contribution count, and who may go on? One small state machine for each answer."""

from hybridtrain.policies.asynchronous import OnArrival
from hybridtrain.policies.hybrid import All
from hybridtrain.policies.known import POLICIES, make_policy
from hybridtrain.policies.policy import Policy

__all__ = ["POLICIES", "All", "OnArrival", "Policy", "make_policy"]
