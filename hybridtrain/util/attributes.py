"""Attributes that have another value for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(owner: object, **values: Any) -> Iterator[None]:
    """Give attributes that the owner has these values until the context ends."""
    former = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in former.items():
            setattr(owner, name, value)
