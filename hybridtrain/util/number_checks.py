"""Whether what was given for an option is a number that it can be."""

from __future__ import annotations

from typing import TypeGuard


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is one; ``True`` and ``False`` are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
