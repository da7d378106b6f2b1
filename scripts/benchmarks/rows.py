"""Rows that a part yields: our figure, a baseline's, and the ratio that is the goal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Goal:
    """The least value of a ratio, and the value to aim at.

    ``of``: ``"speed"``: how many times faster ours is (at least so much); ``"time"``: how many
    times as long ours takes (at most so much).
    """

    least: float | None = None
    aim: float | None = None
    of: str = "speed"

    def met(self, ratio: float) -> bool | None:
        """Whether the ratio is good enough; ``None`` where nothing was asked."""
        if self.least is None:
            return None
        return ratio >= self.least if self.of == "speed" else ratio <= self.least

    def __str__(self) -> str:
        if self.least is None:
            return ""
        sign = "≥" if self.of == "speed" else "≤"
        return f"{sign} {self.least:g}" + ("" if self.aim is None else f" (aim {self.aim:g})")


NOTHING_ASKED = Goal()


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. ``ours`` and ``theirs``: medians, in ``unit``; less is better.

    ``ratios``: of each pair; ``theirs / ours`` where the goal is of speed, else ``ours / theirs``.
    Where there is nothing to compare with, ``baseline``, ``theirs`` and ``ratios`` are empty.
    """

    part: str
    work: str
    method: str
    ours: float
    unit: str
    baseline: str = ""
    theirs: float | None = None
    ratios: tuple[float, ...] = ()
    goal: Goal = NOTHING_ASKED
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """The median of the pairs."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def key(self) -> tuple[str, str, str, str]:
        """By which the same row is found in another result."""
        return self.part, self.work, self.method, self.baseline

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = {"kind": "row", **asdict(self), "ratio": self.ratio}
        if self.ratios:
            met = self.goal.met(self.ratio or 0.0)
            found |= {"lowest": min(self.ratios), "highest": max(self.ratios), "met": met}
        return found


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that was not measured, and why."""

    part: str
    work: str
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": "skipped", **asdict(self)}


def compare(
    names: tuple[str, str, str, str],
    ours: Sequence[float],
    theirs: Sequence[float],
    unit: str,
    goal: Goal = NOTHING_ASKED,
    note: str = "",
) -> Row:
    """A row of pairs: ``names`` are part, work, method, baseline; figures are in ``unit``."""
    part, work, method, baseline = names
    pairs = zip(ours, theirs, strict=True)
    ratios = tuple(b / a if goal.of == "speed" else a / b for a, b in pairs)
    own, other = statistics.median(ours), statistics.median(theirs)
    return Row(part, work, method, own, unit, baseline, other, ratios, goal, note)


def row_of(content: dict[str, Any]) -> Row | Skipped:
    """Read a row that ``as_dict`` has written."""
    if content["kind"] == "skipped":
        return Skipped(content["part"], content["work"], content["reason"])
    names = Row.__dataclass_fields__
    kept = {name: value for name, value in content.items() if name in names}
    return Row(**kept | {"goal": Goal(**kept["goal"]), "ratios": tuple(kept["ratios"])})
