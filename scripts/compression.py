"""Fewer bytes for gradients: what it costs in loss, as one table and one picture.

    python scripts/compression.py [--seeds 3] [--codes none int8 ...] [--runs DIR] [--svg FILE]
               [--json FILE] -- task=digits trainer.devices=2 trainer.max_epochs=15

Everything behind ``--`` goes to ``python -m hybridtrain``, with ``strategy=hybrid`` and, one after
the other, each way to encode gradients. All runs of a seed see the same samples in the same order,
with the same optimizer and learning rate. The table has what all workers hand over for an update,
and the losses and metrics of the end: means over the seeds, with the range of the validation loss.
The picture has the validation loss against the bytes handed over so far.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.machine import in_short, machine

from hybridtrain.report.charts import style
from hybridtrain.report.runs import Run, read_run

CODES = {
    "none": "{name: gradient}",
    "int8": "{name: gradient, compress: int8}",
    "int4": "{name: gradient, compress: int4}",
    "PowerSGD, rank 4": "{name: gradient, compress: {name: power_sgd, rank: 4}}",
    "sign, majority": "{name: sign_sgd}",
    "top-k, 1/16": "{name: gradient, compress: {name: topk, density: 0.0625, error_decay: 1.0}}",
    "top-k, 1/64": "{name: gradient, compress: topk}",
}
LOSS = "val/loss"


def main() -> int:
    """Run, print, draw; 1 if a run fails."""
    given = parse()
    runs: dict[str, list[Run]] = {code: [] for code in given.codes}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seeds):
            for code in given.codes:
                run = one_run(code, seed, given.overrides, Path(given.runs or folder))
                print(f"seed {seed}  {code:18} {LOSS} {last(run):.4f}", file=sys.stderr, flush=True)
                runs[code].append(run)
    rows = [row_of(code, own) for code, own in runs.items()]
    print(f"`{' '.join(given.overrides)}`, {given.seeds} seeds, {in_short(machine())}\n")
    print(table(rows))
    if given.json:
        content = {"machine": machine(), "overrides": given.overrides, "rows": rows}
        Path(given.json).write_text(json.dumps(content, indent=2) + "\n")
    if given.svg:
        draw(runs, Path(given.svg))
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--codes", nargs="+", choices=CODES, default=list(CODES), metavar="CODE")
    parser.add_argument("--runs", help="keep them in this folder, and repeat none that is there")
    parser.add_argument("--svg", help="draw the losses to this file (needs matplotlib)")
    parser.add_argument("--json", help="write the table's figures to this file")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given = parser.parse_args(sys.argv[1:cut])
    given.overrides = sys.argv[cut + 1 :]
    if given.seeds < 1:
        parser.error(f"--seeds {given.seeds} was given; at least 1 is needed")
    return given


def one_run(code: str, seed: int, overrides: Sequence[str], folder: Path) -> Run:
    """Train once, in a process of its own; ends this one if that fails."""
    place = folder / f"{list(CODES).index(code)}-{seed}"
    chosen = ["strategy=hybrid", f"strategy.exchange={CODES[code]}", f"seed={seed}"]
    if (known := read_run(place) if place.is_dir() else None) is not None and known.ended_well:
        return known
    command = [sys.executable, "-m", "hybridtrain", *overrides, *chosen, f"hydra.run.dir={place}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return read_run(place)


def last(run: Run) -> float:
    """The validation loss at the end."""
    return run.curve.points("updates", LOSS)[1][-1]


def trained(run: Run) -> float:
    """The training loss of the last epoch, as the run logs it, or of its last row."""
    row: float = run.curve.points("updates", "train_loss")[1][-1]
    return run.metrics.get("train/loss", row)


def per_update(run: Run) -> float:
    """The bytes that all workers hand over for an update."""
    return float(run.summary["handed_over"]["sent_bytes"]) / float(run.summary["updates"])


def row_of(code: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Means over the seeds."""
    ends, first = [last(run) for run in runs], runs[0].summary
    whole = float(first["handed_over"]["sent_bytes"] + first["handed_over"]["saved_bytes"])
    metrics = [name for name in runs[0].metrics if name.startswith("test/")]
    return {
        "code": code,
        "bytes_per_update": mean(map(per_update, runs)),
        "times_fewer": whole / first["updates"] / per_update(runs[0]),
        "updates": first["updates"],
        "samples": first["samples"],
        "train/loss": mean(trained(run) for run in runs),
        LOSS: mean(ends),
        "range": (min(ends), max(ends)),
        **{name: mean(run.metrics[name] for run in runs) for name in metrics},
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    metrics = [name for name in rows[0] if name.startswith("test/")]
    heads = ["gradients", "KB an update", "times fewer", "train/loss", f"{LOSS} (range)", *metrics]
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
    for row in rows:
        low, high = row["range"]
        cells = [
            row["code"],
            f"{row['bytes_per_update'] / 1e3:,.1f}",
            f"{row['times_fewer']:.3g}",
            f"{row['train/loss']:.3f}",
            f"{row[LOSS]:.3f} ({low:.3f}–{high:.3f})",
            *(f"{row[name]:.3f}" for name in metrics),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(runs: dict[str, list[Run]], path: Path) -> None:
    """The validation loss of the first seed, against the bytes handed over so far."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, (code, own) in enumerate(runs.items()):
        updates, losses = own[0].curve.points("updates", LOSS)
        megabytes = [count * per_update(own[0]) / 1e6 for count in updates]
        look = style(number)
        dashes = (0, look.dashes) if look.dashes else "-"
        axes.plot(megabytes, losses, color=look.colour, linestyle=dashes, label=code)
        axes.plot(megabytes[-1:], losses[-1:], "o", color=look.colour, markersize=4)
    axes.set(xscale="log", yscale="log", xlabel="MB handed over by all workers", ylabel=LOSS)
    axes.grid(True, color="#e0e0e0", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    sys.exit(main())
