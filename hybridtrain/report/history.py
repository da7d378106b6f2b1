"""``history.csv``: the curve of one run, a row now and then, whatever loggers it has.

Written by the run's monitor in rank 0, read by the comparison. A row costs one short append; it is
a whole line or nothing, so a run that is killed leaves what it had. When a metric turns up that has
no column yet, the file is replaced by one that has it.

Columns that are always there:

``wall_s``      since the run began: start-up and validations included
``train_s``     of training alone: start-up and validations left out
``epoch``       from 0
``updates``     of the parameters, in this run
``samples``     trained on by all workers, in this run
``train_loss``  mean over worker 0's mini-batches since the row before

and, where somebody counts them, all since training began: ``waiting_share`` (mean over the workers,
0 to 1), ``staleness_mean`` and ``staleness_max`` (updates), ``effective_batch`` (samples per
update), ``dropped`` (contributions), ``lead_max`` (mini-batches ahead of the slowest worker). The
remaining columns are the metrics of the validations, in the rows that follow one. Empty: not known.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HISTORY_FILE = "history.csv"
ALWAYS = ("wall_s", "train_s", "epoch", "updates", "samples", "train_loss")
COUNTED = ("waiting_share", "staleness_mean", "staleness_max", "effective_batch", "dropped")
KNOWN = (*ALWAYS, *COUNTED, "lead_max")
LEAST_S, LEAST_SHARE = 0.1, 0.01


@dataclass
class History:
    """Writes the file. Rows come ever more seldom, so that it stays small: about 1,000 a day.

    Args:
        folder: where it is written; a file of that name is replaced by the first row.
    """

    folder: Path
    _columns: list[str] = field(default_factory=list)
    _next_s: float = 0.0
    _before: dict[str, float] = field(default_factory=dict)  # of an earlier time, in some columns

    def due(self, train_s: float) -> bool:
        """Whether it is time for another row: 0.1 s, and 1 % of the time so far, after the last."""
        return train_s >= self._next_s

    def go_on(self, updates: int, counted: int) -> None:
        """Keep the rows up to so many updates, and count on from the last of them.

        Args:
            updates: behind the checkpoint from which the run goes on.
            counted: of these, by who counts now.
        """
        curve = read_history(self.folder)
        values = zip(*curve.columns.values(), strict=True)
        rows = [dict(zip(curve.columns, map(_whole, row), strict=True)) for row in values]
        kept = [row for row in rows if row["updates"] <= updates]
        if not kept:
            return
        last = kept[-1]
        self._widen(self.folder / HISTORY_FILE, curve.columns)
        for row in kept:
            self._append(row)
        per_update = last["samples"] / last["updates"] if last["updates"] else 0.0
        samples = last["samples"] + (updates - last["updates"]) * per_update
        self._before = {"wall_s": last["wall_s"], "train_s": last["train_s"]}
        self._before |= {"samples": samples, "updates": updates - counted}

    def take_over(self) -> None:
        """Rows that another process of this run has written stay, and count as this one's do."""
        if (self.folder / HISTORY_FILE).is_file():
            self._columns = list(read_history(self.folder).columns)

    def add(self, row: Mapping[str, float]) -> None:
        """Another row. Raises OSError."""
        train_s = row["train_s"]
        self._next_s = train_s + max(LEAST_S, LEAST_SHARE * train_s)
        row = {**row, **{name: row[name] + more for name, more in self._before.items()}}
        names = {name.replace("\n", " "): value for name, value in row.items()}
        path = self.folder / HISTORY_FILE
        if not self._columns or not names.keys() <= set(self._columns):
            self._widen(path, names)
        self._append(names)

    def _append(self, names: Mapping[str, float]) -> None:
        path = self.folder / HISTORY_FILE
        with path.open("a", newline="") as file:
            file.write(_line(_cell(names.get(name)) for name in self._columns))

    def _widen(self, path: Path, names: Iterable[str]) -> None:
        """A file with columns for these names; the rows written so far have nothing in them."""
        body = path.read_text().partition("\n")[2] if self._columns else ""
        new = [x for x in (*ALWAYS, *names) if x not in self._columns]
        self._columns += dict.fromkeys(new)
        unfinished = path.with_name(f".{HISTORY_FILE}.new")
        filled = body.replace("\n", "," * len(new) + "\n")
        unfinished.write_text(_line(self._columns) + filled, newline="")
        unfinished.replace(path)


def _whole(value: float) -> float:
    return int(value) if value.is_integer() else value


def _line(cells: Iterable[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _cell(value: float | None) -> str:
    if value is None or math.isnan(value):
        return ""
    return str(value) if isinstance(value, int) else f"{value:.7g}"


@dataclass(frozen=True, slots=True)
class RunCurve:
    """What was read: columns of equal length, nan: not known. ``bad``: rows that were left out."""

    columns: dict[str, list[float]] = field(default_factory=dict)
    bad: int = 0

    def points(self, x: str, y: str) -> tuple[list[float], list[float]]:
        """Where both are known and finite, in order."""
        pairs = zip(self.columns.get(x, []), self.columns.get(y, []), strict=False)
        found = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
        return [a for a, _ in found], [b for _, b in found]

    @property
    def metrics(self) -> list[str]:
        """The columns of the validations' metrics."""
        return [name for name in self.columns if name not in KNOWN]


def read_history(folder: Path) -> RunCurve:
    """The history that lies in a run's folder; empty if there is none.

    Rows that are cut short or no numbers are left out and counted: a run may have been killed, or
    be running.
    """
    try:
        text = (folder / HISTORY_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return RunCurve()
    whole, _, cut = text.rpartition("\n")
    lines = list(csv.reader(io.StringIO(whole.replace("\0", "�"))))
    names = lines[0] if lines else []
    if not set(ALWAYS) <= set(names):
        return RunCurve(bad=max(len(lines), 1))
    rows = [values for line in lines[1:] if (values := _numbers(line, len(names))) is not None]
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    return RunCurve(columns, bad=len(lines) - 1 - len(rows) + bool(cut))


def _numbers(line: Sequence[str], n: int) -> list[float] | None:
    try:
        values = [float(cell) if cell else math.nan for cell in line]
    except ValueError:
        return None
    return values if len(values) == n else None
