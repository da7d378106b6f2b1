"""Is a plan true? Planned from one run of two workers, measured in runs that it has not seen.

    python scripts/plan.py [--runs FOLDER] [--only digits-3-3 ...] [--tolerance 0.05]

Three models (handwritten digits, speech, a small transformer on text) are each trained once, under
``hybrid`` with two equal workers. From that record alone ``python -m hybridtrain plan`` ranks
strategies for 2 to 4 workers of which one is three times slower; then each strategy is trained so.
Every mini-batch sleeps a quarter of a second, so that two cores are enough for four workers; the
slow worker's last longer by the fault ``slow``. A ranking is right if no pair of strategies whose
measured speeds differ by more than ``--tolerance`` is planned the other way round. Speeds are
samples a second once each worker has made a mini-batch. Runs that ``--runs`` holds are not
repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytorch_lightning as pl
from planned_models import MADE

from hybridtrain import HybridStrategy
from hybridtrain.cli.commands.plan import main as plan
from hybridtrain.virtual.plan import steady_samples_per_s

STRATEGIES = ("hybrid", "backup", "async", "ssp")
MODULES = "planned_models"
OPTIONS = {
    "digits": f"task=digits model=own model._target_={MODULES}.Digits data.batch_size=15",
    "speech": f"task=speech model=stt model._target_={MODULES}.Speech model.net.width=32 "
    "data.train=192 data.val=20 data.test=20 data.batch_size=2 data.max_digits=2",
    "text": f"task=own model._target_={MODULES}.Text data._target_={MODULES}.TextData",
}


class Case(NamedTuple):
    """A model, so many workers, and how many times slower the last one is."""

    model: str
    workers: int
    slower: int

    def __str__(self) -> str:
        return f"{self.model}-{self.workers}-{self.slower}"


CASES = [
    *(Case(model, workers, 3) for model in OPTIONS for workers in (2, 3, 4)),
    Case("digits", 4, 1),
]


def main() -> int:
    """Run what is missing, and print a row of the table for each strategy of each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, help="keep the runs here (default: nowhere)")
    parser.add_argument("--only", nargs="+", default=[str(case) for case in CASES])
    parser.add_argument("--tolerance", type=float, default=0.05, help="of a tie (default 0.05)")
    given = parser.parse_args()
    if given.runs is not None:
        given.runs.mkdir(parents=True, exist_ok=True)
    print("| case | strategy | planned | measured | off | ranking |")
    print("| --- | --- | --- | --- | --- | --- |")
    right, misses = 0, list[float]()
    cases = [case for case in CASES if str(case) in given.only]
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            rows = dict(compared(case, given.runs or Path(folder)))
            wrong = inversions(rows, given.tolerance)
            right += not wrong
            for name, (planned, measured) in rows.items():
                misses.append(planned / measured - 1)
                cells = f"{planned:.1f} | {measured:.1f} | {100 * misses[-1]:+.1f} %"
                said = "" if name != STRATEGIES[0] else ("; ".join(wrong) or "right")
                print(f"| {case} | `{name}` | {cells} | {said} |", flush=True)
    off = sorted(map(abs, misses))
    print(f"\nranking right in {right} of {len(cases)} cases; speeds off by {100 * off[-1]:.1f} % ")
    print(f"at most, {100 * off[len(off) // 2]:.1f} % in the median of {len(off)}")
    return 0


def compared(case: Case, runs: Path) -> Iterator[tuple[str, tuple[float, float]]]:
    """Planned and measured samples a second of each strategy."""
    seen = recorded(case.model, runs)
    slower = f":slower={case.slower}" if case.slower > 1 else ""
    out = runs / "plan.json"
    said = [f"run={seen}", f"hosts=1x{case.workers}{slower}", f"json={out}", "quiet=true"]
    if plan([*said, f"strategy={','.join(STRATEGIES)}"]):
        raise SystemExit(f"{case}: no plan")
    planned = {row["strategy"]: row["samples_per_s"] for row in json.loads(out.read_text())["rows"]}
    for name in STRATEGIES:
        run = trained(case, name, runs)
        yield name, (planned[name], steady_samples_per_s(run))


def inversions(rows: dict[str, tuple[float, float]], tolerance: float) -> list[str]:
    """Pairs that are planned the other way round than they were measured."""
    found = []
    for one, other in combinations(rows, 2):
        (planned, measured), (planned2, measured2) = rows[one], rows[other]
        apart = abs(measured - measured2) > tolerance * max(measured, measured2)
        if apart and (planned - planned2) * (measured - measured2) < 0:
            found.append(f"`{one}` and `{other}`")
    return found


def recorded(model: str, runs: Path) -> Path:
    """The folder of the run to plan from: two equal workers in lock-step, by the command line."""
    folder = (runs / f"{model}-recorded").absolute()
    if (folder / "summary.json").is_file():
        return folder
    command = [sys.executable, "-m", "hybridtrain", *OPTIONS[model].split(), "logger=none"]
    command += ["trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_epochs=1"]
    command += ["test=false", "task.metric=null", "task.monitor=null", "advice=false"]
    command += ["+trainer.limit_val_batches=0", f"hydra.run.dir={folder}"]
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=runs)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return folder


def trained(case: Case, strategy: str, runs: Path) -> Path:
    """The folder of a run's record, trained now, in this process and its workers, if need be."""
    folder = (runs / f"{case}-{strategy}").absolute()
    if not (folder / "done").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        slow = {"worker": case.workers - 1, "step": 0, "kind": "slow", "factor": case.slower}
        hybrid = HybridStrategy(strategy, record=folder, faults=[slow] if case.slower > 1 else [])
        trainer = pl.Trainer(
            accelerator="cpu", devices=case.workers, strategy=hybrid, max_epochs=1, logger=False,
            limit_val_batches=0, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        pl.seed_everything(0, verbose=False)
        trainer.fit(*MADE[case.model]())
        (folder / "done").touch()
    return folder


if __name__ == "__main__":
    sys.exit(main())
