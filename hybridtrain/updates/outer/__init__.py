"""Optimizers of the masters for what workers hand over that train on their own.

No gradients are computed where they step: what they are given are movements and forces.
"""

from hybridtrain.updates.outer.outer_optimizers import DelayedNesterov, Sum

__all__ = ["DelayedNesterov", "Sum"]
