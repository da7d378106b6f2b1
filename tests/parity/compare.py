"""How near two runs are: to the bit, within rounding, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from tests.parity.case import Grade

Seen = Mapping[str, Any]  # dotted name -> leaf


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where two runs are not equal to the bit.

    ``size`` is relative to the largest element of the reference; ``None`` where it is no number.
    """

    where: str
    grade: Grade
    text: str
    size: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """All differences, and what follows from them."""

    compared: int
    differences: tuple[Difference, ...]

    @property
    def grade(self) -> Grade:
        return max((d.grade for d in self.differences), default=Grade.BITWISE)

    @property
    def largest(self) -> float:
        """The largest relative difference among numbers."""
        return max((d.size for d in self.differences if d.size is not None), default=0.0)

    def explain(self, limit: int = 12) -> str:
        """The worst first."""
        ranked = sorted(self.differences, key=lambda d: (-d.grade, -(d.size or 0.0)))
        lines = [f"  {d.where}: {d.text}" for d in ranked[:limit]]
        more = len(ranked) - limit
        return "\n".join([*lines, *([f"  … and {more} more"] if more > 0 else [])])


def compare(
    ours: Seen, theirs: Seen, facets: Sequence[str], ignore: Sequence[str], rtol: float
) -> Verdict:
    """Every name that both or only one of them has, where it matches a facet."""
    names = [
        name
        for name in sorted(ours.keys() | theirs.keys())
        if _matches(name, facets) and not _matches(name, ignore)
    ]
    found = [_compare_one(name, ours, theirs, rtol) for name in names]
    return Verdict(len(names), tuple(d for d in found if d is not None))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _compare_one(name: str, ours: Seen, theirs: Seen, rtol: float) -> Difference | None:
    if name not in ours or name not in theirs:
        who = "only ours" if name in ours else "only the reference"
        value = ours.get(name, theirs.get(name))
        return Difference(name, Grade.DIFFERS, f"{who} has it: {_short(value)}")
    one, other = ours[name], theirs[name]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _compare_tensors(name, one, other, rtol)
    if _is_number(one) and _is_number(other):
        as_tensors = torch.tensor(one), torch.tensor(other)
        return _compare_tensors(name, *(t.to(torch.float64) for t in as_tensors), rtol)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return _compare_traces(name, one, other)
    if type(one) is type(other) and one == other:
        return None
    return Difference(name, Grade.DIFFERS, f"{_short(one)} instead of {_short(other)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _compare_tensors(
    name: str, one: torch.Tensor, other: torch.Tensor, rtol: float
) -> Difference | None:
    if one.shape != other.shape or one.dtype != other.dtype or one.is_sparse != other.is_sparse:
        text = f"{one.dtype} {tuple(one.shape)} instead of {other.dtype} {tuple(other.shape)}"
        return Difference(name, Grade.DIFFERS, text)
    if one.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    if torch.equal(one, other) or one.numel() == 0:
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    same = (one == other) | (one.isnan() & other.isnan())
    if bool(same.all()):
        return None
    scale = float(other.abs().max())
    size = float((one - other)[~same].abs().max()) / scale if scale > 0 else float("inf")
    grade = Grade.ROUNDING if size <= rtol else Grade.DIFFERS  # NaN is not <= anything
    return Difference(name, grade, f"differs by {size:.1e} of its scale", size)


def _compare_traces(name: str, one: tuple[Any, ...], other: tuple[Any, ...]) -> Difference | None:
    if one == other:
        return None
    pairs = zip(one, other, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    text = f"entry {at} of {len(one)} is {one[at : at + 3]} instead of {other[at : at + 3]}"
    return Difference(name, Grade.DIFFERS, text)


def _short(value: Any) -> str:
    text = f"tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= 200 else text[:200] + "…"
