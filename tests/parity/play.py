"""Runs one case under one strategy, in a process that does nothing else."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import Strategy

import hybridtrain  # noqa: F401  (registers the strategies)
from tests.parity.case import Case
from tests.parity.files import contents
from tests.parity.places import APART, on_the_stand_in, sharing
from tests.parity.record import MemoryLogger, Recorder, detached, flatten

SEED = 7
UNION = "union"  # one worker, no strategy, mini-batches of all workers together


@dataclass(frozen=True, slots=True)
class Run:
    """Which strategy with how many workers (of each host), and where they compute."""

    strategy: str | Strategy
    workers: int
    where: str = "cpu"
    hosts: int = 1


def play(case: Case, run: Run, folder: Path) -> None:
    """Run, and leave ``rank-*.pt`` and ``main.pt`` in the folder.

    Several hosts share it; another one than host 0 leaves ``host-*.pt``.
    """
    files, host = folder / "run", os.environ.get("NODE_RANK", "0")
    files.mkdir(parents=True, exist_ok=run.hosts > 1)
    os.chdir(files)
    quiet()
    Recorder(folder).attach()
    pl.seed_everything(SEED, verbose=False)
    seen: dict[str, Any] = {}
    try:
        seen["returned"] = _act(case, run, files, seen)
    except BaseException as error:
        traceback.print_exc()
        seen["error"] = {"type": type(error).__name__, "text": str(error)}
    if host == "0":
        seen["files"] = contents(files)
    torch.save(flatten(seen), folder / ("main.pt" if host == "0" else f"host-{host}.pt"))
    sys.stdout.flush()
    sys.stderr.flush()


def _act(case: Case, run: Run, files: Path, seen: dict[str, Any]) -> Any:
    module = case.module()
    trainer = make_trainer(case, run, files)
    together = run.workers if run.strategy == UNION else 1
    returned = case.act(trainer, module, case.data(case.batch * together))
    seen["module"] = detached(module.state_dict())
    seen["callback_metrics"] = detached(dict(trainer.callback_metrics))
    seen["state"] = {"fn": trainer.state.fn, "status": trainer.state.status}
    return detached(returned)


def make_trainer(case: Case, run: Run, files: Path) -> pl.Trainer:
    options: dict[str, Any] = {
        "accelerator": run.where,
        "devices": run.workers,
        "num_nodes": run.hosts,
        "strategy": case.ddp if run.strategy == "ddp" else run.strategy,
        "default_root_dir": files,
        "max_epochs": 2,
        "logger": MemoryLogger(),
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    if run.strategy == UNION:
        options |= {"devices": 1, "strategy": "auto"}
    mine: Mapping[str, Any] = case.trainer(files)
    options |= dict(mine)
    if run.where == APART:
        options = on_the_stand_in(options)
    elif run.where == "cuda":
        options = sharing(options, torch.cuda.device_count())
    return pl.Trainer(**options)


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    redirect_stdout(sys.stderr).__enter__()
