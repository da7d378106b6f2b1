"""Curves of a simulation, with a limited number of points."""

from __future__ import annotations

from dataclasses import dataclass, field

Point = tuple[float, float, float]  # time, figure, bytes


@dataclass
class Curve:
    """A curve of means over equally many values; neighbours are merged when there are too many.

    Args:
        most: largest number of points.
    """

    most: int = 200
    _per_point: int = 1
    _sums: list[Point] = field(default_factory=list)  # of whole points
    _open: tuple[int, Point] = (0, (0.0, 0.0, 0.0))  # number of values of the last point, and sums

    def add(self, at_s: float, value: float, n_bytes: float = 0.0) -> None:
        """Add the next value; times and bytes do not decrease."""
        n, sums = self._open
        self._open = n + 1, (sums[0] + at_s, sums[1] + value, sums[2] + n_bytes)
        if n + 1 == self._per_point:
            self._sums.append(self._open[1])
            self._open = 0, (0.0, 0.0, 0.0)
        if len(self._sums) == self.most:
            pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
            self._sums = [(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs]
            self._per_point *= 2

    def _means(self) -> list[Point]:
        n, sums = self._open
        found = [(self._per_point, each) for each in self._sums]
        if n and (not found or 2 * n >= self._per_point):  # fewer would be noise
            found.append((n, sums))
        return [(t / count, v / count, b / count) for count, (t, v, b) in found]

    def points(self) -> list[tuple[float, float]]:
        """(mean time, mean value); the last may have fewer values, but at least half."""
        return [(at_s, value) for at_s, value, _ in self._means()]

    def over_bytes(self) -> list[tuple[float, float]]:
        """(mean bytes, mean value), in the same way."""
        return [(n_bytes, value) for _, value, n_bytes in self._means()]
