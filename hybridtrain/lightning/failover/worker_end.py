"""The last actions of a stopped or failed worker."""

from __future__ import annotations

import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_warn

from hybridtrain.engine.memory.scratch_file import as_bytes, read
from hybridtrain.engine.protocol.messages import Saved
from hybridtrain.engine.worker.client import StopRequested
from hybridtrain.engine.worlds.channel import ChannelClosed
from hybridtrain.engine.worlds.worker_exit import Failed
from hybridtrain.errors import UserError
from hybridtrain.lightning.failover.leader_failover import become_leader
from hybridtrain.lightning.hooks.trainer_hooks import end_interrupted, has_saved
from hybridtrain.lightning.run_context import context_of
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


def report_failure(trainer: pl.Trainer, error: BaseException) -> None:
    """Report the exception to the parent; if chosen, write the final checkpoint.

    The report comes first: other workers may wait for this one.
    """
    context = context_of(trainer)
    client = context.client
    advise(error)
    client.heartbeat.fail()
    try:
        client.fail()
        where, left = client.heartbeat.failed_in, left_behind(trainer)
        client.line.send(Failed.of(error, where, waits=True, left=left))
        with suppress(StopRequested, UserError):  # a step that is under way may be broken off
            client.settle()
        client.go_alone()
        counted = trainer.global_step == client.version or not context.requirements.whole_rounds
        take_turn_saving(trainer, able=counted)
    except ChannelClosed:
        client.go_alone()  # the parent has ended


def left_behind(trainer: pl.Trainer) -> bytes:
    """A worker's random numbers, for the last checkpoint; empty if it has none as yet."""
    with suppress(Exception):  # in whatever state it is, its end must be reported
        return as_bytes(context_of(trainer).random_numbers())
    return b""


def take_turn_saving(trainer: pl.Trainer, able: bool = True) -> None:
    """In a stopped worker: wait for permission; one worker writes the final checkpoint.

    Not ``able``: Lightning has not counted the last update yet.
    """
    context = context_of(trainer)
    if (left := context.client.await_permission()) is not None:
        known = {worker: read("", each) for worker, each in left.items() if each}
        context.know_random_numbers(known)
        context.client.note(Saved(able and save_interrupted(trainer)))


def save_interrupted(trainer: Any) -> bool:
    """Write a checkpoint of the last whole update beside the others; return whether it was written.

    Needs no other worker.
    """
    checkpoint = trainer.checkpoint_callback
    folder = getattr(checkpoint, "dirpath", None)
    if not trainer.is_global_zero or not folder or trainer.state.fn != "fit":
        return False
    if trainer.fast_dev_run:  # no callback of Lightning writes one either
        return False
    path, context = interrupted_in(Path(folder)), context_of(trainer)
    try:
        context.keeping.show_trained(trainer.lightning_module)
        context.before_checkpoint()  # other workers may have made later updates
        context.collectives.stay_local(False)  # user code may gather, from this worker alone
        if trainer.global_step == 0:
            return False
        if context.client.worker != 0:
            become_leader(trainer)
        if context.step_rollback is not None:
            context.step_rollback.give_up()
        trainer.save_checkpoint(path)
        for callback in trainer.checkpoint_callbacks:  # one is enough
            has_saved(callback, trainer.global_step)
    except Exception as error:
        # Not Lightning's, which only worker 0 gives.
        warnings.warn(f"no checkpoint could be written to {path}: {error}", stacklevel=2)
        return False
    if written := str(path) not in context.keeping.unsaved.lost:  # else a warning was given
        say(f"stopped after step {trainer.global_step}, checkpoint: {path}")
    return written


def end_worker(trainer: pl.Trainer, error: BaseException) -> None:
    """Call the callbacks' ``on_exception`` and finish the loggers, as Lightning does."""
    try:
        end_interrupted(trainer, error)
    except (Exception, StopRequested) as second:  # the first error is the one to report
        rank_zero_warn(f"while ending after {type(error).__name__}: {second!r}")
