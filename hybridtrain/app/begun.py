"""What a run does to its directory when it begins, and how its checkpoints are kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from pytorch_lightning import Trainer

from hybridtrain.app import kept
from hybridtrain.lightning.keeping import Keeping


def begin(cfg: DictConfig) -> None:
    """Sign the directory, and take away the summary of an earlier time: it has not ended now."""
    if "LOCAL_RANK" in os.environ:
        return
    directory = Path(cfg.run_dir)
    kept.sign(directory)
    (directory / kept.SUMMARY_FILE).unlink(missing_ok=True)


@contextmanager
def keeping_whole(trainer: Trainer) -> Iterator[None]:
    """Let Lightning's own strategies write checkpoints as ours do."""
    strategy: Any = trainer.strategy
    if hasattr(strategy, "keeping"):
        yield
        return
    strategy.keeping = keeping = Keeping.of("blocking")
    with keeping.listening(trainer):
        keeping.take_over(trainer, changes=False)
        yield


def unsaved(trainer: Trainer) -> dict[str, str]:
    """The checkpoints that a disk has refused, with its reasons."""
    keeping = getattr(trainer.strategy, "keeping", None)
    return {} if keeping is None else dict(keeping.unsaved.lost)
