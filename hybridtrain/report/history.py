"""``history.csv``: the curve of one run, independent of its loggers.

The run's monitor writes it in rank 0, the comparison reads it. A row is one short append of a whole
line, so a killed run leaves all earlier rows. A new metric gets a column by rewriting the file.

Columns that are always present:

``wall_s``      since the run began: start-up and validations included
``train_s``     of training alone, until the last update: start-up and validations left out
``epoch``       from 0
``updates``     of the parameters, in this run
``samples``     trained on by all workers, in this run
``train_loss``  mean over worker 0's mini-batches since the row before

and, if the strategy counts them, all since training began: ``waiting_share`` (mean over the
workers, 0 to 1), ``staleness_mean`` and ``staleness_max`` (updates), ``effective_batch`` (samples
per update), ``dropped`` (contributions), ``lead_max`` (contributions ahead of the slowest worker).
Of a resumed run, means over both parts are weighted by their updates, or seconds of training.
The remaining columns are metrics: of a validation in the row after it, of training (the means of an
epoch among them) in one at the end of the epoch. One that is called as a column above has the
prefix ``logged/``. Empty: unknown.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hybridtrain.errors import UserError
from hybridtrain.util.files import read_text, write_whole
from hybridtrain.util.streams import printable

HISTORY_FILE = "history.csv"
ALWAYS = ("wall_s", "train_s", "epoch", "updates", "samples", "train_loss")
COUNTED = ("waiting_share", "staleness_mean", "staleness_max", "effective_batch", "dropped")
KNOWN = (*ALWAYS, *COUNTED, "lead_max")
LEAST_S, LEAST_SHARE = 0.1, 0.01
# How a resumed run goes on: sums, maxima, and means with what they are weighted by.
_SUMS = ("wall_s", "train_s", "updates", "samples", "dropped")
_MAXIMA = ("staleness_max", "lead_max")
_MEANS = {"waiting_share": "train_s", "staleness_mean": "updates", "effective_batch": "updates"}


@dataclass
class History:
    """Writes the file, at growing intervals so that it stays small: about 1,000 rows a day.

    Args:
        folder: the run's; the first row replaces an existing file.
    """

    folder: Path
    _columns: list[str] = field(default_factory=list)
    _next_s: float = 0.0
    _before: dict[str, float] = field(default_factory=dict)  # what a resumed run had, by column
    _said: set[str] = field(default_factory=set)  # columns known of the last update before it
    _said_at: float = -1.0

    def due(self, train_s: float) -> bool:
        """Whether to write a row: 0.1 s, and 1 % of the training time so far, after the last."""
        return train_s >= self._next_s

    def resume_at(self, updates: int, samples: int) -> None:
        """Resume: keep the rows up to the checkpoint, and continue counting from there.

        Args:
            updates: made before the checkpoint from which the run resumes.
            samples: trained on before it.
        """
        curve = read_history(self.folder)
        values = zip(*curve.columns.values(), strict=True)
        rows = [dict(zip(curve.columns, map(_whole, row), strict=True)) for row in values]
        kept = [row for row in rows if row["updates"] <= updates]
        if not kept:
            return
        self._columns = list(dict.fromkeys((*ALWAYS, *curve.columns)))
        lines = [_line(self._columns), *map(self._line_of, kept)]
        write_whole(self.folder / HISTORY_FILE, "".join(lines).encode())
        self._said_at = kept[-1]["updates"]
        last = [row for row in kept if row["updates"] == self._said_at]
        self._said = {name for row in last for name, value in row.items() if not math.isnan(value)}
        known = {name: value for name, value in kept[-1].items() if not math.isnan(value)}
        self._before = known | {"samples": samples, "updates": updates}

    def take_over(self) -> None:
        """Continue the file that another process of this run has written."""
        if (self.folder / HISTORY_FILE).is_file():
            self._columns = list(read_history(self.folder).columns)

    def add(self, row: Mapping[str, float]) -> None:
        """Write a row, unless the run says again what it had said before it resumed.

        Raises OSError.
        """
        train_s = row["train_s"]
        self._next_s = train_s + max(LEAST_S, LEAST_SHARE * train_s)
        whole = _both(self._before, row) if self._before else row
        if whole["updates"] == self._said_at and whole.keys() <= self._said:
            return
        names = {name.replace("\n", " "): value for name, value in whole.items()}
        if not self._columns or not names.keys() <= set(self._columns):
            self._widen(names)
        with (self.folder / HISTORY_FILE).open("a", newline="", encoding="utf-8") as file:
            file.write(self._line_of(names))

    def _line_of(self, row: Mapping[str, float]) -> str:
        return _line(_cell(row.get(name)) for name in self._columns)

    def _widen(self, names: Iterable[str]) -> None:
        """Add columns for these names, empty in earlier rows."""
        path = self.folder / HISTORY_FILE
        body = path.read_text("utf-8").partition("\n")[2] if self._columns else ""
        new = [x for x in (*ALWAYS, *names) if x not in self._columns]
        columns = [*self._columns, *dict.fromkeys(new)]
        filled = body.replace("\n", "," * len(new) + "\n")
        write_whole(path, (_line(columns) + filled).encode())
        self._columns = columns  # the file has them: a full disk may have room again later


def _both(before: Mapping[str, float], row: Mapping[str, float]) -> dict[str, float]:
    """A row of both parts of a resumed run."""
    both = dict(row)
    for name in row.keys() & before.keys():
        then, now = before[name], row[name]
        if name in _SUMS:
            both[name] = then + now
        elif name in _MAXIMA:
            both[name] = max(now, then)
        elif name in _MEANS:
            weights = before[_MEANS[name]], row[_MEANS[name]]
            if sum(weights) > 0:
                both[name] = (then * weights[0] + now * weights[1]) / sum(weights)
    return both


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
    """The curve as read: columns of equal length, nan: unknown. ``bad``: number of damaged rows."""

    columns: dict[str, list[float]] = field(default_factory=dict)
    bad: int = 0

    def points(self, x: str, y: str) -> tuple[list[float], list[float]]:
        """The points at which both columns can be drawn (finite, below 1e300), in order."""
        pairs = zip(self.columns.get(x, []), self.columns.get(y, []), strict=False)
        found = [(a, b) for a, b in pairs if abs(a) < 1e300 and abs(b) < 1e300]
        return [a for a, _ in found], [b for _, b in found]

    @property
    def metrics(self) -> list[str]:
        """Names of the validation metrics."""
        return [name for name in self.columns if name not in KNOWN]


def read_history(folder: Path) -> RunCurve:
    """Read the history in a run's folder; empty if there is none.

    Rows that are cut short or not numeric are left out and counted: the run may have been killed,
    or be running.
    """
    path = folder / HISTORY_FILE
    try:
        text = read_text(path, "the history", errors="replace")
    except UserError:
        return RunCurve(bad=int(os.path.lexists(path)))
    text = printable(text.replace("\0", "�").replace("\r\n", "\n").replace("\r", "�"))
    whole, _, cut = text.rpartition("\n")
    head, *lines = whole.split("\n")
    try:
        names = next(csv.reader([head]), [])
    except csv.Error:  # larger than a cell may be
        names = []
    if not set(ALWAYS) <= set(names):
        return RunCurve(bad=len(lines) + 1)
    rows = [values for line in lines if (values := _numbers(line.split(","), len(names)))]
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    return RunCurve(columns, bad=len(lines) - len(rows) + bool(cut))


def _numbers(line: Sequence[str], n: int) -> list[float] | None:
    try:
        values = [float(cell) if cell else math.nan for cell in line]
    except ValueError:
        return None
    return values if len(values) == n else None
