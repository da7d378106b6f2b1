"""Resume in the middle of an epoch: save which samples are left, and restore from that.

Lightning saves the number of mini-batches done, but not their samples, and restarts the loaders
from the beginning. So under the one key ``hybridtrain`` a checkpoint holds, for every loader, the
remaining positions in the epoch's order, and how to draw that order again (its seed, or the
remaining indices of a user's sampler). A run may resume with another number of workers, another
batch size or another policy. Without the key the checkpoint is Lightning's own.

A checkpoint holds no accumulated gradients, so mini-batches count up to the last step, and
Lightning's counters are set back to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from operator import or_
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from hybridtrain.engine.protocol.messages import LoaderPass
from hybridtrain.engine.protocol.spans import Spans, positions
from hybridtrain.engine.samplers import EpochPlan, EpochSampler, Order, Seeded, UnfinishedPass
from hybridtrain.engine.updates.groups import Groups, plain
from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.epoch_state import (
    TABLE,
    EpochEvent,
    EpochState,
    is_in_end_hook,
    is_settled,
)
from hybridtrain.lightning.hooks.loop_hooks import (
    add_to_saved_logged_step,
    callback_metrics,
    is_at_last_batch,
    log_connector,
    remeasure,
    saved_logged_step,
    set_logged_step,
    set_restarting,
    validate_from_beginning,
    validation_is_due,
)
from hybridtrain.lightning.hooks.points import Point, around, before
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


def reopen(loops: dict[str, Any]) -> None:
    """Let the resumed run end this epoch again."""
    for counts in loops["epoch_progress"].values():
        counts["processed"] -= 1


def count_from_zero(checkpoint: dict[str, Any]) -> None:
    """Set this epoch's count of updates that are not in Lightning's counters yet to zero.

    Within a step Lightning's count is one short of the server's version until Lightning adds this
    step; in an epoch's first step it is -1 if the version did not change.
    """
    for counts in _step_counts(checkpoint["loops"]["fit_loop"]):
        missing = max(-counts["current"]["completed"], 0)
        for each in (counts["total"], counts["current"]):
            each.update({key: each[key] + missing for key in ("ready", "completed")})
        checkpoint["global_step"] += missing
    loops = checkpoint["loops"]["fit_loop"]
    add_to_saved_logged_step(loops, max(-saved_logged_step(loops), 0))


def take_off_steps(checkpoint: dict[str, Any], steps: int, logged: int) -> None:
    """Count so many steps less, which the resumed run makes again; ``logged``: rows before them."""
    loops = checkpoint["loops"]["fit_loop"]
    automatic, _ = _step_counts(loops)
    for each in (automatic["total"], automatic["current"]):
        each.update({key: each[key] - steps for key in ("ready", "completed")})
    checkpoint["global_step"] -= steps
    add_to_saved_logged_step(loops, logged - saved_logged_step(loops))


def _step_counts(loops: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Saved counts of updates, of automatic and of manual optimization."""
    automatic = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    return automatic, loops["epoch_loop.manual_optimization.optim_step_progress"]


def validate_again(loops: dict[str, Any], before: int) -> None:
    """Let the resumed run repeat the validation from its beginning.

    With counters of its first mini-batch, Lightning resumes in the validation.

    Args:
        loops: saved counters.
        before: mini-batches of earlier validations in this epoch.
    """
    progress = loops["epoch_loop.val_loop.batch_progress"]
    for counts, done in ((progress["total"], before), (progress["current"], 0)):
        counts.update(ready=done + 1, started=done + 1, processed=done, completed=done)
    progress["is_last_batch"] = False


def rest_of(
    sampler: EpochSampler, unseen: dict[LoaderPass, Spans], has_unsent: bool
) -> dict[str, Any]:
    """The rest of a loader's pass; arguments as of :meth:`EpochSampler.progress`."""
    lap, batches, spans = sampler.progress(unseen, has_unsent)
    source, indices, sizes = sampler.source, None, None
    if not isinstance(source, Seeded):  # it cannot be drawn again
        order = sampler.order or source(sampler.epoch)
        left: list[Any] = [order[p] for p in positions(spans)]
        spans = ((0, len(left)),)
        if left and not isinstance(left[0], int):
            sizes = [len(batch) for batch in left]
            left = [index for batch in left for index in batch]
        indices = torch.tensor(left, dtype=torch.int64)
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


