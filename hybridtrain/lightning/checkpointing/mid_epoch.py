"""Resume in the middle of an epoch: save which samples are left, and restore from that.

Lightning saves the number of mini-batches done, but not their samples, and restarts the loaders
from the beginning. So under the one key ``hybridtrain`` a checkpoint holds, for every loader, the
remaining positions in the epoch's order, and how to draw that order again (its seed, or the
remaining indices of a user's sampler). A run may resume with another number of workers, another
batch size or another policy. Without the key the checkpoint is Lightning's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from hybridtrain.engine.protocol.messages import LoaderPass
from hybridtrain.engine.protocol.spans import Spans, positions
from hybridtrain.engine.samplers import EpochPlan, EpochSampler, Order, Seeded, UnfinishedPass
from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.epoch_state import EpochEvent, is_settled
from hybridtrain.lightning.checkpointing.saved_counters import (
    batches_done,
    is_epoch_beginning,
    is_in_batch_hook,
    leave_batch_hook,
    set_back,
)
from hybridtrain.util.option_types import shown

KEY = "hybridtrain"
FORMAT = 1


@dataclass(frozen=True)
class ResumedEpoch:
    """An epoch to resume; ``loaders``: ``None`` if another strategy wrote the checkpoint."""

    epoch: int
    batches: int
    loaders: list[dict[str, Any]] | None
    stepped: int | None = None  # mini-batches with a step so far, if Lightning would miscount
    event: EpochEvent = EpochEvent.RESUMES  # where in the epoch the checkpoint was written

    def begun(self, number: int, plan: EpochPlan) -> UnfinishedPass | None:
        """The remaining pass of loader ``number``; ``None``: a whole epoch."""
        if self.loaders is None:
            whole = sum(plan.sizes)
            steps = max(-(-plan.length // whole), 1)
            batches = self.batches if self.batches <= steps else self.batches % steps
            start = min(batches * whole, plan.length)
            return UnfinishedPass(self.epoch, plan.order, ((start, plan.length),), batches)
        if number >= len(self.loaders):
            return None
        state = self.loaders[number]
        if state["length"] != plan.length:
            rank_zero_warn(
                f"the checkpoint was written in the middle of an epoch over {state['length']} "
                f"samples, now there are {plan.length}; the epoch begins anew"
            )
            return UnfinishedPass(self.epoch, plan.order, ((0, plan.length),), state["batches"])
        spans = tuple((start, stop) for start, stop in state["spans"])
        crew = tuple(state.get("crew", ()))  # only from another worker of this run
        if not set(crew) <= set(range(len(plan.sizes))):
            raise UserError(f"ckpt: the checkpoint has a crew of other workers: {shown(crew)}")
        return UnfinishedPass(
            self.epoch, _order(state), spans, state["batches"], state["lap"], crew
        )


def _order(state: dict[str, Any]) -> Order:
    if state["indices"] is None:
        return Seeded(state["length"], state["seed"])
    indices, sizes = state["indices"], state.get("sizes")  # sizes: of mini-batches dealt out whole
    order = indices.tolist() if sizes is None else [x.tolist() for x in indices.split(sizes)]
    return lambda epoch: order


def rest_of(
    sampler: EpochSampler, unseen: dict[LoaderPass, Spans], has_unsent: bool
) -> dict[str, Any]:
    """The rest of a loader's pass; arguments as of :meth:`EpochSampler.progress`."""
    lap, batches, spans = sampler.progress(unseen, has_unsent)
    source, indices, sizes = sampler.source, None, None
    if not isinstance(source, Seeded):  # it cannot be drawn again
        order = sampler.order or source(sampler.epoch)
        remaining: list[Any] = [order[p] for p in positions(spans)]
        spans = ((0, len(remaining)),)
        if remaining and not isinstance(remaining[0], int):
            sizes = [len(batch) for batch in remaining]
            remaining = [index for batch in remaining for index in batch]
        indices = torch.tensor(remaining, dtype=torch.int64)
    return {
        "lap": lap,
        "batches": batches,
        "spans": [list(span) for span in spans],
        "length": sampler.plan.length,
        "whole": sum(sampler.plan.sizes),
        "seed": source.seed if isinstance(source, Seeded) else None,
        "indices": indices,
        "sizes": sizes,
    }


