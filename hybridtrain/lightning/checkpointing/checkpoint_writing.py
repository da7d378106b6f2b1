"""How a run's checkpoints are written: blocking or in the background, by the writing worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import ModelCheckpoint, WeightAveraging
from pytorch_lightning.loggers import Logger, TensorBoardLogger

from hybridtrain.engine.memory.scratch_file import Scratch
from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.checkpoint_content import Restoration
from hybridtrain.lightning.checkpointing.checkpoint_io import Unsaved, WholeCheckpointIO, heard
from hybridtrain.lightning.checkpointing.saved_multiples import OneUpdate, save_by_all_updates
from hybridtrain.lightning.hooks.loop_hooks import accumulates
from hybridtrain.lightning.hooks.points import Point, around, before
from hybridtrain.lightning.hooks.trainer_hooks import (
    checkpoint_plugin,
    saves_as_lightning,
    swap_weights,
    uploads_checkpoints,
)
from hybridtrain.lightning.run_context import checkpoints_of, strategy_of
from hybridtrain.lightning.states.logger_state import enable_writing
from hybridtrain.util.files import check_input, fault_of, fault_of_old, is_archive

_COARSE_S = 2.0  # clocks of file systems


@dataclass
class CheckpointWriting:
    """The option ``checkpoint`` of a strategy; ``unsaved``: of the last run.

    ``broken_since_s``: when the last run began, if it was a training that failed.
    """

    how: str
    unsaved: Unsaved = field(default_factory=Unsaved)
    broken_since_s: float | None = None
    _one_update: OneUpdate | None = field(default=None, repr=False)  # in a worker
    _counts_all: bool = False  # updates of all workers, which run freely
    _prepared: list[ModelCheckpoint] = field(default_factory=list, repr=False)
    _swapping: list[Swapping] = field(default_factory=list, repr=False)

    @contextmanager
    def listening(self, trainer: Any) -> Iterator[None]:
        """In the calling process, while workers run: read ``unsaved`` at the end."""
        scratch, began_s = Scratch(), time.time()
        self.unsaved, self.broken_since_s = Unsaved(room=scratch.path), None
        try:
            yield
        except BaseException:
            self.broken_since_s = began_s if trainer.state.fn == "fit" else None
            raise
        finally:
            self.unsaved = heard(scratch)
            for path, reason in self.unsaved.lost.items():
                rank_zero_warn(f"in the end there is no new checkpoint {path} ({reason})")

    def is_whole(self) -> None:
        """The trained state is in this process."""
        self.broken_since_s = None

    def figures(self) -> dict[str, Any]:
        """For ``run_stats()``: missing checkpoints, with the reason."""
        return {"unsaved": dict(self.unsaved.lost)}

    def forget_lost(self, trainer: Any) -> None:
        """In the calling process, after training: let callbacks name only files that exist.

        The best is then the best of these.
        """
        gone = {path for path in self.unsaved.lost if not Path(path).is_file()}
        for callback in checkpoints_of(trainer):
            for name in ("best_model_path", "last_model_path", "kth_best_model_path"):
                if getattr(callback, name) in gone:
                    setattr(callback, name, "")
            for path in gone & callback.best_k_models.keys():
                del callback.best_k_models[path]
            if not callback.best_model_path and (scores := callback.best_k_models):
                choose = min if callback.mode == "min" else max
                callback.best_model_path = path = choose(scores, key=lambda x: float(scores[x]))
                callback.best_model_score = scores[path]

    def refuses(self, path: Any) -> bool:
        """Whether the calling process must not write there, because training failed.

        Callbacks that save on a failure did so in the worker. Lightning calls them again in this
        process, which lacks the trained state.
        """
        if self.broken_since_s is None:
            return False
        file = Path(path)
        if not file.is_file() or file.stat().st_mtime < self.broken_since_s - _COARSE_S:
            rank_zero_warn(
                f"no checkpoint is written to {path}: training has failed, and what the workers "
                "had trained is not in this process; go on from a checkpoint that they have written"
            )
        return True

    def take_over(self, trainer: Any, one_update: OneUpdate, counts_all: bool) -> None:
        """In every worker: write in the background, and change callbacks that save.

        ``counts_all``: these count updates of all workers, which run freely.
        """
        self._one_update, self._counts_all = one_update, counts_all
        self.write_whole(trainer)
        Restoration(trainer)
        self.prepare(trainer)

    def write_whole(self, trainer: Any) -> None:
        """Install the writer of whole files, unless the user has an own plugin."""
        strategy = strategy_of(trainer)
        enable_writing(trainer.loggers)
        if type(checkpoint_plugin(strategy)) in (type(None), TorchCheckpointIO):
            strategy.checkpoint_io = WholeCheckpointIO(
                self.unsaved, may_defer=self.how == "background"
            )

    def prepare(self, trainer: Any) -> None:
        """Change callbacks that save, and watch those that average weights.

        Called again after ``configure_callbacks``.
        """
        for callback in checkpoints_of(trainer):
            if callback not in self._prepared:
                self._prepared.append(callback)
                self._prepare(callback, trainer)

        known = [each.callback for each in self._swapping]
        averaging = [each for each in trainer.callbacks if isinstance(each, WeightAveraging)]
        self._swapping += [Swapping(each) for each in averaging if each not in known]

    def show_trained(self, module: LightningModule) -> None:
        """Within a validation, too: let the module have the weights that it trains."""
        for each in self._swapping:
            if each.swapped:
                swap_weights(each.callback, module)

    def _prepare(self, callback: Any, trainer: Any) -> None:
        assert self._one_update is not None, "this is a worker"
        before(Point.CHECKPOINT_DECISION, callback, self._one_update.decide)
        if type(callback).on_train_batch_end is ModelCheckpoint.on_train_batch_end:
            around(Point.CHECKPOINT_HOOKS, callback, save_whole_steps)
        if self._counts_all:
            save_by_all_updates(callback, self._one_update)
        writer = checkpoint_plugin(strategy_of(trainer))
        if not isinstance(writer, WholeCheckpointIO):
            return
        around(Point.CHECKPOINT_SEARCH, callback, find_whole)
        if callback.save_last == "link":
            around(Point.CHECKPOINT_LINK, callback, self.link)
        at_once = any(reads_at_once(each) for each in trainer.loggers)
        if self.how == "background" and not at_once and may_come_later(callback):
            around(Point.CHECKPOINT_SAVE, callback, writer.save_later)
            around(Point.CHECKPOINT_EXISTS, callback, writer.exists_then)

    def link(
        self, proceed: Callable[..., None], trainer: Any, filepath: str, linkpath: str
    ) -> None:
        """Link only to an existing file, and survive a disk that refuses the link."""
        try:
            if not self.unsaved.refused:
                proceed(trainer, filepath, linkpath)
                return
        except OSError as error:
            self.unsaved.lose(linkpath, error)
        strategy_of(trainer).barrier()  # as in the other workers, which link nothing


class Swapping:
    """Whether a callback has exchanged the module's weights and their averages, to validate."""

    def __init__(self, callback: WeightAveraging) -> None:
        self.callback, self.swapped = callback, False
        around(Point.SWAP, callback, self.swap)

    def swap(self, proceed: Callable[..., None], module: LightningModule) -> None:
        """They are exchanged, or exchanged back."""
        proceed(module)
        self.swapped = not self.swapped


