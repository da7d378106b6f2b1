"""The configuration of a run, as its record keeps it, and back again."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig, OmegaConf

RUN_DIR = "{run_dir}"  # stands for the run's directory, which is another one in a replay


def describe_run(cfg: DictConfig, trainer: pl.Trainer) -> None:
    """Tell the record of the run, if there will be one, what was configured, and where."""
    recording = getattr(trainer.strategy, "recording", None)
    if recording is not None:
        about = {"config": portable(cfg), "directory": str(Path.cwd()), "run_dir": str(cfg.run_dir)}
        if cfg.ckpt is not None:
            about["ckpt"] = hash_of_checkpoint(Path(cfg.ckpt))
        recording.about = about


def portable(cfg: DictConfig) -> dict[str, Any]:
    """Everything resolved, with a name in the place of the run's directory."""
    copy = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    OmegaConf.set_struct(copy, False)
    copy.run_dir = RUN_DIR
    content: Any = OmegaConf.to_container(copy, resolve=True)
    return {str(key): value for key, value in content.items()}


def placed(content: Any, run_dir: Path) -> Any:
    """The other way round."""
    match content:
        case dict():
            return {key: placed(value, run_dir) for key, value in content.items()}
        case list():
            return [placed(value, run_dir) for value in content]
        case str():
            return content.replace(RUN_DIR, os.fspath(run_dir))
    return content


def hash_of_checkpoint(path: Path) -> str:
    """Of the file's content; empty if there is none."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError:
        return ""
