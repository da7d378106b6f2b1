"""Meetings: every worker brings a payload and gets those of all (an all-gather).

Barriers, broadcasts and reductions between workers are built on it. A worker that has nothing to do
until the others reach a certain point waits *patiently*: the others may meet without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


class BarrierMismatch(Exception):
    """Workers wait for each other in different meetings: a deadlock."""


def said(tag: str, names: str) -> str:
    """A meeting in words."""
    return f"{tag}: {names}" if names else tag


@dataclass
class Barrier(Generic[T]):
    """Collects one item from each of the expected workers.

    Args:
        expected: the participants; may shrink during a meeting.
    """

    expected: set[int]
    n_held: int = 0  # meetings at which all have arrived
    _items: dict[int, T] = field(default_factory=dict)
    _tags: dict[int, str] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _patient: dict[str, dict[int, T]] = field(default_factory=dict)  # by tag

    def bring(self, worker: int, tag: str, item: T, patient: bool = False, names: str = "") -> None:
        """One worker arrives; ``names``: what it meets for, which may differ, for messages.

        Raises:
            BarrierMismatch: if another worker waits in a meeting of another tag.
        """
        if patient:
            self._patient.setdefault(tag, {})[worker] = item
            return
        for other, known in self._tags.items():
            if known != tag:
                theirs = said(known, self._names[other])
                raise BarrierMismatch(
                    f"worker {worker} waits in '{said(tag, names)}' while worker {other} waits in "
                    f"'{theirs}'"
                )
        self._items[worker], self._tags[worker], self._names[worker] = item, tag, names

    def leave(self, worker: int) -> None:
        """The worker is gone: drop its item, and do not wait for it."""
        self.expected.discard(worker)
        self._items.pop(worker, None)
        self._tags.pop(worker, None)
        self._names.pop(worker, None)
        for items in self._patient.values():
            items.pop(worker, None)

    def invite(self) -> list[int]:
        """Remove the patient workers, which will arrive again, and return them."""
        invited = sorted(self._resting)
        self._patient.clear()
        return invited

    @property
    def items(self) -> dict[int, T]:
        """The items of workers that do not wait patiently."""
        return dict(self._items)

    @property
    def places(self) -> dict[int, str]:
        """The meetings in which workers wait that are not patient, in words."""
        return {worker: said(tag, self._names[worker]) for worker, tag in self._tags.items()}

    @property
    def waiting(self) -> frozenset[int]:
        """The workers that have arrived."""
        return frozenset(self._items) | self._resting

    @property
    def _resting(self) -> frozenset[int]:
        return frozenset(worker for items in self._patient.values() for worker in items)

    def close(self) -> dict[int, T] | None:
        """All items by worker, ascending, once all have arrived; else nothing."""
        for tag, items in self._patient.items():
            if items and self.expected <= items.keys():
                return dict(sorted(self._patient.pop(tag).items()))
        if not self._items or not self.expected <= self._items.keys() | self._resting:
            return None
        items = dict(sorted(self._items.items()))
        self._items.clear()
        self._tags.clear()
        self.n_held += 1
        return items

    def dissolve(self) -> None:
        """Forget all items."""
        self._items.clear()
        self._tags.clear()
        self._patient.clear()
