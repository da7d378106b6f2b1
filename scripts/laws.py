"""Check the simulator against theory: one table, one drawing.

    python scripts/laws.py [updates=40000] [plot=laws.png]

Prints, for each law, what its formula says and what the simulator does; the papers are named in
scripts/theory.py. Takes a few minutes; fewer updates are faster and less exact.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import theory as laws
from rich.console import Console
from rich.table import Table
from theory import Law

from hybridtrain.errors import UserError
from hybridtrain.util.arguments import command


def measure(updates: int) -> list[Law]:
    """All laws; each figure from so many updates, where not more are needed."""
    return [
        *laws.momentum(replicas=max(updates // 2, 100)),
        *laws.four_schemes(updates),
        *laws.backup_workers(updates),
        *laws.stability_edge(max(updates // 20, 400)),
        *laws.softsync(updates),
        *laws.bounded_lead(8 * updates),
    ]


def table(found: Sequence[Law]) -> Table:
    made = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for head in ("law", "case", "formula", "measured", "difference"):
        made.add_column(head, justify="left" if head in ("law", "case") else "right")
    for law in found:
        numbers = (f"{law.theory:.4f}", f"{law.measured:.4f}", f"{100 * law.difference:+.2f} %")
        made.add_row(law.group, law.case, *numbers)
    return made


def draw(found: Sequence[Law], path: Path) -> None:
    """One panel for each group: what is predicted, and what was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = {name: list(own) for name, own in groupby(sorted(found, key=_group), key=_group)}
    figure = Figure(figsize=(15, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, own) in zip(figure.subplots(2, 4).flat, groups.items(), strict=False):
        _panel(axes, name, own)
    figure.savefig(path, dpi=110)


def _group(law: Law) -> str:
    return law.group


def _panel(axes: Any, name: str, own: Sequence[Law]) -> None:
    places = range(len(own))
    axes.plot(places, [law.theory for law in own], "_", markersize=14, label="formula")
    axes.plot(places, [law.measured for law in own], "x", label="simulator")
    axes.set_xticks(places, [law.case for law in own], rotation=60, ha="right", fontsize=7)
    axes.set(title=name, ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)


def run(arguments: Sequence[str]) -> None:
    given = dict(argument.partition("=")[::2] for argument in arguments)
    unknown = [
        name for name, value in given.items() if name not in ("updates", "plot") or not value
    ]
    if unknown:
        raise UserError(f"{unknown[0]} was given; known are updates=N and plot=FILE")
    updates = given.get("updates", "40000")
    if not updates.isdecimal() or int(updates) < 100:
        raise UserError(f"updates={updates} was given; it must be a whole number from 100 on")
    found = measure(int(updates))
    Console().print(table(found))
    if "plot" in given:
        draw(found, Path(given["plot"]))


if __name__ == "__main__":
    sys.exit(command(run, __doc__, None))