def next_row(checkpoint: Mapping[str, Any]) -> int:
    """The number of the loggers' next row in a run that resumes from it; 0: unknown.

    Rows count mini-batches under manual optimization, which may make any number of steps in each.
    """
    try:
        loops = checkpoint["loops"]["fit_loop"]
        if _step_counts(loops)[1]["total"]["completed"] > 0:
            batches, epoch = loops["epoch_loop.batch_progress"]["total"], loops["epoch_progress"]
            under_way = epoch["current"]["started"] > epoch["current"]["processed"]
            return saved_logged_step(loops) + (is_settled(batches) and under_way)
    except (KeyError, TypeError):  # of another program
        pass
    return int(checkpoint.get("global_step", 0))


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
    if ours is not None and not ours["loaders"] and _is_beginning(epoch):
        _set_back(loops, 0)
        return None
    if ours is None or not ours["loaders"]:
        if ours is None and (n_done := _done(progress)) > 0:
            return _elsewhere(epoch["processed"], n_done)
        return None  # streams resume as Lightning lets them
    in_hook = _in_hook(progress) and _done(progress) == ours["batches"]
    stepped = _leave_hook(loops) if in_hook else _set_back(loops, ours["batches"])
    event = EpochEvent.RESUMES_IN_HOOK if in_hook else EpochEvent.RESUMES
    if ours.get("over"):
        event = EpochEvent.RESUMES_AT_END
    return ResumedEpoch(ours["epoch"], ours["batches"], ours["loaders"], stepped, event)


def _is_beginning(epoch: Mapping[str, int]) -> bool:
    """Whether the hooks of an epoch's beginning run."""
    return epoch["ready"] - 1 == epoch["started"] == epoch["processed"]


def _elsewhere(epoch: int, batches: int) -> ResumedEpoch:
    rank_zero_warn(
        f"the checkpoint was written in the middle of epoch {epoch} by another strategy; its "
        f"{batches} mini-batches are taken to have been as large as this run's, all workers "
        "together, and in the same order"
    )
    return ResumedEpoch(epoch, batches, None)


def _done(progress: dict[str, Any]) -> int:
    """Mini-batches of the epoch that Lightning will count as done when it resumes."""
    return int(progress["current"]["processed" if _in_hook(progress) else "completed"])


def _in_hook(progress: dict[str, Any]) -> bool:
    """Whether a callback wrote it at the end of a mini-batch, which Lightning then counts."""
    return is_in_end_hook(progress["total"])


