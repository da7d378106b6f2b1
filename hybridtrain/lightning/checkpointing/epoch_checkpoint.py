"""Add the place in the epoch to a checkpoint, and resume from it.

Beside the samples that are left, a checkpoint gets the RNG states and metrics, and Lightning's
counters and schedules as of the last step that it contains.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridtrain.engine.protocol.messages import LoaderPass
from hybridtrain.engine.protocol.spans import Spans
from hybridtrain.engine.samplers import EpochSampler, Seeded
from hybridtrain.lightning.checkpointing.checkpoint_content import (
    WORKERS,
    check_content,
    check_weights,
    restoring,
)
from hybridtrain.lightning.checkpointing.committed_batches import CommittedBatches
from hybridtrain.lightning.checkpointing.epoch_ends import EpochEnds
from hybridtrain.lightning.checkpointing.epoch_position import EpochPosition
from hybridtrain.lightning.checkpointing.epoch_state import EpochState
from hybridtrain.lightning.checkpointing.mid_epoch import (
    FORMAT,
    KEY,
    deal,
    done_by_all,
    read,
    rest_of,
)
from hybridtrain.lightning.checkpointing.rng_state import RngState
from hybridtrain.lightning.checkpointing.saved_counters import (
    count_from_zero,
    reopen,
    take_off_steps,
    validate_again,
)
from hybridtrain.lightning.hooks.loop_hooks import limit_now
from hybridtrain.lightning.worker_context import WorkerContext


class EpochCheckpoint:
    """Puts this worker's place in the epoch into checkpoints, and takes it from them.

    Args:
        trainer: of this worker, with the user's limit of mini-batches.
        worker: this one.
        samplers: of the training loaders, at any time.
        position: of this worker in the epoch.
        committed: the mini-batches with steps.
        ends: of resumed epochs.
        rng_state: of this worker.
    """

    def __init__(
        self,
        trainer: Any,
        worker: WorkerContext,
        samplers: Sequence[EpochSampler],
        position: EpochPosition,
        committed: CommittedBatches,
        ends: EpochEnds,
        rng_state: RngState,
    ) -> None:
        self._trainer, self._samplers, self._position = trainer, samplers, position
        self._client, self._requirements = worker.client, worker.requirements
        self._committed, self._ends, self._rng_state = committed, ends, rng_state
        self._limit: float = trainer.limit_train_batches
        self._numbers_of: dict[int, Any] = {}  # RNG states of other workers
        # Mini-batches before the current validation, of one that is under way.
        self._before_validation: Callable[[], int | None] = lambda: None

    def follow_validation(self, before: Callable[[], int | None]) -> None:
        """Ask ``before`` how many mini-batches validations had before the one under way."""
        self._before_validation = before

    # ---- writing --------------------------------------------------------------------------------

    def write(self, checkpoint: dict[str, Any], for_now: bool = False) -> dict[str, Any]:
        """Add the rest of the epoch to a checkpoint.

        ``for_now``: for a worker of this run, whose shared queue has the rest.
        """
        if self._trainer.state.fn != "fit" or "optimizer_states" not in checkpoint:
            return checkpoint
        epoch, committed = self._position.epoch, self._committed
        loops = checkpoint["loops"]["fit_loop"]
        count_from_zero(checkpoint)
        closing = self._position.is_closing
        over = closing and any(sampler.has_begun(epoch - 1) for sampler in self._samplers)
        if over:
            epoch -= 1
            reopen(loops)
        apart = any(WORKERS in state for state in checkpoint["optimizer_states"])
        alone = committed.has_unsent and not apart  # the resumed run makes these steps again
        rest = self._rest(epoch, alone, for_now)
        if alone and committed.before_unsent is not None:
            loops["epoch_loop.batch_progress"]["is_last_batch"] = over = False
            logged, schedules = committed.before_unsent
            take_off_steps(checkpoint, committed.n_unsent, logged)
            checkpoint = schedules.give(checkpoint)
        elif self._others_go_on(rest):
            loops["epoch_loop.batch_progress"]["is_last_batch"] = over = False  # of this worker
            checkpoint = self._ends.reopened(checkpoint, epoch)
        again = alone or committed.under_way
        before = None if again else self._before_validation()  # it follows a step
        if before is not None:
            validate_again(loops, before)
        dice = self.rng_states(together=not alone)
        state = {"over": over, "dice": dice, "metrics": self._ends.state()}
        if self._numbers_of:
            state["dice_of"] = self._numbers_of
        return {**checkpoint, KEY: {**rest, **state}}

    def _rest(self, epoch: int, alone: bool, for_now: bool) -> dict[str, Any]:
        """What is left of the epoch. ``alone``: steps that the masters lack are not done."""
        resumed, wants = self._position.resumed, self._requirements
        # Of the shared queue, now: the last checkpoint's rest is outdated.
        unseen = {} if wants.whole_rounds or for_now else self._client.snapshots.unseen
        batches = self._committed.done(epoch, sent=alone)
        if batches is None:
            batches = resumed.batches if resumed is not None and resumed.epoch == epoch else 0
        begun = [x for x in self._samplers if x.has_begun(epoch) or _is_drawn(x, epoch, unseen)]
        loaders = [rest_of(sampler, unseen, alone) for sampler in begun]
        rest: dict[str, Any] = {
            "format": FORMAT,
            "epoch": epoch,
            "batches": batches,
            "loaders": loaders,
        }
        if wants.data != "shares" and not for_now:
            rest["together"] = done_by_all(loaders, self._client.n_workers)
        return rest

    def _others_go_on(self, rest: Mapping[str, Any]) -> bool:
        """Whether others have samples of this epoch where this worker has done its last
        mini-batch: in lock-step only those of lost workers; the rest is beyond a limit, or dropped.
        """
        limit, ended = limit_now(self._trainer), any(s.ended for s in self._samplers)
        if "together" in rest and limit < math.inf:
            ended = rest["loaders"] and (ended or rest["batches"] >= limit)
            met = self._position.state is EpochState.OVER
            return ended and not met and rest["together"] < limit * self._client.n_workers
        remaining = any(sampler.left_by(self._client.group.gone) for sampler in self._samplers)
        any_remaining = any(loader["spans"] for loader in rest["loaders"])
        return ended and any_remaining and (remaining or not self._requirements.whole_rounds)

    # ---- RNG states -----------------------------------------------------------------------------

    def rng_states(self, together: bool) -> dict[str, Any]:
        """This worker's RNG states for a checkpoint.

        ``together``: it has this worker's own steps, too; else only those that the masters have.
        """
        has_unsent = self._committed.has_unsent and not together
        return self._rng_state.state(has_unsent)

    def restore_rng_states(self, numbers_of: Mapping[int, Any]) -> None:
        """The next checkpoint has these workers' RNG states, too; empty: it has not."""
        others = {k: v for k, v in numbers_of.items() if k != self._client.worker}
        self._numbers_of = {k: v for k, v in others.items() if v is not None}

    # ---- resuming -------------------------------------------------------------------------------

    def restore(self, checkpoint: dict[str, Any], source: str = "ckpt_path") -> dict[str, Any]:
        """Check a checkpoint and prepare to resume from it; return what Lightning is to load."""
        resumes = self._trainer.state.fn == "fit"
        check_content(checkpoint, source, resumes)
        module = self._trainer.lightning_module
        check_weights(source, checkpoint["state_dict"], module, strict=False)
        with restoring():
            self._resume(checkpoint, resumes)
        return checkpoint

    def _resume(self, checkpoint: dict[str, Any], resumes: bool) -> None:
        if resumes:
            if isinstance(self._limit, int):
                self._deal(checkpoint, self._limit)
            self._position.resume(read(checkpoint))
            self._ends.keep(checkpoint.get(KEY, {}).get("metrics", {}))
            if not self._client.group.joins:  # a restarted worker has the RNG states of another
                self._rng_state.keep(checkpoint.get(KEY, {}))
        if self._position.resumed is not None:
            message = "You're resuming from a checkpoint that ended before the epoch ended"
            warnings.filterwarnings("ignore", message)  # which works here

    def _deal(self, checkpoint: dict[str, Any], limit: int) -> None:
        client, every = self._client, int(self._trainer.accumulate_grad_batches)
        alike = self._requirements.data == "shares"
        deal(checkpoint, 0 if alike else client.worker, client.n_workers, limit, every)


def _is_drawn(sampler: EpochSampler, epoch: int, unseen: Mapping[LoaderPass, Spans]) -> bool:
    """Whether other workers have begun the epoch; a user's order all would have met for."""
    known = isinstance(sampler.source, Seeded) and sampler.epoch == epoch
    return known and LoaderPass(sampler.number, epoch, 0) in unseen
