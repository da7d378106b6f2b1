"""An optimizer's state, as the server hands it out for a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Saved:
    """What ``state_dict()`` holds, by slot number, so that it stays valid when the groups change.

    ``parameters`` is keyed by slot numbers; ``others`` is the rest of ``state`` (keys that are no
    parameters); ``groups`` are the hyper-parameters; ``own`` is what the optimizer's class adds.
    """

    parameters: dict[int, dict[str, Any]]
    others: dict[Any, Any] = field(default_factory=dict)
    groups: tuple[dict[str, Any], ...] = ()
    own: dict[str, Any] = field(default_factory=dict)
