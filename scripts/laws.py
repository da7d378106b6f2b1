"""Check strategies against theory: one table, one drawing.

    python scripts/laws.py [updates=10000] [only=elastic,late] [plot=laws.png]

Prints for each law what was computed, what came of it, what it has to be, and whether it is; the
papers are named in scripts/theory: waiting.py (waiting and staleness), local.py (workers that train
on their own) and late.py (late gradients). Takes five minutes of one core; more updates are
slower and more exact. Ends with status 1 if a law does not hold.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table
from theory import late, local, waiting
from theory.law import About, Law

from hybridtrain.errors import UserError
from hybridtrain.util.arguments import command, options

# name -> from a number of updates, where one is needed
LAWS: dict[str, Callable[[int], Sequence[Law]]] = {
    "momentum": lambda updates: waiting.momentum(replicas=max(updates // 2, 100)),
    "schemes": waiting.four_schemes,
    "backup": waiting.backup_workers,
    "edge": lambda updates: waiting.stability_edge(max(updates // 20, 400)),
    "behind": lambda updates: waiting.one_update_behind(max(updates // 20, 400)),
    "softsync": waiting.softsync,
    "lead": lambda updates: waiting.bounded_lead(8 * updates),
    "elastic": lambda _: local.elastic_edge(),
    "window": lambda _: local.endless_window(),
    "post_local": lambda _: local.post_local(),
    "mean": lambda _: local.averaged_iterate(),
    "deferred": lambda _: local.deferred_momentum(),
    "scaling": lambda _: local.linear_scaling(),
    "revision": lambda _: late.revision_identities(),
    "late": lambda _: late.long_delays(),
}


def table(found: Sequence[Law]) -> Table:
    made = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for head in ("law", "computed", "figure", "bound", "holds"):
        made.add_column(head, justify="right" if head in ("figure", "bound") else "left")
    for law in found:
        holds = "yes" if law.holds else "[bold red]no[/]"
        made.add_row(law.group, law.case, law.figure, law.bound, holds)
    return made


def draw(found: Sequence[Law], path: Path) -> None:
    """One panel for each group of predictions: what is predicted, and what was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    predicted = sorted((law for law in found if isinstance(law, About)), key=_group)
    groups = {name: list(own) for name, own in groupby(predicted, key=_group)}
    if not groups:
        raise UserError(f"plot={path} was given, but none of these laws has a prediction to draw")
    rows = -(-len(groups) // 5)
    figure = Figure(figsize=(15, 3.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(rows, min(len(groups), 5), squeeze=False).flat
    for axes, (name, own) in zip(places, groups.items(), strict=False):
        _panel(axes, name, own)
    for axes in list(figure.axes)[len(groups) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=110)


def _group(law: About) -> str:
    return law.group


def _panel(axes: Any, name: str, own: Sequence[About]) -> None:
    places = range(len(own))
    axes.plot(places, [law.theory for law in own], "_", markersize=14, label="formula")
    axes.plot(places, [law.measured for law in own], "x", label="simulator")
    axes.set_xticks(places, [law.case for law in own], rotation=60, ha="right", fontsize=7)
    axes.set(title=name, ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)


def run(arguments: Sequence[str]) -> int:
    given = options(arguments, ["updates", "only", "plot"])
    updates = given.get("updates", "10000")
    if not updates.isdecimal() or int(updates) < 100:
        raise UserError(f"updates={updates} was given; it must be a whole number from 100 on")
    only = given.get("only", ",".join(LAWS)).split(",")
    for name in only:
        if name not in LAWS:
            raise UserError(f"only={name} was given; known are {', '.join(LAWS)}")
    found: list[Law] = []
    console = Console()
    with console.status("") as status:
        for name in only:
            status.update(name)
            found += LAWS[name](int(updates))
    console.print(table(found))
    if "plot" in given:
        draw(found, Path(given["plot"]))
    return int(not all(law.holds for law in found))


if __name__ == "__main__":
    sys.exit(command(run, __doc__, None))
