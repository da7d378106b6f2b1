"""Timelines of runs as one SVG picture: a row for each worker and one for the server.

Bars that compute, wait or are dropped differ in height and pattern, not in colour alone. The same
timelines give the same text.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hybridtrain.engine.server.timeline import Bar, BarState, Timeline
from hybridtrain.errors import UserError
from hybridtrain.report.svg import CHARACTER, Stroke, document, rect, strokes, text

WIDTH, RIGHT = 640, 550  # of the picture; the end of the time axis
MOST_ROWS, FEWER_ROWS = 16, 12  # up to the one number all workers are shown, else the other
_ROW, _BAR, _SERVER, _TITLE = 22, 14, 32, 26  # heights
_MOST_GUIDES = 40  # updates that are drawn through all rows
_UNITS = ((2.0, 1.0, "seconds"), (2e-3, 1e3, "milliseconds"), (0.0, 1e6, "microseconds"))
_HATCH = (
    '<defs><pattern id="hatch" width="4" height="4" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect class="dropped" width="1.6" height="4"/></pattern></defs>'
)
_LEGEND = {
    "computing": "computes",
    "waiting": "waits",
    "dropped": "dropped: does not count",
    "step": "a step of its own",
    "update": "update, and its number",
    "stale": "so many updates late (staleness)",
}

REPORT = {"report": Literal["timeline"], "svg": str}  # options of commands that draw one


def place(given: Mapping[str, Any]) -> Path | None:
    """Where to draw, if a ``report`` is wanted.

    Raises:
        UserError: if options of a report are given without it.
    """
    if "report" not in given and (alone := [name for name in ("svg", "at_s") if name in given]):
        raise UserError(f"{alone[0]}={given[alone[0]]} was given without report=timeline")
    return Path(given.get("svg", "timeline.svg")) if "report" in given else None


def picture(timelines: Mapping[str, Timeline], axis: str) -> str:
    """The SVG file's text, one panel below the other on the same time axis.

    Args:
        timelines: by the titles of their panels.
        axis: what the axis shows; ``{}`` stands for the unit.

    Raises:
        UserError: if there is nothing to draw.
    """
    for title, each in timelines.items():
        if not each.bars:
            later = f" from second {each.begin_s:g} on" if each.begin_s else ""
            raise UserError(
                f"report=timeline: {title}: no worker has handed over anything{later}, so there is "
                "nothing to draw"
            )
    window = Window.of(timelines.values())
    parts, top, kinds, descriptions = [_HATCH], 8.0, set[str](), list[str]()
    for title, each in timelines.items():
        panel = Panel(title, each, window, top)
        parts += panel.parts()
        kinds |= panel.kinds
        descriptions.append(panel.description())
        top = panel.bottom + 6
    legend, height = _legend(kinds, top + 39)
    parts += [*_axis(axis, window, top), *legend]
    title = f"Timeline: {', '.join(timelines)}"
    return document(WIDTH, height, title, " ".join(descriptions), parts)


class Window(NamedTuple):
    """The times that the axis shows, which begins at ``left``."""

    begin_s: float
    end_s: float
    left: float

    @classmethod
    def of(cls, timelines: Collection[Timeline]) -> Window:
        """As long as all are known."""
        cut = [each.until_s for each in timelines if each.until_s < math.inf]
        end_s = min(cut) if cut else max(each.end_s for each in timelines)
        longest = max(len(str(max(rows(each)))) for each in timelines)
        begin_s = min(each.begin_s for each in timelines)
        return cls(begin_s, end_s, 14 + CHARACTER * (len("worker ") + longest))

    def x(self, at_s: float) -> float:
        """The place of a time on the axis; of an earlier or later one, that of the end."""
        share = (at_s - self.begin_s) / (self.end_s - self.begin_s)
        return self.left + (RIGHT - self.left) * min(max(share, 0.0), 1.0)


def rows(timeline: Timeline) -> list[int]:
    """The workers that are shown: all, or some from the fastest to the slowest."""
    n = timeline.n_workers
    if n <= MOST_ROWS:
        return list(range(n))
    lengths: dict[int, list[float]] = {worker: [] for worker in range(n)}
    for bar in timeline.bars:
        if bar.doing is not BarState.WAITING:
            lengths[bar.worker].append(bar.end_s - bar.begin_s)
    ranked = sorted(range(n), key=lambda w: sum(lengths[w]) / max(1, len(lengths[w])))
    places = [round(i * (n - 1) / (FEWER_ROWS - 1)) for i in range(FEWER_ROWS)]
    return sorted(ranked[place] for place in places)


class Panel:
    """The rows of one timeline, from ``top`` to ``bottom``; ``kinds``: what the legend explains."""

    def __init__(self, title: str, timeline: Timeline, window: Window, top: float) -> None:
        self._title, self._timeline, self._window, self._x = title, timeline, window, window.x
        self._workers, self._top = rows(timeline), top + _TITLE
        self._server_y = self._top + _ROW * len(self._workers)
        self.bottom = self._server_y + _SERVER
        updates = enumerate(timeline.updates, 1)
        self._updates = [(n, s) for n, s in updates if window.begin_s <= s <= window.end_s]
        self._bars: dict[int, list[Bar]] = {worker: [] for worker in self._workers}
        for bar in timeline.bars:
            if bar.worker in self._bars and bar.begin_s < window.end_s:
                self._bars[bar.worker].append(bar)
        drawn = [bar for own in self._bars.values() for bar in own]
        self._steps = self._steps_between()
        ended = (bar for bar in drawn if bar.end_s < window.end_s)
        self._stale = timeline.complete and any(map(self._late, ended))
        self.kinds = {str(bar.doing) for bar in drawn}
        shown = {"update": timeline.complete, "stale": self._stale, "step": self._steps}
        self.kinds |= {kind for kind, is_shown in shown.items() if is_shown}

    def parts(self) -> Iterator[str]:
        """The shapes."""
        yield text("ink bold", 8, self._top - 10, self._title)
        n, some = self._timeline.n_workers, len(self._workers)
        if some < n:
            said = f"{some} of {n:,} workers, from the fastest to the slowest"
            yield text("dim end", WIDTH - 8, self._top - 10, said)
        if len(self._updates) <= _MOST_GUIDES:
            yield self._ticks("faint", self._top, self._server_y + 4)
        for place, worker in enumerate(self._workers):
            yield from self._row(worker, self._top + _ROW * place)
        yield from self._server(self._server_y + 18)

    def _ticks(self, kind: str, y: float, to_y: float, width: float = 1) -> str:
        """A line for each update; those at the same half of a pixel are one."""
        places = dict.fromkeys(round(2 * self._x(at_s)) / 2 for _, at_s in self._updates)
        return strokes(kind, [(x, y, x, to_y) for x in places], width)

    # ---- workers --------------------------------------------------------------------------------

    def _row(self, worker: int, y: float) -> Iterator[str]:
        yield text("ink", 8, y + 15, f"worker {worker}")
        for bar in self._bars[worker]:
            yield from self._bar(bar, y + (_ROW - _BAR) / 2)
        ends = (self._x(at_s) for at_s in self._steps.get(worker, ()))
        yield strokes("page", [(x, y + 13, x, y + 18) for x in ends], 1.5)
        n_dropped = sum(bar.doing is BarState.DROPPED for bar in self._bars[worker])
        waits = f"waits {100 * self._share(worker, BarState.WAITING):.0f} %"
        yield text("dim", RIGHT + 8, y + 15, f"{n_dropped} dropped" if n_dropped else waits)

    def _bar(self, bar: Bar, y: float) -> Iterator[str]:
        begin, end = self._x(bar.begin_s), self._x(bar.end_s)
        width, ends = max(end - begin - 1 - bool(self._steps), 0.5), bar.end_s < self._window.end_s
        match bar.doing:
            case BarState.WAITING if end - begin >= 0.5:
                yield rect("waiting", begin, y + 5, end - begin, 4)
            case BarState.COMPUTING:
                yield rect("computing", begin, y, width, _BAR)
                late = str(self._late(bar))
                if self._stale and ends and width >= CHARACTER * len(late) + 3:
                    yield text("page small middle", begin + width / 2, y + 11, late)
            case BarState.DROPPED:
                yield _hatched(begin, y, width)
                if ends and width >= 6:
                    yield strokes("dropped", _cross(end - 1, y), 2)

    def _late(self, bar: Bar) -> int:
        return self._timeline.staleness(bar) if bar.doing is BarState.COMPUTING else 0

    def _steps_between(self) -> dict[int, list[float]]:
        """Each worker's own steps within its bars; none if there is no room between them."""
        found = dict[int, list[float]]()
        for worker, at_s in self._timeline.steps:
            own = self._bars.get(worker, ()) if at_s < self._window.end_s else ()
            if any(bar.begin_s < at_s < bar.end_s - 1e-9 for bar in own):
                found.setdefault(worker, []).append(at_s)
        room = RIGHT - self._window.left
        return found if all(5 * len(own) < room for own in found.values()) else {}

    def _share(self, worker: int, doing: BarState) -> float:
        begin_s, end_s, _ = self._window
        return self._timeline.seconds(worker, doing, end_s) / (end_s - begin_s)

    # ---- the server -----------------------------------------------------------------------------

    def _server(self, y: float) -> Iterator[str]:
        yield text("ink", 8, y + 8, "server")
        yield strokes("faint", [(self._window.left, y + 10, RIGHT, y + 10)])
        if not self._timeline.complete:
            said = "the record does not say when updates were made"
            yield text("dim", self._window.left, y + 5, said)
            return
        yield self._ticks("ink", y, y + 10, 1.5)
        free = 0.0
        for n, at_s in self._updates:
            x, half = self._x(at_s), 3.3 * len(str(n))
            if x - half >= free:
                yield text("dim small middle", x, y - 3, str(n))
                free = x + half + 6
        said = f"{len(self._updates):,} update{'' if len(self._updates) == 1 else 's'}"
        yield text("dim", RIGHT + 8, y + 8, said if len(said) < 12 else said.split()[0])

    def description(self) -> str:
        """For readers who do not see the picture."""
        shares = (
            f"worker {worker} computes {self._share(worker, BarState.COMPUTING):.0%} of the time, "
            f"waits {self._share(worker, BarState.WAITING):.0%} and computes "
            f"{self._share(worker, BarState.DROPPED):.0%} for what is dropped"
            for worker in self._workers
        )
        return f"{self._title}: {len(self._updates)} updates; {'; '.join(shares)}."