def _leave_hook(loops: dict[str, Any]) -> int:
    """Count the mini-batch; return the number of mini-batches with a step."""
    progress = loops["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts["completed"] = counts["processed"]
    return saved_logged_step(loops) + 1


def _set_back(loops: dict[str, Any], batches: int) -> int | None:
    """Let ``batches`` mini-batches of the epoch be done; return those with a step, of all epochs.

    If a validation followed the last of them, Lightning would take the file for one written
    then, before it counted that mini-batch.
    """
    progress = loops["epoch_loop.batch_progress"]
    if _done(progress) == batches and is_settled(progress["total"]):
        return None
    begins = _is_beginning(loops["epoch_progress"]["current"])  # those are of the epoch before
    before = progress["total"]["completed"] - (0 if begins else progress["current"]["completed"])
    progress["current"] = dict.fromkeys(progress["current"], batches)
    progress["total"] = dict.fromkeys(progress["total"], before + batches)
    progress["is_last_batch"] = False
    if batches == 0:  # the epoch has not begun
        epoch = loops["epoch_progress"]
        for counts in (epoch["total"], epoch["current"]):
            counts.update(dict.fromkeys(("ready", "started"), counts["processed"]))
    for steps in _step_counts(loops):
        steps["total"]["ready"] = steps["total"]["completed"]  # a step was under way
    return saved_logged_step(loops)


# ---- A worker's position in an epoch: its state and Lightning's number of the epoch -------------
# Loaders, checkpoints and the redistribution of lost samples send events and read the state
# (:mod:`hybridtrain.lightning.checkpointing.epoch_state`).


class EpochPosition:
    """Applies the table of states in one worker."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.state = EpochState.BETWEEN
        self.resumed: ResumedEpoch | None = None  # from a checkpoint, until its epoch is over
        self._begun: int | None = None  # the last epoch that has begun
        self._has_other_lengths = False

    @property
    def epoch(self) -> int:
        """Lightning's number of the current epoch, or between epochs of the next."""
        return self._trainer.fit_loop.epoch_progress.current.processed

    @property
    def is_closing(self) -> bool:
        """Whether Lightning has counted the epoch, but not all workers have reached its end."""
        begun = self.state is not EpochState.BETWEEN and self._begun is not None
        return begun and self._begun != self.epoch

    @property
    def has_begun(self) -> bool:
        """Whether an epoch has begun in this run."""
        return self._begun is not None

    def on(self, event: EpochEvent) -> bool:
        """Apply an event; return whether it has changed the state."""
        before, self.state = self.state, TABLE.get((self.state, event), self.state)
        return self.state is not before

    def resume(self, resumed: ResumedEpoch | None) -> None:
        """Take over from a checkpoint; ``None``: it was not written within an epoch."""
        self.resumed = resumed
        if resumed is not None:
            self.on(resumed.event)

    def change_lengths(self) -> None:
        """Let Lightning measure the loaders anew in the next epoch."""
        self._has_other_lengths = True

    def begin(self) -> bool:
        """Lightning begins or resumes an epoch; return whether its loaders have changed."""
        changed, self._has_other_lengths = self._has_other_lengths, False
        self._begun = self.epoch
        if self.resumed is None or self.resumed.epoch != self._begun:
            self.on(EpochEvent.BEGINS)
            changed |= self.resumed is not None
            self.resumed = None
        if changed:
            remeasure(self._trainer)
        return changed


# ---- schedules as they were ---------------------------------------------------------------------


@dataclass(frozen=True)
class SavedSchedules:
    """States of schedules, and their optimizers' groups without parameters, at one moment.

    ``None``, or no groups: a checkpoint has them as they are when it is written.
    """

    states: list[dict[str, Any] | None]
    groups: list[Groups]

    @classmethod
    def of(cls, trainer: Any, by_step: bool = True) -> SavedSchedules:
        """The present ones; not ``by_step``: of schedules by epoch alone."""
        configs = [x for x in trainer.lr_scheduler_configs if by_step or x.interval == "epoch"]
        changed = {id(getattr(config.scheduler, "optimizer", None)) for config in configs}
        groups = [plain(each) if id(each) in changed else () for each in trainer.optimizers]
        states = [_state(x) if x in configs else None for x in trainer.lr_scheduler_configs]
        return cls(states, groups)

    def with_changes(self, before: SavedSchedules, now: SavedSchedules) -> SavedSchedules:
        """These, and what schedules by step have changed since ``before``: they scale rates."""
        of_optimizers = zip(self.groups, before.groups, now.groups, strict=True)
        groups = [tuple(map(_scaled, *each)) for each in of_optimizers]
        return SavedSchedules(self.states, groups)

    def give(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint with these."""
        states = zip(checkpoint["lr_schedulers"], self.states, strict=True)
        optimizers = zip(checkpoint["optimizer_states"], self.groups, strict=True)
        return checkpoint | {
            "lr_schedulers": [now if kept is None else kept for now, kept in states],
            "optimizer_states": [
                state | {"param_groups": _replaced(state["param_groups"], kept)}
                if kept and "param_groups" in state
                else state
                for state, kept in optimizers
            ],
        }


def _state(config: Any) -> dict[str, Any]:
    """Its values are copies; a schedule within it keeps its optimizer."""
    return {name: copy(value) for name, value in config.scheduler.state_dict().items()}


def _scaled(kept: dict[str, Any], before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The group ``kept`` with its rate times what the rate has changed by since ``before``."""
    if before.get("lr") == now.get("lr") or not before.get("lr"):
        return kept
    return kept | {"lr": kept["lr"] * (now["lr"] / before["lr"])}


def _replaced(groups: list[dict[str, Any]], kept: Groups) -> list[dict[str, Any]]:
    """The optimizer may have got groups since."""
    return [*map(or_, groups, kept), *groups[len(kept) :]]


# ---- the end of an epoch in a run that resumes from a checkpoint --------------------------------
# Lightning's checkpoints hold no metrics. So a callback may not find its monitored metric before
# the next validation, and Lightning skips schedulers that need one (``ReduceLROnPlateau``) at the
# end of the resumed epoch, and of an epoch whose checkpoint a callback wrote at its very end. Under
# our key a checkpoint holds the metrics, and these scheduler steps are made.
#
# After a checkpoint written at the end of a mini-batch, Lightning skips the validation that is due,
# and after the last mini-batch the end of the epoch. Here both are made.


class EpochIsOver(StopIteration):
    """By the checkpoint, the epoch is over for all workers; Lightning ends the loop."""


class EpochEnds:
    """Makes the missing parts of a resumed epoch's end in one worker.

    Args:
        trainer: of this worker.
        position: of this worker in the epoch.
        device: of this worker, where metrics are restored.
    """

    def __init__(self, trainer: Any, position: EpochPosition, device: torch.device) -> None:
        self._trainer, self._position, self._device = trainer, position, device
        self._found: dict[str, torch.Tensor] = {}  # the checkpoint's metrics
        self._stepped: int | None = None  # mini-batches with a step, if Lightning miscounts
        # Before an epoch's schedules, and behind them.
        self._kept: tuple[int, SavedSchedules, SavedSchedules] | None = None
        before(Point.FIT_RESET, trainer.fit_loop, self.settle)
        before(Point.BATCH, trainer.fit_loop.epoch_loop, self.go_on)
        before(Point.COLLECT, log_connector(trainer), self.allow)
        around(Point.SCHEDULERS, trainer.fit_loop.epoch_loop, self.keep_schedules)

    def state(self) -> dict[str, torch.Tensor]:
        """The metrics as last collected: to collect anew, all workers would have to meet."""
        known = callback_metrics(self._trainer).items()
        return {name: value.detach().cpu().clone() for name, value in known}

    def keep(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over a checkpoint's metrics; ``position`` has its epoch."""
        self._found, resumed = dict(state), self._position.resumed
        self._stepped = None if resumed is None else resumed.stepped

    def begin_batch(self) -> None:
        """A mini-batch begins, or the epoch has no more."""
        if self._stepped is not None:
            set_logged_step(self._trainer, self._stepped)
            self._stepped = None

    def keep_schedules(
        self, proceed: Callable[..., None], interval: str, update_plateau_schedulers: bool
    ) -> None:
        """Keep schedules by epoch as before this worker's last mini-batch; others may have more."""
        if interval == "epoch" and not update_plateau_schedulers:
            kept = SavedSchedules.of(self._trainer, by_step=False)
            proceed(interval, update_plateau_schedulers)
            now = SavedSchedules.of(self._trainer, by_step=False)
            self._kept = self._position.epoch, kept, now
        else:
            proceed(interval, update_plateau_schedulers)

    def reopened(self, checkpoint: dict[str, Any], epoch: int) -> dict[str, Any]:
        """The checkpoint with schedules by epoch as before this worker's last mini-batch of it."""
        if self._kept is None or self._kept[0] != epoch:
            return checkpoint
        _, kept, after = self._kept
        now = SavedSchedules.of(self._trainer, by_step=False)
        return kept.with_changes(after, now).give(checkpoint)

    def settle(self) -> None:
        """Counters and schedulers are restored: restore metrics, step schedulers left out."""
        found, self._found = self._found, {}
        known = callback_metrics(self._trainer)
        known.update({name: value.to(self._device) for name, value in found.items()})
        loop = self._trainer.fit_loop
        if found and _was_ending(self._trainer) and self._all_known():
            loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)

    def go_on(self) -> None:
        """After the checkpoint's last mini-batch: validate, end the epoch, or continue it.

        Lightning would skip the first two.

        Raises:
            EpochIsOver: so that Lightning ends the epoch.
        """
        state, resumed = self._position.state, self._position.resumed
        if resumed is None or not self._position.on(EpochEvent.GOES_ON):
            return
        loop = self._trainer.fit_loop.epoch_loop
        if resumed.loaders is None or not loop.restarting:
            return
        over = state is EpochState.RESUMED_AT_END
        due = not over and validation_is_due(self._trainer)
        if due and state is EpochState.RESUMED_IN_HOOK:
            validate_from_beginning(self._trainer)
        if not due:
            self.begin_batch()  # hooks of the mini-batch that begins may log
            if over or loop.batch_progress.is_last_batch:
                raise EpochIsOver

    def allow(self) -> None:
        """Let the resumed epoch end like any other."""
        loop = self._trainer.fit_loop
        if self._trainer.training and loop.restarting and not loop.restarted_on_epoch_end:
            set_restarting(loop, not self._all_known())

    def _all_known(self) -> bool:
        monitored = {
            config.monitor
            for config in self._trainer.lr_scheduler_configs
            if config.reduce_on_plateau and config.interval == "epoch"
        }
        # Collected only where Lightning is about to collect, too: all workers may meet for it.
        return not monitored or monitored <= self._trainer.callback_metrics.keys()


def _was_ending(trainer: Any) -> bool:
    """Whether only the part of the epoch after its callbacks was left."""
    counted = is_in_end_hook(vars(trainer.fit_loop.epoch_progress.current))
    return counted and is_at_last_batch(trainer)
