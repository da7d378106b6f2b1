"""Rows as tables for a terminal, which are Markdown too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.rows import Row, Skipped

_MARK = {True: "yes", False: "NO", None: ""}
_MOVED = 0.05  # a change of a ratio that is worth a line, if the spreads do not overlap


def table(rows: Sequence[Row | Skipped], machine: str) -> str:
    """A table for each part, and what was left out."""
    lines = [machine, ""]
    for part in dict.fromkeys(row.part for row in rows):
        own = [row for row in rows if row.part == part]
        measured = [row for row in own if isinstance(row, Row)]
        if measured:
            lines += [f"## {part}", "", *_aligned(HEADER, map(_cells, measured)), ""]
        for row in own:
            if isinstance(row, Skipped):
                first, *rest = row.reason.splitlines() or [""]
                lines += [f"- left out: {part}, {row.work}: {first}", *(f"  {x}" for x in rest)]
    return "\n".join(lines).rstrip()


HEADER = ("work", "ours", "", "baseline", "", "ratio", "spread", "goal", "met")


def _cells(row: Row) -> tuple[str, ...]:
    own = f"{_short(row.ours)} {row.unit}"
    work = row.work + (f" ({row.note})" if row.note else "")
    if row.ratio is None or row.theirs is None:
        return (work, row.method, own, "", "", "", "", "", "")
    spread = f"{_short(min(row.ratios))}–{_short(max(row.ratios))}"
    ratio = f"{_short(row.ratio)}×"
    other = f"{_short(row.theirs)} {row.unit}"
    verdict = _MARK[row.goal.met(row.ratio)]
    kind = ratio if row.goal.of == "speed" else f"{ratio} the time"
    return (work, row.method, own, row.baseline, other, kind, spread, str(row.goal), verdict)


def _short(value: float) -> str:
    if value and abs(value) < 0.1:
        return f"{value:.2g}"
    return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"


def _aligned(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [tuple(header), *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def changes(former: Sequence[Row | Skipped], rows: Sequence[Row | Skipped]) -> str:
    """The ratios that were there before, beside the new ones."""
    old = {row.key: row for row in former if isinstance(row, Row) and row.ratio is not None}
    found = []
    for row in rows:
        if not isinstance(row, Row) or row.ratio is None or row.key not in old:
            continue
        before = old[row.key].ratio or 0.0
        change = row.ratio / before - 1 if before else 0.0
        better = (change > 0) == (row.goal.of == "speed")
        spreads = (old[row.key].ratios, row.ratios)
        word = "better" if better else "WORSE"
        if not _apart(*spreads) or abs(change) <= _MOVED:
            word = "within the spread"
        elif min(map(len, spreads)) < 2:
            word += "? (single pairs)"
        what = f"{row.work}: {row.method} against {row.baseline}"
        figures = (f"{_short(before)}×", f"{_short(row.ratio)}×", f"{100 * change:+.0f} %")
        found.append((row.part, what, *figures, word))
    if not found:
        return "Nothing to compare: the earlier result has none of these rows."
    return "\n".join(_aligned(("part", "row", "before", "now", "change", ""), found))


def _apart(one: Sequence[float], other: Sequence[float]) -> bool:
    return min(one) > max(other) or min(other) > max(one)