def _hatched(x: float, y: float, width: float) -> str:
    size = (x + 0.5, y + 2, max(width - 1, 0.5), _BAR - 4)
    return rect("dropped-line", *size, ' fill="url(#hatch)"')


def _cross(x: float, y: float) -> list[Stroke]:
    return [(x - 5, y + 1, x + 5, y + 13), (x - 5, y + 13, x + 5, y + 1)]


# ---- axis and legend ----------------------------------------------------------------------------


def _axis(axis: str, window: Window, y: float) -> Iterator[str]:
    begin_s, end_s, left = window
    factor, unit = next((f, unit) for least, f, unit in _UNITS if end_s - begin_s >= least)
    rough = (end_s - begin_s) * factor / 8
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    first, last = (at_s * factor / step for at_s in (begin_s, end_s))
    shown = [step * n for n in range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1)]
    places = [window.x(value / factor) for value in shown]
    yield strokes("dim", [(left, y, RIGHT, y), *((x, y, x, y + 4) for x in places)])
    for x, value in zip(places, shown, strict=True):
        yield text("dim small middle", x, y + 17, f"{value:g}")
    yield text("dim small middle", (left + RIGHT) / 2, y + 32, axis.format(unit))


def _legend(kinds: Collection[str], y: float) -> tuple[list[str], float]:
    """The legend from ``y`` on, and its lower end."""
    parts, x = list[str](), 8.0
    for kind in (kind for kind in _LEGEND if kind in kinds):
        width = 44 + CHARACTER * len(_LEGEND[kind])
        if x + width > WIDTH and x > 8:
            x, y = 8.0, y + 20
        parts += [*_sample(kind, x, y), text("ink", x + 30, y + 11, _LEGEND[kind])]
        x += width
    return parts, y + 22


def _sample(kind: str, x: float, y: float) -> Iterator[str]:
    match kind:
        case "waiting":
            yield rect("waiting", x, y + 5, 24, 4)
        case "dropped":
            yield _hatched(x, y, 21)
            yield strokes("dropped", _cross(x + 20, y), 2)
        case "update":
            yield text("dim small middle", x + 10, y + 11, "7")
            yield strokes("ink", [(x + 20, y + 2, x + 20, y + 12)], 1.5)
        case _:
            yield rect("computing", x, y, 24, _BAR)
            if kind == "step":
                yield strokes("page", [(x + 12, y + 9, x + 12, y + _BAR)], 1.5)
            if kind == "stale":
                yield text("page small middle", x + 12, y + 11, "3")
