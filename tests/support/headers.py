"""What the header of every record says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridtrain.engine.recording.recorder import KINDS


def header(workers: int, kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """The header of a run with so many workers that was started from Python."""
    return {
        "kinds": list(kinds),
        "workers": workers,
        "threads": 1,
        "server_threads": 1,
        "policy": "WaitForAll()",
        "requirements": {"parameters": "masters"},
        "versions": {},
        "code": {},
        "about": {},
    }
