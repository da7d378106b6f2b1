"""Whether what was given for an option is a number that it can be."""

from __future__ import annotations

from typing import Any, TypeGuard

from hybridtrain.errors import UserError


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is one; ``True`` and ``False`` are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole(name: str, value: Any, least: int, also: str = "") -> int:
    """The value, if it is a whole number from ``least`` on; ``also``: what else is allowed.

    Raises:
        UserError: if not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(
            f"{name}={value!r} was given; it must be a whole number from {least} on{also}"
        )
    return value


def positive(name: str, value: Any) -> int:
    """The value, if it is a whole number from 1 on.

    Raises:
        UserError: if not.
    """
    return whole(name, value, 1)
