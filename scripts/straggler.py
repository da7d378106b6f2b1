"""A slow worker among fast ones: what is left of the workers' own speeds under each strategy?

    python scripts/straggler.py hybrid backup ssp async --workers 2 4 --slower 3 --repeats 3

Real processes, real Lightning, a small network. Each mini-batch is made to last: every worker
sleeps ``--step-s`` in it, the last one ``--slower`` times as long, as if its device were that much
slower. Sleeping takes no core, so two cores are enough for four such workers; what is measured is
waiting, not arithmetic.

Measured in one and the same run: the samples per second that count, from the moment the first
worker began to train until the last had ended (what came too late and had to be done again counts
once); and each worker's own speed, which is its samples over the time in which it did not wait for
an answer of the server (the sleep, forward, backward, loader and Lightning's loop are its own; the
exchange, the update, others, and ends of epochs are not). The *ideal* is the sum of the workers'
own speeds: what they would do if nothing ever made them wait and nothing were in vain.
The runs alternate (A B B A A B ...); figures are medians over the repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.machine import in_short, machine
from benchmarks.parts.straggler import Measured, Work, measure
from hydra.errors import HydraException

from hybridtrain.cli.explain import explain
from hybridtrain.cli.quiet import hush, hush_lightning
from hybridtrain.errors import UserError


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Raw)
    parser.add_argument("strategies", nargs="*", default=["hybrid", "backup", "ssp", "async"])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], help="default 2 4")
    parser.add_argument("--slower", type=float, default=3.0, help="the last worker (default 3)")
    parser.add_argument("--step-s", type=float, default=0.1, help="of the others (default 0.1)")
    parser.add_argument("--seconds", type=float, default=10, help="of an epoch (default 10)")
    parser.add_argument("--epochs", type=int, default=2, help="default 2")
    parser.add_argument("--batch-size", type=int, default=32, help="default 32")
    parser.add_argument("--width", type=int, default=256, help="of the network (default 256)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--json", help="also write every run's figures to this file")
    parser.add_argument("--png", help="also draw them to this file (needs matplotlib)")
    given = parser.parse_args()
    for name in ("slower", "step_s", "seconds", "epochs", "batch_size", "width", "repeats"):
        if getattr(given, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if min(given.workers) < 2:
        parser.error(f"--workers {min(given.workers)} was given; a straggler needs company: 2 on")
    return given


class Raw(argparse.RawDescriptionHelpFormatter):
    """Keep the description's line breaks."""


def main() -> int:
    """Measure, print, write; 2 after one line on standard error for a strategy there is not."""
    given = parse()
    hush()
    hush_lightning()
    work = Work(
        *(given.step_s, given.slower, given.seconds, given.epochs),
        *(given.batch_size, given.width),
    )
    runs: list[Measured] = []
    try:
        for workers in given.workers:
            for repeat in range(given.repeats):
                for name in given.strategies[:: 1 if repeat % 2 == 0 else -1]:
                    runs.append(_told(measure(name, workers, work)))
    except (UserError, HydraException) as error:
        print(f"error: {explain(error, [f'strategy={name}'])}", file=sys.stderr)
        return 2
    rows = summarise(runs, given.strategies, given.workers)
    print(table(rows, given))
    if given.json:
        content = {"machine": machine(), "work": asdict(work), "rows": rows}
        content["runs"] = [asdict(run) for run in runs]
        Path(given.json).write_text(json.dumps(content, indent=2) + "\n")
    if given.png:
        draw(rows, given)
    return 0


def _told(run: Measured) -> Measured:
    share = "" if run.share is None else f"{100 * run.share:6.1f} % of the ideal"
    line = f"{run.workers} workers {run.strategy:>12} {run.samples_per_s:8.0f} samples/s {share}"
    print(line, file=sys.stderr, flush=True)
    return run


def summarise(
    runs: Sequence[Measured], strategies: Sequence[str], workers: Sequence[int]
) -> list[dict[str, Any]]:
    """Medians over the repeats of each strategy with each number of workers."""
    rows = []
    for n in workers:
        for name in strategies:
            own = [run for run in runs if (run.strategy, run.workers) == (name, n)]
            shares = [run.share for run in own if run.share is not None]
            rows.append(
                {
                    "workers": n,
                    "strategy": name,
                    "samples_per_s": statistics.median(run.samples_per_s for run in own),
                    "ideal": statistics.median(x.ideal for x in own if x.ideal) if shares else None,
                    "share": statistics.median(shares) if shares else None,
                    "lowest": min(shares, default=None),
                    "highest": max(shares, default=None),
                    "of_nominal": statistics.median(x.samples_per_s / x.nominal for x in own),
                    "waited": [
                        statistics.median(each)
                        for each in zip(*(x.waited for x in own), strict=True)
                    ],
                }
            )
    return rows


def table(rows: Sequence[dict[str, Any]], given: argparse.Namespace) -> str:
    """Markdown."""
    lines = [
        f"The last worker {given.slower:g} times slower (a mini-batch of {given.batch_size} lasts "
        f"{1000 * given.step_s:g} ms elsewhere), {given.epochs} epochs of {given.seconds:g} s, "
        f"{given.repeats} alternating runs, {in_short(machine())}",
        "",
        "| workers | strategy | samples/s | ideal | of the ideal (range) | waiting, each worker |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ideal, share = "–", "–"
        if row["share"] is not None:
            spread = f"{100 * row['lowest']:.1f}–{100 * row['highest']:.1f}"
            ideal, share = f"{row['ideal']:,.0f}", f"{100 * row['share']:.1f} % ({spread})"
        waited = ", ".join(f"{100 * x:.1f}" for x in row["waited"]) + " %"
        lines.append(
            f"| {row['workers']} | `{row['strategy']}` | {row['samples_per_s']:,.0f} | {ideal} | "
            f"{share} | {waited if row['share'] is not None else '–'} |"
        )
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, Any]], given: argparse.Namespace) -> None:
    """Bars: the share of the ideal, a group for each number of workers."""
    from matplotlib.figure import Figure

    from hybridtrain.report.charts import style

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(given.strategies)
    for i, name in enumerate(given.strategies):
        own = [row for row in rows if row["strategy"] == name]
        places = [k + (i - (len(given.strategies) - 1) / 2) * width for k in range(len(own))]
        bars = [100 * (row["share"] or 0.0) for row in own]
        drawn = axes.bar(places, bars, 0.9 * width, label=name, color=style(i).colour)
        axes.bar_label(drawn, fmt="%.0f", fontsize=9, color="white", label_type="center")
    axes.axhline(100, color="#555", linewidth=0.8, linestyle="--", zorder=0)
    axes.set_xticks(range(len(given.workers)), [f"{n} workers" for n in given.workers])
    axes.set(ylabel="% of the sum of the workers' own speeds", ylim=(0, 112))
    axes.set_title(f"One worker {given.slower:g} times slower", fontsize=11)
    axes.legend(frameon=False, ncols=len(given.strategies), loc="upper center", fontsize=8)
    figure.savefig(given.png, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
