"""Runs one cell in a fork of this process, and says what it has left."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from tests.lightning.metamorphic import strategies
from tests.lightning.metamorphic.relations import Relation
from tests.lightning.metamorphic.subjects import (
    EPOCHS,
    KINDS,
    Subject,
    training_data,
    validation_data,
)

LIMIT_S = 60.0
BARE = Relation()


@dataclass(frozen=True, slots=True)
class Run:
    """What trains: ``begun``: it goes on from a checkpoint of the middle of an epoch."""

    strategy: str
    workers: int
    kind: str
    data: str
    begun: bool = False

    @property
    def name(self) -> str:
        begun = "-begun" if self.begun else ""
        return f"{self.strategy}-{self.workers}-{self.kind}-{self.data}{begun}"


def play(run: Run, relation: Relation, folder: Path) -> dict[str, Any]:
    """What is left of a run with that observer, in a fork.

    Raises:
        AssertionError: with what the run has written, if it did not end well or in time.
    """
    folder.mkdir(parents=True)
    if (pid := os.fork()) == 0:
        _be_the_child(run, relation, folder)
    limit = time.monotonic() + LIMIT_S
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > limit:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"it hangs: {(folder / 'log').read_text()[-4000:]}")
        time.sleep(0.005)
    assert ended[1] == 0, (folder / "log").read_text()[-4000:]
    return dict(torch.load(folder / "left.pt", weights_only=False))


def _be_the_child(run: Run, relation: Relation, folder: Path) -> None:
    status = 1
    try:
        os.setsid()
        torch.set_num_threads(1)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        warnings.simplefilter("ignore")
        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
        os.chdir(folder)
        torch.save(_train(run, relation, folder), folder / "left.pt")
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


class _End(pl.Callback):
    """What all workers have come to, as a checkpoint holds it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


class _StopInTheMiddle(pl.Callback):
    """A checkpoint behind the second mini-batch, and no more training.

    Under load a free-running worker may get one mini-batch of an epoch: then at the epoch's end.
    The first worker, which writes, may get none before another stops the run: then at its end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 1:
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.should_stop:
            self._stop(trainer)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        if not self.path.exists():
            trainer.save_checkpoint(self.path)

    def _stop(self, trainer: Any) -> None:
        trainer.save_checkpoint(self.path)
        trainer.should_stop = True


def begin(run: Run, folder: Path) -> dict[str, Any]:
    """The run that ``begun`` ones go on from."""
    stops = Relation(trainer=lambda f: {"callbacks": [_StopInTheMiddle(f / "mid.ckpt")]})
    return play(replace(run, begun=False), stops, folder)


def _train(run: Run, relation: Relation, folder: Path) -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    make, options = KINDS[run.kind]
    module, data = make(relation.note), training_data(run.data)
    trainer = _trainer(run, relation, folder, options)
    validation = validation_data(*relation.validation)
    if relation.before is not None:
        relation.before(trainer, module, validation)
    loaders: dict[str, Any] = {"train_dataloaders": data}
    if validation:
        loaders["val_dataloaders"] = validation
    if relation.as_datamodule:
        loaders = {"datamodule": _AsDatamodule(data, validation)}
    if run.begun:
        loaders["ckpt_path"] = folder.parent / "begin" / "mid.ckpt"
    trainer.fit(module, **loaders, weights_only=False)
    stats = trainer.strategy.run_stats() if hasattr(trainer.strategy, "run_stats") else {}
    if relation.after is not None:
        relation.after(trainer, module, validation)
    return _left(trainer, module, stats, folder)


class _AsDatamodule(pl.LightningDataModule):
    def __init__(self, training: Any, validation: Any) -> None:
        super().__init__()
        self.training, self.validation = training, validation

    def train_dataloader(self) -> Any:
        return self.training

    def val_dataloader(self) -> Any:
        return self.validation


def _trainer(run: Run, relation: Relation, folder: Path, options: dict[str, Any]) -> pl.Trainer:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 50,
        "default_root_dir": folder,
    }
    more = dict(relation.trainer(folder))
    callbacks = [*more.pop("callbacks", ()), _End(folder / "end.ckpt")]
    saves = any(isinstance(each, pl.callbacks.Checkpoint) for each in callbacks)
    return pl.Trainer(
        strategy=strategies.make(run.strategy, run.workers, **relation.strategy(folder)),
        accelerator="cpu",
        devices=run.workers,
        max_epochs=EPOCHS,
        callbacks=callbacks,
        enable_checkpointing=saves,
        **(quiet | options | more),
    )


def _weights(module: Subject) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in module.net.named_parameters()}


def _left(trainer: Any, module: Subject, stats: dict[str, Any], folder: Path) -> dict[str, Any]:
    end = torch.load(folder / "end.ckpt", weights_only=False)
    loop = end["loops"]["fit_loop"]
    progress = loop["epoch_loop.batch_progress"]
    return {
        "weights": _weights(module),
        "counts": {
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "global_step saved": end["global_step"],
            "samples": stats.get("samples"),
            "updates": stats.get("updates"),
            "seen": module.seen.counts.tolist(),
        },
        "optimizers": end["optimizer_states"],
        "schedules": end["lr_schedulers"],
        "saved weights": {n: v for n, v in end["state_dict"].items() if n.startswith("net")},
        "mini-batches": [progress["total"]["completed"], progress["current"]["completed"]],
        "optimizer steps": [
            loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"],
            loop["epoch_loop.manual_optimization.optim_step_progress"],
        ],
    }
