"""One update behind: what it costs in loss, as one table and one picture.

    python scripts/delay.py [--tasks text digits speech] [--optimizers adam adamw sgd muon]
               [--seeds 3] [--runs DIR] [--svg FILE] [--json FILE]

Trains each task with each optimizer in lock-step (``hybrid``), one update behind (``pipe_sgd``,
with its warm-up of 40 updates), and the same with ``extrapolate=true``: the same samples in the
same order, as many updates, the same learning rate. ``text``: a transformer of two layers on the
characters of Python's own modules; ``digits``: 8 x 8 images; ``speech``: a small DeepSpeech on
spoken digits. The table has the validation losses of the end: means over the seeds, with the range.
The picture has those of the first seed against updates.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.machine import in_short, machine

from hybridtrain.report.charts import style
from hybridtrain.report.runs import Run, read_run

MODES = {
    "lock-step": ["strategy=hybrid"],
    "one behind": ["strategy=pipe_sgd"],
    "extrapolated": ["strategy=pipe_sgd", "strategy.policy.extrapolate=true"],
}
TASKS = {
    "text": [
        "model._target_=benchmarks.jobs.characters.Characters",
        "+model.optimizer=${optimizer}",
        "trainer.max_epochs=4",
        "trainer.gradient_clip_val=1.0",
    ],
    "digits": ["task=digits", "trainer.max_epochs=10"],
    "speech": ["task=speech", "trainer.max_epochs=6", "data.train=1000", "model.net.width=64"],
}
_TARGET = "optimizer._target_=benchmarks.jobs.characters.Muon"
OPTIMIZERS = {
    "adam": ["optimizer=adam"],
    "adamw": ["optimizer=adamw"],
    "sgd": ["optimizer=sgd", "optimizer.momentum=0.9"],
    "muon": [_TARGET, "optimizer._partial_=true"],
}
RATES = {  # those with which lock-step does well
    "text": {"adam": 0.003, "adamw": 0.003, "sgd": 0.3, "muon": 0.02},
    "digits": {"adam": 0.002, "adamw": 0.002, "sgd": 0.05, "muon": 0.01},
    "speech": {"adam": 0.0015, "adamw": 0.0015, "sgd": 0.01, "muon": 0.01},
}
LOSS = "val/loss"


class Case(NamedTuple):
    """What is trained, and how."""

    task: str
    optimizer: str
    mode: str


def main() -> int:
    """Run, print, draw."""
    given = parse()
    cases = [Case(t, o, m) for t in given.tasks for o in given.optimizers for m in MODES]
    runs: dict[Case, list[Run]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seeds):
            for case in cases:
                run = one_run(case, seed, Path(given.runs or folder).absolute())
                said = f"seed {seed}  {'  '.join(case):34} {LOSS} {last(run):.4f}"
                print(said, file=sys.stderr, flush=True)
                runs[case].append(run)
        rows = [row_of(case, own) for case, own in runs.items()]
        print(f"{given.seeds} seeds, {in_short(machine())}\n")
        print(table(rows))
        if given.json:
            content = {"machine": machine(), "rows": rows}
            Path(given.json).write_text(json.dumps(content, indent=2) + "\n")
        if given.svg:
            draw(runs, given.tasks, Path(given.svg))
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--runs", help="keep them in this folder, and repeat none that is there")
    parser.add_argument("--svg", help="draw the losses to this file (needs matplotlib)")
    parser.add_argument("--json", help="write the table's figures to this file")
    given = parser.parse_args()
    if given.seeds < 1:
        parser.error(f"--seeds {given.seeds} was given; at least 1 is needed")
    return given


def one_run(case: Case, seed: int, folder: Path) -> Run:
    """Train once, in a process of its own; ends this one if that fails."""
    place = folder / "-".join((*case, str(seed))).replace(" ", "_")
    if (known := read_run(place) if place.is_dir() else None) is not None and known.ended_well:
        return known
    rate = RATES[case.task][case.optimizer]
    overrides = [
        *TASKS[case.task],
        *OPTIMIZERS[case.optimizer],
        *MODES[case.mode],
        f"++optimizer.lr={rate}",
        f"seed={seed}",
        "trainer.devices=1",
        f"hydra.run.dir={place}",
    ]
    here = str(Path(__file__).parent)
    command = [sys.executable, "-m", "hybridtrain", *overrides]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": here}
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return read_run(place)


def last(run: Run) -> float:
    """The validation loss at the end."""
    return run.curve.points("updates", LOSS)[1][-1]


def row_of(case: Case, runs: Sequence[Run]) -> dict[str, Any]:
    """Means over the seeds."""
    ends = [last(run) for run in runs]
    metrics = [name for name in runs[0].metrics if name.startswith("test/")]
    return {
        **case._asdict(),
        "updates": runs[0].summary["updates"],
        LOSS: mean(ends),
        "range": (min(ends), max(ends)),
        "metrics": {name: mean(run.metrics[name] for run in runs) for name in metrics},
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: one line for each task and optimizer."""
    heads = ["task", "optimizer", "updates", *MODES, "behind", "extrapolated"]
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
    for at in range(0, len(rows), len(MODES)):
        own = rows[at : at + len(MODES)]
        losses = [row[LOSS] for row in own]
        cells = [own[0]["task"], own[0]["optimizer"], str(own[0]["updates"])]
        cells += [f"{row[LOSS]:.3f} ({row['range'][0]:.3f}–{row['range'][1]:.3f})" for row in own]
        cells += [f"{(loss / losses[0] - 1) * 100:+.1f} %" for loss in losses[1:]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(runs: dict[Case, list[Run]], tasks: Sequence[str], path: Path) -> None:
    """The validation loss of the first seed against updates, one row of panels for each task."""
    from matplotlib.figure import Figure

    optimizers = list(dict.fromkeys(case.optimizer for case in runs))
    size = 2.6 * len(optimizers), 2.2 * len(tasks)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(tasks), len(optimizers), squeeze=False)
    for case, own in runs.items():
        axes = panels[tasks.index(case.task)][optimizers.index(case.optimizer)]
        updates, losses = own[0].curve.points("updates", LOSS)
        look = style(list(MODES).index(case.mode))
        dashes = (0, look.dashes) if look.dashes else "-"
        axes.plot(updates, losses, color=look.colour, linestyle=dashes, label=case.mode)
        axes.set_title(f"{case.task}, {case.optimizer}", fontsize=9)
        axes.set(yscale="log")
        axes.tick_params(labelsize=7, which="both")
        axes.grid(True, color="#e0e0e0", linewidth=0.6)
    panels[0][0].legend(frameon=False, fontsize=7)
    figure.supxlabel("updates", fontsize=9)
    figure.supylabel(LOSS, fontsize=9)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    sys.exit(main())
