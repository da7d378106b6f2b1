"""What a worker says while its backward still runs, where the update may begin before it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GradientsReady:
    """These parameters' gradients lie in my row, finite and final; my push will follow.

    It promises what that push will be: for optimizer ``optimizer``, with this ``weight``, without
    clipping or veto. ``groups``: hyper-parameters that have changed since my last push.
    """

    optimizer: int
    numbers: tuple[int, ...]
    weight: float
    groups: tuple[dict[str, Any], ...] | None = None
