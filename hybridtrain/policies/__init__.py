"""When does a contribution count, and who may go on? One small state machine for each answer."""

from hybridtrain.policies.asynchronous import OnArrival
from hybridtrain.policies.hybrid import All
from hybridtrain.policies.policy import Policy

__all__ = ["All", "OnArrival", "Policy"]
