"""The name, colour and dashes of each run on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridtrain.report.charts import COLOURS, Style, style
from hybridtrain.report.page import Part, legend
from hybridtrain.report.runs import Run


@dataclass(frozen=True, slots=True)
class Shown:
    """A run with the name and the look it has on the page."""

    run: Run
    name: str
    style: Style
    group: str  # its entry in the legends


def looks_of(runs: Sequence[Run], names: Sequence[str]) -> list[Shown]:
    """A look for each run; where they are too many, one for each value of what varies most."""
    if len(runs) <= len(COLOURS):
        return [
            Shown(run, n, style(i), n) for i, (run, n) in enumerate(zip(runs, names, strict=True))
        ]
    key = _grouping(runs)
    if key is None:
        looks = [style(i) for i in range(len(runs))]
        groups = [
            n if not look.rest else "the others" for n, look in zip(names, looks, strict=True)
        ]
        return [Shown(*x) for x in zip(runs, names, looks, groups, strict=True)]
    values = [_value(run, key) for run in runs]
    number = {value: i for i, value in enumerate(dict.fromkeys(values))}
    return [
        Shown(run, n, style(number[v]), f"{key}={v}")
        for run, n, v in zip(runs, names, values, strict=True)
    ]


def _value(run: Run, key: str) -> str:
    found = [x.partition("=")[2] for x in run.overrides if x.partition("=")[0] == key]
    return found[-1] if found else "–"


def _grouping(runs: Sequence[Run]) -> str | None:
    """The first override that has some, but few values."""
    keys = dict.fromkeys(x.partition("=")[0] for run in runs for x in run.overrides)
    few = (k for k in keys if 2 <= len({_value(run, k) for run in runs}) <= len(COLOURS))
    return next(few, None)


def legend_of(shown: Sequence[Shown]) -> Part:
    return legend(dict.fromkeys((x.group, x.style) for x in shown))
