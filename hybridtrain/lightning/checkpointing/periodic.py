"""Checkpoints every so many seconds and every so many updates, for runs that may be killed.

Lightning's ``ModelCheckpoint`` does one of the two, and by time it asks all workers on every
mini-batch. Here the writing worker decides and writes alone, without waiting; in lock-step no other
worker can continue meanwhile, so that the file is of one update
(:meth:`HybridStrategy.before_checkpoint`).

A replay cannot repeat the clock, so the record notes after which mini-batches a checkpoint was due
by time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint

from hybridtrain.engine.protocol.messages import Described
from hybridtrain.lightning.checkpointing.checkpoint_io import WholeCheckpointIO
from hybridtrain.lightning.hooks.loop_hooks import accumulates
from hybridtrain.lightning.hooks.trainer_hooks import dump_checkpoint
from hybridtrain.lightning.run_context import strategy_of, worker_of
from hybridtrain.lightning.update_count import multiples
from hybridtrain.util.option_types import NotNegative, Positive, typed

_ALONE = (
    "while the periodic checkpoint was made, which one worker writes alone, so that nobody waits: "
    "in on_save_checkpoint, or in a state_dict; call it in a hook that all workers come to "
    "(on_train_epoch_end) and keep what it gives for on_save_checkpoint, or do without periodic "
    "checkpoints (callbacks.periodic=null, or no PeriodicCheckpoint)"
)


class PeriodicCheckpoint(Checkpoint):
    """Keeps the newest few.

    Args:
        dirpath: folder of the files ``periodic-UPDATES.ckpt``.
        every_s: seconds of training between two; None: not by time.
        every_updates: updates of the parameters between two; None: not by updates.
        keep: number of files kept.

    Raises:
        UserError: if an argument is invalid.
    """

    @typed("")
    def __init__(
        self,
        dirpath: str | Path,
        every_s: NotNegative | None = None,
        every_updates: Positive | None = None,
        keep: Positive = 2,
    ) -> None:
        self.dirpath = str(dirpath)
        self.every_s, self.every_updates, self.keep = every_s, every_updates, keep
        self.schedule: frozenset[int] | None = None  # mini-batches, in a replay
        self._files: list[str] = []
        self._batches = self._saved = 0
        self._last_s, self._last_step = 0.0, 0

    @property
    def state_key(self) -> str:
        """The callback's key in a checkpoint."""
        return self._generate_state_key(every_s=self.every_s, every_updates=self.every_updates)

    def state_dict(self) -> dict[str, Any]:
        """The files written so far."""
        return {"dirpath": self.dirpath, "files": list(self._files)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue in the same directory: older files there will be deleted."""
        if state_dict["dirpath"] == self.dirpath:
            self._files = list(state_dict["files"])

    def succeed(self, trainer: pl.Trainer) -> None:
        """Write and delete from now on, in place of a lost worker."""
        found = Path(self.dirpath).glob("periodic-*.ckpt")
        self._files = [str(x) for x in sorted(found, key=lambda x: x.stat().st_mtime_ns)]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._batches = self._saved = 0
        self._last_s, self._last_step = time.monotonic(), trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Write a checkpoint if one is due."""
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        self._batches += 1
        if accumulates(trainer):  # a resumed run makes these mini-batches again
            return
        # Of free-running workers others may have made some of the updates.
        every, step = self.every_updates, trainer.global_step
        if every is not None and multiples(every, self._last_step, step) > 0:
            self._save(trainer)
        elif self.every_s is not None and self._late():
            self._tell(trainer)
            self._save(trainer)

    def _late(self) -> bool:
        if self.schedule is not None:
            return self._batches in self.schedule
        return self.every_s is not None and time.monotonic() - self._last_s >= self.every_s

    def _tell(self, trainer: Any) -> None:
        worker = worker_of(trainer)
        if worker is not None and worker.recording is not None:
            self._saved += 1
            worker.client.pushes.settle()  # in the record the note follows the step
            worker.client.note(
                Described({f"{self.state_key} {self._saved}": {"batch": self._batches}})
            )

    def _save(self, trainer: Any) -> None:
        strategy, worker = strategy_of(trainer), worker_of(trainer)
        with nullcontext() if worker is None else worker.collectives.refusing(_ALONE):
            checkpoint = dump_checkpoint(trainer)
        step = checkpoint["global_step"]  # other workers may have made updates meanwhile
        path = str(Path(self.dirpath) / f"periodic-{step}.ckpt")
        self._files = [*(name for name in self._files if name != path), path]
        checkpoint["callbacks"][self.state_key] = self.state_dict()
        writer = strategy.checkpoint_io
        later = isinstance(writer, WholeCheckpointIO) and writer.may_defer
        with cast(WholeCheckpointIO, writer).deferring() if later else nullcontext():
            strategy.save_checkpoint(checkpoint, path)
        while len(self._files) > self.keep:
            strategy.remove_checkpoint(self._files.pop(0))
        self._last_s, self._last_step = time.monotonic(), step


def scheduled(trainer: pl.Trainer, told: Mapping[str, Any]) -> None:
    """Let a replay save after the mini-batches that the record notes."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, PeriodicCheckpoint):
            key = f"{callback.state_key} "
            saved = (said.get("batch", 0) for name, said in told.items() if name.startswith(key))
            callback.schedule = frozenset(saved)
