"""Compare strategies on one job, side by side: alternating runs, medians, ratios.

    python scripts/compare.py --repeats 3 hybrid ddp -- task=digits trainer.devices=2

Everything behind ``--`` goes to ``python -m hybridtrain``. The runs alternate (A B B A A B ...), so
that a machine that grows slower or faster does so for both. Rates are samples per second of
training time as each run's ``summary.json`` states them; the ratio is taken pair by pair, first
strategy over each other one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.command import Failed, Run, one_run
from benchmarks.machine import in_short, machine


def main() -> int:
    """Parse, run, print; non-zero if a run failed."""
    arguments = parse()
    runs: list[Run] = []
    for repeat in range(arguments.repeats):
        order = arguments.strategies if repeat % 2 == 0 else arguments.strategies[::-1]
        for strategy in order:
            try:
                runs.append(told(one_run(strategy, arguments.overrides)))
            except Failed as failure:
                sys.exit(str(failure))
    report = summarise(runs, arguments.strategies, arguments.metric)
    print(table(report, arguments))
    if arguments.json:
        content = {"machine": machine(), "overrides": arguments.overrides, **report}
        Path(arguments.json).write_text(json.dumps(content, indent=2) + "\n")
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Raw)
    parser.add_argument("strategies", nargs="+", help="rows of conf/strategy; the first is ours")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--metric", help="a metric of summary.json to show, e.g. test/wer")
    parser.add_argument("--json", help="also write every run's figures to this file")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments = parser.parse_args(sys.argv[1:cut])
    arguments.overrides = sys.argv[cut + 1 :]
    if arguments.repeats < 1:
        parser.error(f"--repeats {arguments.repeats} was given; at least 1 is needed")
    return arguments


class Raw(argparse.RawDescriptionHelpFormatter):
    """Keep the description's line breaks."""


def told(run: Run) -> Run:
    """Say on standard error how it went."""
    speed = f"{run.samples_per_s:10.1f} samples/s  {run.wall_s:7.1f} s"
    print(f"{run.strategy:>12}  {speed}", file=sys.stderr, flush=True)
    return run


def summarise(runs: list[Run], strategies: list[str], metric: str | None) -> dict[str, Any]:
    """Medians, spreads and pairwise ratios."""
    of = {name: [run for run in runs if run.strategy == name] for name in strategies}
    ours = [run.samples_per_s for run in of[strategies[0]]]
    rows = []
    for name in strategies:
        rates = [run.samples_per_s for run in of[name]]
        ratios = [a / b for a, b in zip(ours, rates, strict=True)]
        rows.append(
            {
                "strategy": name,
                "samples_per_s": statistics.median(rates),
                "lowest": min(rates),
                "highest": max(rates),
                "ratio": statistics.median(ratios),
                "wall_s": statistics.median(run.wall_s for run in of[name]),
                "metric": _median_metric(of[name], metric),
            }
        )
    return {"rows": rows, "runs": [asdict(run) for run in runs]}


def _median_metric(runs: list[Run], metric: str | None) -> float | None:
    values = [run.metrics[metric] for run in runs if metric is not None and metric in run.metrics]
    return statistics.median(values) if values else None


def table(report: dict[str, Any], arguments: argparse.Namespace) -> str:
    """Markdown."""
    first, metric = arguments.strategies[0], arguments.metric or ""
    job, where = " ".join(arguments.overrides), in_short(machine())
    lines = [
        f"`{job}`, {arguments.repeats} alternating runs, {where}",
        "",
        f"| strategy | samples/s (median, range) | {first} is | wall s | {metric} |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        spread = f"{row['samples_per_s']:,.0f} ({row['lowest']:,.0f}–{row['highest']:,.0f})"
        value = "" if row["metric"] is None else f"{row['metric']:.4g}"
        ratio = f"{row['ratio']:.2f}×"
        lines.append(f"| {row['strategy']} | {spread} | {ratio} | {row['wall_s']:.1f} | {value} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
