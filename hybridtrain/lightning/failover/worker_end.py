"""The last actions of a stopped or failed worker."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_warn

from hybridtrain.engine.memory.scratch_file import as_bytes, read
from hybridtrain.engine.protocol.messages import Saved, Stopped
from hybridtrain.engine.worker.inbox import StopRequested
from hybridtrain.engine.worlds.channel import ChannelClosed
from hybridtrain.engine.worlds.worker_exit import Failed
from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.checkpoint_writing import CheckpointWriting
from hybridtrain.lightning.checkpointing.epoch_checkpoint import EpochCheckpoint
from hybridtrain.lightning.failover.leader_failover import become_leader
from hybridtrain.lightning.hooks.trainer_hooks import end_interrupted, has_saved
from hybridtrain.lightning.worker_context import WorkerContext
from hybridtrain.util.files import interrupted_in
from hybridtrain.util.streams import say

_NO_GROUP = "Default process group has not been initialized"  # torch's words


def advise(error: BaseException) -> None:
    """Add a note on replacements for torch.distributed, if the user's code has called it."""
    if any(_NO_GROUP in line for line in traceback.format_exception_only(error)):
        error.add_note(
            "Workers of this strategy have no process group of torch.distributed. Use "
            "self.all_gather, trainer.strategy.reduce, .broadcast and .barrier, which work under "
            "every strategy; trainer.global_rank and trainer.world_size for get_rank and "
            "get_world_size; and no DistributedSampler: samples are shared out by the strategy."
        )


@dataclass(frozen=True)
class WorkerEnd:
    """Ends a worker that is stopped or has failed; one worker writes the final checkpoint.

    Args:
        trainer: of this worker.
        worker: this one.
        checkpoint: has this worker's RNG states.
        keeping: writes checkpoints.
        unify: brings what a checkpoint has to one version.
        give_up: takes back what this worker has begun and cannot finish.
    """

    trainer: Any
    worker: WorkerContext
    checkpoint: EpochCheckpoint
    keeping: CheckpointWriting
    unify: Callable[[], None]
    give_up: Callable[[], None]

    def stop(self, stop: StopRequested) -> None:
        """The worker is asked to stop."""
        client = self.worker.client
        client.note(Stopped(left=self._left_behind()))
        client.group.go_alone()
        self._take_turn_saving()
        end_worker(self.trainer, stop)

    def fail(self, error: BaseException) -> None:
        """Report the exception to the parent; if chosen, write the final checkpoint.

        The report comes first: other workers may wait for this one.
        """
        client = self.worker.client
        advise(error)
        client.heartbeat.fail()
        try:
            client.pushes.leave()
            where, left = client.heartbeat.failed_in, self._left_behind()
            client.line.send(Failed.of(error, where, waits=True, left=left))
            with suppress(StopRequested, UserError):  # a step that is under way may be broken off
                client.pushes.settle()
            client.group.go_alone()
            whole_rounds = self.worker.requirements.whole_rounds
            counted = self.trainer.global_step == client.steps.version or not whole_rounds
            self._take_turn_saving(able=counted)
        except ChannelClosed:
            client.group.go_alone()  # the parent has ended
        end_worker(self.trainer, error)

    def _left_behind(self) -> bytes:
        """A worker's random numbers, for the last checkpoint; empty if it has none as yet."""
        with suppress(Exception):  # in whatever state it is, its end must be reported
            return as_bytes(self.checkpoint.rng_states(False))
        return b""

    def _take_turn_saving(self, able: bool = True) -> None:
        """Wait for permission; one worker writes the final checkpoint.

        Not ``able``: Lightning has not counted the last update yet.
        """
        if (left := self.worker.client.inbox.await_permission()) is not None:
            known = {worker: read("", each) for worker, each in left.items() if each}
            self.checkpoint.restore_rng_states(known)
            self.worker.client.note(Saved(able and self._save()))

    def _save(self) -> bool:
        """Write a checkpoint of the last whole update beside the others; return whether it was.

        Needs no other worker.
        """
        trainer = self.trainer
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        if not trainer.is_global_zero or not folder or trainer.state.fn != "fit":
            return False
        if trainer.fast_dev_run:  # no callback of Lightning writes one either
            return False
        path = interrupted_in(Path(folder))
        try:
            self.keeping.show_trained(trainer.lightning_module)
            self.unify()  # other workers may have made later updates
            self.worker.collectives.stay_local(False)  # user code may gather, alone
            if trainer.global_step == 0:
                return False
            if self.worker.client.worker != 0:
                become_leader(trainer)
            self.give_up()
            trainer.save_checkpoint(path)
            for callback in trainer.checkpoint_callbacks:  # one is enough
                has_saved(callback, trainer.global_step)
        except Exception as error:
            # Not Lightning's, which only worker 0 gives.
            warnings.warn(f"no checkpoint could be written to {path}: {error}", stacklevel=2)
            return False
        if written := str(path) not in self.keeping.unsaved.lost:  # else a warning was given
            say(f"stopped after step {trainer.global_step}, checkpoint: {path}")
        return written


def end_worker(trainer: pl.Trainer, error: BaseException) -> None:
    """Call the callbacks' ``on_exception`` and finish the loggers, as Lightning does."""
    try:
        end_interrupted(trainer, error)
    except (Exception, StopRequested) as second:  # the first error is the one to report
        rank_zero_warn(f"while ending after {type(error).__name__}: {second!r}")
