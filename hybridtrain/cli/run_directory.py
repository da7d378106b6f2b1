"""What a run does to its directory when it begins, and how its checkpoints are kept."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from pytorch_lightning import Trainer
from pytorch_lightning.loggers import Logger

from hybridtrain.cli.claim import started_by_a_run
from hybridtrain.cli.resume import kept_runs
from hybridtrain.cli.validation.host_checks import refusal_of
from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.checkpoint_writing import CheckpointWriting
from hybridtrain.lightning.run_context import strategy_of


def begin(cfg: DictConfig) -> None:
    """Sign the directory, and take away the summary of an earlier time: it has not ended now."""
    if started_by_a_run():
        return
    directory = Path(cfg.run_dir)
    try:
        kept_runs.sign(directory)
        (directory / kept_runs.SUMMARY_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"the run directory {directory} cannot be written ({error.strerror}); choose another "
            "with hydra.run.dir=DIR"
        ) from None


@contextmanager
def keeping_whole(trainer: Trainer) -> Iterator[None]:
    """Let Lightning's own strategies write checkpoints as ours do."""
    strategy: Any = strategy_of(trainer)
    if hasattr(strategy, "keeping"):
        yield
        return
    strategy.keeping = keeping = CheckpointWriting("blocking")
    with keeping.listening(trainer):
        keeping.take_over(trainer, changes=False)
        yield
    keeping.forget_lost(trainer)


def writable(loggers: Sequence[Logger]) -> list[Logger]:
    """Those that can write yet; of the others it is said that they get no more."""
    found = []
    for logger in loggers:
        place = getattr(logger, "log_dir", None) or logger.save_dir
        refusal = None if place is None else refusal_of(Path(place))
        if refusal is None:
            found.append(logger)
        else:
            name = type(logger).__name__
            print(f"hybridtrain: {name}: no log of the test ({refusal.strerror})", file=sys.stderr)
    return found


def unsaved(trainer: Trainer) -> dict[str, str]:
    """The checkpoints that a disk has refused, with its reasons."""
    keeping = getattr(strategy_of(trainer), "keeping", None)
    return {} if keeping is None else dict(keeping.unsaved.lost)