def done_by_all(loaders: Sequence[Mapping[str, Any]], n_workers: int) -> int:
    """Mini-batches of all workers in this epoch, of the loader with the most."""
    done = [
        (each["lap"] + 1) * each["length"] - sum(stop - start for start, stop in each["spans"])
        for each in loaders
    ]
    sizes = [each["whole"] for each in loaders]
    return max((-(-n * n_workers // size) for n, size in zip(done, sizes, strict=True)), default=0)


def deal(checkpoint: dict[str, Any], worker: int, of: int, limit: int, every: int) -> None:
    """Deal what all workers have done of an epoch to each worker of a run with a limit.

    The checkpoint has the count of the worker that wrote it, with which Lightning might end the
    epoch at once. A worker whose share is done ends it by its sampler.

    Args:
        checkpoint: to be changed.
        worker: of ``of`` workers; 0 for each of them in lock-step, where all have one count.
        of: see ``worker``.
        limit: mini-batches of each worker.
        every: mini-batches of one step.
    """
    ours, loops = read_format(checkpoint), checkpoint.get("loops", {}).get("fit_loop")
    if ours is None or (done := ours.get("together")) is None or loops is None or ours.get("over"):
        return
    if loops["epoch_loop.batch_progress"]["is_last_batch"]:
        return  # all workers had done all
    share = (done // every + worker) // of * every
    for loader in ours["loaders"]:
        loader["batches"] = share
    ours["batches"] = max(min(share, limit - 1), 0)


def read_format(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """The entry under the key, if there is one.

    Raises:
        UserError: if a newer version of this package wrote it.
    """
    ours: dict[str, Any] | None = checkpoint.get(KEY)
    written = ours.get("format") if isinstance(ours, Mapping) else None
    if isinstance(written, int) and written > FORMAT:
        raise UserError(
            f"the checkpoint's key {KEY!r} has format {written}, and this version of "
            f"hybridtrain reads up to {FORMAT}; update hybridtrain, or delete the key from the file"
        )
    return ours


def read(checkpoint: dict[str, Any]) -> ResumedEpoch | None:
    """Read a checkpoint that was written within an epoch; ``None`` for any other.

    Sets Lightning's counters in it to the last step, from which the samplers resume.

    Raises:
        UserError: if a newer version of this package wrote it.
    """
    ours = read_format(checkpoint)
    loops = checkpoint.get("loops", {}).get("fit_loop")
    if loops is None:
        return None
    epoch = loops["epoch_progress"]["current"]
    if is_settled(epoch):
        return None  # it was written between two epochs
    progress = loops["epoch_loop.batch_progress"]
    if ours is not None and not ours["loaders"] and is_epoch_beginning(epoch):
        set_back(loops, 0)
        return None
    if ours is None or not ours["loaders"]:
        if ours is None and (n_done := batches_done(progress)) > 0:
            return _elsewhere(epoch["processed"], n_done)
        return None  # streams resume as Lightning lets them
    in_hook = is_in_batch_hook(progress) and batches_done(progress) == ours["batches"]
    stepped = leave_batch_hook(loops) if in_hook else set_back(loops, ours["batches"])
    event = EpochEvent.RESUMES_IN_HOOK if in_hook else EpochEvent.RESUMES
    if ours.get("over"):
        event = EpochEvent.RESUMES_AT_END
    return ResumedEpoch(ours["epoch"], ours["batches"], ours["loaders"], stepped, event)


def _elsewhere(epoch: int, batches: int) -> ResumedEpoch:
    rank_zero_warn(
        f"the checkpoint was written in the middle of epoch {epoch} by another strategy; its "
        f"{batches} mini-batches are taken to have been as large as this run's, all workers "
        "together, and in the same order"
    )
    return ResumedEpoch(epoch, batches, None)
