"""Measuring what objects do, by putting something around their methods.

Only where a profile is wanted: elsewhere the methods are what they are, and nobody asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtrain.profiling.phases import Phase
from hybridtrain.profiling.time_spans import Track


def timed(track: Track, owner: Any, method: str, phase: Phase, name: str = "") -> None:
    """From now on each call of ``owner.method`` is a span."""
    original = getattr(owner, method, None)
    if original is None or hasattr(original, "measured"):
        return
    kind = track.kind_of(name or method, phase)
    begin, end = track.begin, track.end

    def call(*args: Any, **kwargs: Any) -> Any:
        begin(kind)
        try:
            return original(*args, **kwargs)
        finally:
            end()

    call.measured = True  # type: ignore[attr-defined]
    setattr(owner, method, call)


def follow(owner: Any, method: str, then: Callable[[], object]) -> None:
    """Let ``then`` run after every call of ``owner.method``."""
    original = getattr(owner, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then()
        return result

    setattr(owner, method, call)
