"""A long series of figures over time, kept as a few hundred means."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Curve:
    """Means over equally many figures each; neighbours are joined as soon as there are too many.

    Args:
        most: points kept at most.
    """

    most: int = 200
    _per_point: int = 1
    _sums: list[tuple[float, float]] = field(default_factory=list)  # times, figures of whole points
    _open: tuple[int, float, float] = (0, 0.0, 0.0)  # how many, times, figures of the last point

    def add(self, at_s: float, value: float) -> None:
        """The next figure; times do not fall."""
        n, times, values = self._open
        self._open = n + 1, times + at_s, values + value
        if n + 1 == self._per_point:
            self._sums.append(self._open[1:])
            self._open = 0, 0.0, 0.0
        if len(self._sums) == self.most:
            pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
            self._sums = [(a[0] + b[0], a[1] + b[1]) for a, b in pairs]
            self._per_point *= 2

    def points(self) -> list[tuple[float, float]]:
        """(mean time, mean figure), the last of perhaps fewer figures."""
        whole = [(t / self._per_point, v / self._per_point) for t, v in self._sums]
        n, times, values = self._open
        return [*whole, (times / n, values / n)] if n else whole
