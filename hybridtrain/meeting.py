"""Meetings: everybody brings a payload, everybody gets all of them.

Barriers, broadcasts, reductions and gathers between workers are all made of this one exchange.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


class MeetingMismatch(Exception):
    """Workers wait for each other in different places; they would wait for ever."""


@dataclass
class Meeting(Generic[T]):
    """Collects one item from each of the expected workers.

    Args:
        expected: who takes part; may shrink while a meeting is under way.
    """

    expected: set[int]
    _items: dict[int, T] = field(default_factory=dict)
    _tags: dict[int, str] = field(default_factory=dict)

    def bring(self, worker: int, tag: str, item: T) -> None:
        """One worker arrives.

        Raises:
            MeetingMismatch: if another worker is waiting here for something else.
        """
        for other, known in self._tags.items():
            if known != tag:
                raise MeetingMismatch(
                    f"worker {worker} waits in '{tag}' while worker {other} waits in '{known}'"
                )
        self._items[worker], self._tags[worker] = item, tag

    def leave(self, worker: int) -> None:
        """The worker is gone: nobody waits for it, and what it brought does not count."""
        self.expected.discard(worker)
        self._items.pop(worker, None)
        self._tags.pop(worker, None)

    @property
    def waiting(self) -> frozenset[int]:
        """Who has arrived."""
        return frozenset(self._items)

    def close(self) -> list[T] | None:
        """All items in the order of the workers' numbers once everyone is there, else nothing."""
        if not self._items or not self.expected <= self._items.keys():
            return None
        items = [self._items[worker] for worker in sorted(self._items)]
        self.dissolve()
        return items

    def dissolve(self) -> None:
        """Forget who has come."""
        self._items.clear()
        self._tags.clear()
