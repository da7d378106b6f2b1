"""One case of a comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Findings = dict[str, Any]  # nested: texts, numbers, tensors


def nothing(kept: Path) -> None:
    """Nothing has to be kept."""


@dataclass(frozen=True)
class Case:
    """``look(kept, folder)`` is done when recording and when comparing; ``make(kept)`` only before.

    ``kept``: what the recording leaves for later, and must not be changed; ``folder``: an empty one
    to work in, which is removed.
    """

    what: str
    strategy: str
    task: str
    look: Callable[[Path, Path], Findings]
    make: Callable[[Path], None] = nothing

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.what}/{self.strategy}/{self.task}"
