"""Optimizers that are told how late a gradient is, and the update that tells them.

What only shortens a step or changes a gradient before any optimizer is a correction, and lives in
``updates/staleness``.
"""

from hybridtrain.updates.delay_tolerant.optimizers import (
    AdaDelay,
    AdaptiveRevision,
    AsyncAdaDA,
    DelayTolerant,
)
from hybridtrain.updates.delay_tolerant.update import DelayTolerantUpdate

__all__ = ["AdaDelay", "AdaptiveRevision", "AsyncAdaDA", "DelayTolerant", "DelayTolerantUpdate"]
