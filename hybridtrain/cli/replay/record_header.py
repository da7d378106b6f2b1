"""What the record of a run is told of its configuration and its seed."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from omegaconf import DictConfig

from hybridtrain.cli.resume.config_values import portable
from hybridtrain.errors import UserError
from hybridtrain.lightning.run_context import context_if_ours
from hybridtrain.util.input_files import open_input


def seed_all(seed: int | None, drawn: int | None = None) -> int | None:
    """Seed what is random; without a seed, with one that is drawn (again), and returned.

    A drawn one is for this process only: no variable of the environment tells others of it.
    """
    if seed is not None:
        pl.seed_everything(seed, workers=True, verbose=False)
        return None
    drawn = random.SystemRandom().getrandbits(32) if drawn is None else drawn
    random.seed(drawn)
    np.random.seed(drawn)
    torch.manual_seed(drawn)
    return drawn


def describe_run(cfg: DictConfig, trainer: pl.Trainer, drawn_seed: int | None) -> None:
    """Tell the record of the run, if there will be one, what was configured, and where."""
    context = context_if_ours(trainer)
    if context is not None and context.recording is not None:
        about: dict[str, Any] = {"config": portable(cfg), "drawn_seed": drawn_seed}
        about["checkpoints"] = _checkpoints(Path(cfg.run_dir))
        about |= {"directory": str(Path.cwd()), "run_dir": str(Path(cfg.run_dir).absolute())}
        if cfg.ckpt is not None:
            about["ckpt"] = hash_of_checkpoint(Path(cfg.ckpt))
        context.recording.about = about


def _checkpoints(run_dir: Path) -> list[str]:
    """Those that lie there already, below the run's directory."""
    return sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*.ckpt"))


def hash_of_checkpoint(path: Path) -> str:
    """Of the file's content; empty if there is none."""
    try:
        with open_input(path, "the checkpoint") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except UserError:
        return ""