def save_whole_steps(proceed: Callable[..., None], trainer: Any, module: Any, *about: Any) -> None:
    """In place of a callback's hooks: save nothing between accumulated mini-batches.

    A resumed run makes these again, and the module's buffers would have them twice.
    """
    ends_batch = len(about) > 1  # outputs, batch, number; else an exception
    if not (ends_batch and accumulates(trainer)):
        proceed(trainer, module, *about)


def check_whole(path: Any) -> None:
    """Check a checkpoint to resume from, before processes start.

    Raises:
        UserError: if the archive is damaged; Lightning judges other files and missing ones.
    """
    if not isinstance(path, str | Path) or not Path(path).exists() or Path(path).is_dir():
        return
    check_input(path, "the checkpoint ckpt_path=")
    fault = fault_of(Path(path)) if is_archive(path) else fault_of_old(Path(path))
    if fault is not None:
        raise UserError(f"ckpt_path={str(path)!r} was given, but {fault}; give another")


def find_whole(proceed: Callable[[Any], set[str]], trainer: Any) -> set[str]:
    """Let ``ckpt_path="last"`` skip damaged files."""
    found = {path: fault_of(Path(path)) for path in proceed(trainer) if "://" not in path}
    for path, fault in found.items():
        if fault is not None:
            rank_zero_warn(f"the checkpoint {path} is passed over: {fault}")
    return {path for path, fault in found.items() if fault is None}


def may_come_later(callback: Any) -> bool:
    """Whether the file may appear after the callback has saved it.

    Not for a link, which would be broken until then, nor for a user's own callback, which may read
    the file.
    """
    known = isinstance(callback, ModelCheckpoint) and saves_as_lightning(callback)
    return known and callback.save_last != "link"


def reads_at_once(logger: Logger) -> bool:
    """Whether the logger may upload checkpoints as soon as they are saved."""
    told = type(logger).after_save_checkpoint
    if told in (Logger.after_save_checkpoint, TensorBoardLogger.after_save_checkpoint):
        return False
    return uploads_checkpoints(logger)
