"""A law: the prediction of a theory, the measured figure, and whether the two agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Law(Protocol):
    """A prediction of a theory, and the measured figure."""

    @property
    def group(self) -> str:
        """Its name."""
        ...

    @property
    def case(self) -> str:
        """The computed case."""
        ...

    @property
    def figure(self) -> str:
        """The measured figure."""
        ...

    @property
    def bound(self) -> str:
        """The bound on the figure."""
        ...

    @property
    def holds(self) -> bool:
        """Whether the figure keeps the bound."""
        ...


@dataclass(frozen=True, slots=True)
class About:
    """One prediction and one measurement, which may differ by chance.

    ``tolerance`` is relative.
    """

    group: str
    case: str
    theory: float
    measured: float
    tolerance: float = 0.02

    @property
    def difference(self) -> float:
        """Relative to the prediction, where that is not 0."""
        return (self.measured - self.theory) / (self.theory or 1.0)

    @property
    def figure(self) -> str:
        return f"{self.measured:.4f}"

    @property
    def bound(self) -> str:
        return f"{self.theory:.4f} ± {100 * self.tolerance:g} %"

    @property
    def holds(self) -> bool:
        return abs(self.difference) <= self.tolerance


@dataclass(frozen=True, slots=True)
class AtMost:
    """A figure and what it must not exceed; as a rule, how far two ways of computing come apart."""

    group: str
    case: str
    measured: float
    most: float = 1e-12

    @property
    def figure(self) -> str:
        return f"{self.measured:.4g}"

    @property
    def bound(self) -> str:
        return f"≤ {self.most:g}"

    @property
    def holds(self) -> bool:
        return self.measured <= self.most


@dataclass(frozen=True, slots=True)
class Same:
    """Two figures that must be equal."""

    group: str
    case: str
    one: float
    other: float

    @property
    def figure(self) -> str:
        return f"{self.other:g}"

    @property
    def bound(self) -> str:
        return f"= {self.one:g}"

    @property
    def holds(self) -> bool:
        return self.one == self.other
