"""Is the advice at the end of a run true? What it promises, and what the advised strategy does.

    python scripts/advice.py [--epochs 2] [--step-s 0.06] [--repeats 2] [--only 0 4]

Each case is two commands in real processes: one with a slow worker, which ends with an advice, and
the same with the strategy that it advises; again as often as ``--repeats`` says, in alternating
order. Every mini-batch of handwritten digits sleeps ``--step-s``; the slow worker's last longer by
the fault ``slow``. Sleeping takes no core, so two cores are enough for four workers. Prints a line
for each case, with medians of the samples per second in the summaries.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor, nn
from torch.optim import Adam

from hybridtrain.tasks.digits import Batch, Classifier
from hybridtrain.tasks.shared_tables import MakeOptimizer


class Timed(Classifier):
    """Two dense layers; a mini-batch takes ``step_s`` longer than they need."""

    def __init__(self, step_s: float, optimizer: MakeOptimizer = Adam) -> None:
        layers = (nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        super().__init__(nn.Sequential(*layers), optimizer)
        self.step_s = step_s

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The sleep is the device's time."""
        time.sleep(self.step_s)
        return super().training_step(batch, batch_idx)


@dataclass(frozen=True)
class Case:
    """``worker`` takes ``factor`` times as long as the others."""

    strategy: str
    workers: int
    worker: int
    factor: float


CASES = (
    Case("hybrid", 2, 1, 2.0),
    Case("hybrid", 2, 0, 4.0),
    Case("hybrid", 3, 1, 3.0),
    Case("hybrid", 4, 2, 2.0),
    Case("hybrid", 4, 3, 3.0),
    Case("ssp", 4, 1, 4.0),
)
HEAD = "| strategy | workers | slower | advice | samples/s, before and after | advised | measured |"


def main() -> int:
    """Run the cases, and print a row of the table for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=2, help="default 2")
    parser.add_argument("--step-s", type=float, default=0.06, help="of a mini-batch (default 0.06)")
    parser.add_argument("--repeats", type=int, default=2, help="of each run (default 2)")
    parser.add_argument("--only", type=int, nargs="+", default=range(len(CASES)), help="cases")
    given = parser.parse_args()
    print(HEAD, "| --- | --- | --- | --- | --- | --- | --- |", sep="\n")
    for case in [CASES[number] for number in given.only]:
        print(row(case, given), flush=True)
    return 0


def row(case: Case, given: argparse.Namespace) -> str:
    """Run the case under its strategy and under the advised one."""
    usual = [f"strategy={case.strategy}"]
    before = [summary_of(case, usual, given)]
    start = f"| `{case.strategy}` | {case.workers} | worker {case.worker} {case.factor:g} times"
    if (advice := before[0]["advice"]) is None:
        return f"{start} | none | {before[0]['samples_per_s']:.0f} | | |"
    strategy = advice["strategy"].split()
    after = [summary_of(case, strategy, given)]
    for _ in range(given.repeats - 1):
        after.append(summary_of(case, strategy, given))
        before.append(summary_of(case, usual, given))
    usual_s, advised_s = (median(x["samples_per_s"] for x in each) for each in (before, after))
    return (
        f"{start} | `{advice['strategy']}` | {usual_s:.0f}, {advised_s:.0f} | "
        f"{advice['factor']:.2f} | {advised_s / usual_s:.2f} |"
    )


def summary_of(case: Case, strategy: list[str], given: argparse.Namespace) -> dict[str, Any]:
    """The summary of one run in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        fault = f"{{worker:{case.worker},step:0,kind:slow,factor:{case.factor}}}"
        command = [sys.executable, "-m", "hybridtrain", "task=digits", "model=own", "logger=none"]
        command += ["model._target_=advice.Timed", f"model.step_s={given.step_s}"]
        command += ["data.batch_size=10", "trainer.accelerator=cpu", "test=false"]
        command += [f"trainer.devices={case.workers}", f"trainer.max_epochs={given.epochs}"]
        command += [f"faults=[{fault}]", f"hydra.run.dir={folder}/run"]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run(
            [*command, "task.metric=null", *strategy],
            capture_output=True,
            text=True,
            env=environment,
            cwd=folder,
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        summary: dict[str, Any] = json.loads(Path(folder, "run", "summary.json").read_text())
        return summary


if __name__ == "__main__":
    sys.exit(main())
