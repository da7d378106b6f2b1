"""Meetings: everybody brings a payload, everybody gets all of them.

Barriers, broadcasts, reductions and gathers between workers are all made of this one exchange.
Whoever has nothing to do until the others come to a certain place waits there *patiently*: meetings
among the rest go on without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


class BarrierMismatch(Exception):
    """Workers wait for each other in different places; they would wait for ever."""


@dataclass
class Barrier(Generic[T]):
    """Collects one item from each of the expected workers.

    Args:
        expected: who takes part; may shrink while a meeting is under way.
    """

    expected: set[int]
    _items: dict[int, T] = field(default_factory=dict)
    _tags: dict[int, str] = field(default_factory=dict)
    _patient: dict[str, dict[int, T]] = field(default_factory=dict)  # tag -> who waits there

    def bring(self, worker: int, tag: str, item: T, patient: bool = False) -> None:
        """One worker arrives.

        Raises:
            MeetingMismatch: if another worker is waiting here for something else.
        """
        if patient:
            self._patient.setdefault(tag, {})[worker] = item
            return
        for other, known in self._tags.items():
            if known != tag:
                raise BarrierMismatch(
                    f"worker {worker} waits in '{tag}' while worker {other} waits in '{known}'"
                )
        self._items[worker], self._tags[worker] = item, tag

    def leave(self, worker: int) -> None:
        """The worker is gone: nobody waits for it, and what it brought does not count."""
        self.expected.discard(worker)
        self._items.pop(worker, None)
        self._tags.pop(worker, None)
        for items in self._patient.values():
            items.pop(worker, None)

    def call(self) -> list[int]:
        """Take the patient workers out of the meeting, and return them: they will come again."""
        called = sorted(self._resting)
        self._patient.clear()
        return called

    @property
    def items(self) -> list[T]:
        """Payloads of the workers that do not wait patiently."""
        return list(self._items.values())

    @property
    def waiting(self) -> frozenset[int]:
        """Who has arrived."""
        return frozenset(self._items) | self._resting

    @property
    def n_waiting(self) -> int:
        """How many have arrived."""
        return len(self._items) + sum(map(len, self._patient.values()))

    @property
    def _resting(self) -> frozenset[int]:
        return frozenset(worker for items in self._patient.values() for worker in items)

    def close(self) -> dict[int, T] | None:
        """All items in the order of the workers' numbers once everyone is there, else nothing."""
        for tag, items in self._patient.items():
            if items and self.expected <= items.keys():
                return _in_order(self._patient.pop(tag))
        if not self._items or not self.expected <= self._items.keys() | self._resting:
            return None
        items = _in_order(self._items)
        self._items.clear()
        self._tags.clear()
        return items

    def dissolve(self) -> None:
        """Forget who has come."""
        self._items.clear()
        self._tags.clear()
        self._patient.clear()


def _in_order(items: dict[int, T]) -> dict[int, T]:
    return {worker: items[worker] for worker in sorted(items)}
