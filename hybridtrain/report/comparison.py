"""One page about several runs: curves, figures, what they were told, how they ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

from hybridtrain.report.charts import can_draw
from hybridtrain.report.curves import curves_of
from hybridtrain.report.looks import Shown, looks_of
from hybridtrain.report.page import (
    Part,
    TableRow,
    code,
    details,
    heading,
    link,
    note,
    page,
    paragraph,
    table,
    write,
)
from hybridtrain.report.runs import Run, common_overrides, find_runs, labels, read_run
from hybridtrain.report.sheets import curves_sheet, runs_sheet
from hybridtrain.report.tables import results, settings

FEW = 6
PAGE, RUNS, CURVES = "comparison.html", "comparison.csv", "curves.csv"


def compare(folders: Sequence[Path], out: Path) -> list[Run]:
    """Write page and sheets about all runs in ``folders`` into the folder ``out``.

    Raises:
        UserError: if there are no runs, or nothing can be written there.
    """
    runs = [read_run(folder) for folder in find_runs(folders)]
    names = labels(runs)
    write(out / RUNS, runs_sheet(runs, names), "out")
    write(out / CURVES, curves_sheet(runs, names), "out")
    write(out / PAGE, comparison(runs, names, folders, out), "out")
    return runs


def comparison(
    runs: Sequence[Run], names: Sequence[str], folders: Sequence[Path], out: Path
) -> str:
    """The page, which will lie in the folder ``out``."""
    shown = looks_of(runs, names)
    tasks = list(dict.fromkeys(run.task for run in runs))
    title = f"{_count(len(runs), 'run')} compared"
    title = f"{', '.join(filter(None, tasks))}: {title}" if any(tasks) else title
    begun = sorted(str(x) for run in runs if (x := run.summary.get("started")))
    when = f"begun {begun[0][:16]}" if begun else f"seen {date.today()}"
    parts = [*_head(runs, folders), *_remarks(shown)]
    parts += [heading("Results"), results(shown, out), _sheets_hint(out)]
    for task in tasks:
        title_of = (f"Task {task}" if task else "No task known") if len(tasks) > 1 else ""
        parts += curves_of(title_of, [x for x in shown if x.run.task == task])
    parts += settings(shown)
    return page(title, parts, f"{when}; {', '.join(map(str, folders))}")


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _head(runs: Sequence[Run], folders: Sequence[Path]) -> Iterator[Part]:
    common = common_overrides(runs)
    if common:
        yield paragraph("In all runs: ", code(" ".join(common)))
    devices = list(dict.fromkeys(str(x) for run in runs if (x := run.summary.get("device"))))
    if devices:
        yield paragraph(f"Device: {', '.join(devices)}.")
    if not can_draw():
        again = f"python -m hybridtrain.compare {' '.join(map(str, folders))}"
        yield note(
            "There are no curves here, because matplotlib is not installed. Install it (",
            *(code("pip install matplotlib"), ") and make the page again: ", code(again)),
            f". The points themselves are in {CURVES}.",
        )


def _remarks(shown: Sequence[Shown]) -> Iterator[Part]:
    """What should not be overlooked."""
    bad = [x for x in shown if not x.run.ended_well]
    if bad:
        yield note(f"{len(bad)} of {_count(len(shown), 'run')} did not finish.")
        rows = [TableRow([x.name, x.run.status, x.run.reason], bad=True) for x in bad]
        made = table(["run", "", "why"], rows)
        yield made if len(bad) <= FEW else details("Which, and why", [made])
    for x in shown:
        if x.run.broken:
            yield note(f"{x.name}: could not be read: {', '.join(x.run.broken)}.")


def _sheets_hint(out: Path) -> Part:
    return paragraph(
        "Samples/s are of training time; in wall time are start-up, validations and the test. ",
        *("The same as sheets: ", link(out / RUNS, RUNS, out), ", "),
        *(link(out / CURVES, CURVES, out), " (the points of all curves)."),
    )
