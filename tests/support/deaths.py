"""Shared words that note each write, so that a test can have a process die at any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Died(BaseException):
    """The process is gone, before what it was about to write. Nothing catches it."""


class Words:
    """As a memoryview of words, but ``write`` is called before each write.

    Args:
        view: of the words.
        write: raises :class:`Died` where the process dies.
    """

    def __init__(self, view: memoryview, write: Callable[[], object]) -> None:
        self._view, self._write = view, write

    def __getitem__(self, key: Any) -> Any:
        return self._view[key]

    def __setitem__(self, key: int, value: Any) -> None:
        self._write()
        self._view[key] = value

    def __len__(self) -> int:
        return len(self._view)

    def cast(self, kind: str) -> Any:
        """The same words as another kind."""
        return Words(self._view.cast(kind), self._write)  # type: ignore[call-overload]


def dies_at(number: int) -> Callable[[], None]:
    """What :class:`Words` call: the process dies at this write, from 0."""
    left = iter([False] * number)

    def write() -> None:
        if next(left, True):
            raise Died

    return write
