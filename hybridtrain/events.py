"""Where a policy's facts and orders were in earlier versions, under the names that they had then.

For policies of users' own. They live in :mod:`hybridtrain.policies` now.
"""

from __future__ import annotations

import warnings
from typing import Any

from hybridtrain.protocol import facts

_FORMER = {
    "Parked": "Waiting",
    "Woke": "TimerFired",
    "WakeAt": "SetTimer",
    "Hold": "Accumulate",
}


def __getattr__(name: str) -> Any:
    present = _FORMER.get(name, name)
    if name.startswith("_") or not hasattr(facts, present):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"hybridtrain.events.{name} is called hybridtrain.policies.{present} now",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(facts, present)
