"""Evaluations in which workers have different numbers of mini-batches, or none.

A worker takes part if it has a sample in each loader. The others rest: Lightning skips a loop
without mini-batches, and they wait for its end. The participants meet without them (a reduced
metric, a callback's decision). Then the resting workers take over the evaluation's changes:
metrics, a request to stop, callbacks' states. Workers whose shares differ by one mini-batch wait
for each other in the same way, so that a reduction within a step is over the workers that have it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.trainer.states import RunningStage

from hybridtrain.lightning.data.evaluation_sampler import SharedSampler, is_dealt
from hybridtrain.lightning.data.loaders import Loaders
from hybridtrain.lightning.data.user_loaders import check_asked, sampler_in
from hybridtrain.lightning.hooks.loop_hooks import (
    combined_loader,
    evaluation_batches,
    give_loaders,
    limited_batches,
    note_validation,
    set_evaluation_batches,
)
from hybridtrain.lightning.hooks.points import Point, around, before
from hybridtrain.lightning.participation.logged_metrics import StepOutcome
from hybridtrain.lightning.worker_context import WorkerContext
from hybridtrain.util.attributes import temporarily

_LIMITS = {
    RunningStage.VALIDATING: "limit_val_batches",
    RunningStage.TESTING: "limit_test_batches",
    RunningStage.PREDICTING: "limit_predict_batches",
}


class UnevenEvaluation:
    """One of Lightning's evaluation loops, with workers that may rest.

    Args:
        loop: the loop.
        trainer: of this worker.
        worker: this one.
        begin: called with the workers that share the samples, before loaders are made.
    """

    def __init__(
        self,
        loop: Any,
        trainer: pl.Trainer,
        worker: WorkerContext,
        begin: Callable[[tuple[int, ...]], None],
    ) -> None:
        self._loop, self._client, self._on_failure = loop, worker.client, worker.on_failure
        self._trainer: Any = trainer
        # All workers have the trainer's callbacks; those of the module vary.
        self._callbacks = list(trainer.callbacks)  # type: ignore[attr-defined]
        self._begin = begin
        self._roll: list[str] | None = None  # every worker's part in the current evaluation
        self.before: int | None = None  # mini-batches before the current evaluation
        self._shared: tuple[int, ...] = ()  # the workers that share the samples
        self._runs = False
        self._batches: Any = None  # this worker's number for each loader
        self._shown: Any = None  # the same of a participant
        around(Point.EVALUATION, loop, self.run)
        around(Point.EVALUATION_DATA, loop, self.setup_data)
        before(Point.EVALUATION_END, loop, self.end)
        if not self._predicts:
            before(Point.LOADER_END, loop, self.end_loader)
            before(Point.EVALUATION_HOOKS, loop, self.conclude)

    @property
    def _predicts(self) -> bool:
        return self._loop is self._trainer.predict_loop

    @property
    def _stage(self) -> RunningStage:
        tests = self._loop is self._trainer.test_loop
        evaluates = RunningStage.TESTING if tests else RunningStage.VALIDATING
        return RunningStage.PREDICTING if self._predicts else evaluates

    def setup_data(self, proceed: Callable[[], None]) -> None:
        """Allow workers without samples; apply a share as limit here."""
        module, trainer = self._trainer.lightning_module, self._trainer
        name = _LIMITS[self._stage]
        limit, known = getattr(trainer, name), self._batches
        if known is not None:
            set_evaluation_batches(self._loop, known)
        if (sharing := self._sharing()) != self._shared:
            give_loaders(self._loop, None)
            self._shared = sharing
        self._begin(sharing)
        with (
            temporarily(module, allow_zero_length_dataloader_with_multiple_devices=True),
            temporarily(trainer, **{name: 1.0 if _is_share(limit) else limit}),
        ):
            proceed()
        if _is_share(limit) and (self._predicts or evaluation_batches(self._loop) is not known):
            self._limit_share(limit)  # of loaders that are new
        if not self._predicts:
            self._show_batches(known)

    def _limit_share(self, limit: float) -> None:
        """Apply a share as limit; in an evaluation each worker keeps a mini-batch, if it has any.

        ``Dealt`` applies that of predictions, which all workers share.

        Raises:
            MisconfigurationException: Lightning's, if none is left of all workers', or for streams.
        """
        batches = self._loop.max_batches if self._predicts else evaluation_batches(self._loop)
        workers = 1 if self._predicts else len(self._shared)
        for number, loader in enumerate(combined_loader(self._loop).flattened):
            if not is_dealt(loader):
                n = batches[number]
                most = (n + 1) * workers - 1  # of all: shares differ by one
                left = limited_batches(self._stage, most, limit)
                batches[number] = left if self._predicts else max(int(n * limit), min(n, 1))

    def _show_batches(self, known: Any) -> None:
        """Outside of the evaluation, show a participant's number of mini-batches in every worker.

        Else callbacks that decide when to save would assume that there is no validation.
        """
        own = self._batches = evaluation_batches(self._loop)
        if own is not known:  # loaders are new
            found = self._client.gather("mini-batches of an evaluation", own)
            self._shown = own if sum(own) else max(found, key=sum)
        if not self._runs:
            set_evaluation_batches(self._loop, self._shown)

    def _sharing(self) -> tuple[int, ...]:
        """The workers that share the samples; all agree on them if workers may be lost."""
        client, group = self._client, self._client.group
        others = {*group.there} - {group.worker}
        alone = not client.steps.has_stepped and group.away >= others
        if alone and self._runs:
            return (client.worker,)  # the others are not restarted before it has stepped
        if group.solo or not self._on_failure.changes:
            return group.there
        known = client.gather("who evaluates", self._shared)
        if any(shared != group.met for shared in known):  # one may have come since
            self._shared = ()
        return group.met

    def run(self, proceed: Callable[[], Any]) -> Any:
        """Lightning's, but all workers leave it together."""
        total = self._loop.batch_progress.total
        self._roll, self.before = None, total.completed
        if not self._predicts and self._loop.restarted_mid_evaluation:
            total.ready = total.started = total.completed  # Lightning resets only the current ones
        with temporarily(self, _runs=True):
            result = proceed()
        if self._client.n_workers > 1 and self._loop.max_batches:  # else no worker has any
            rests = self._roll is None
            roll = self._rest() if rests else self._roll
            if roll is not None and "end" in roll and "rests" in roll and not self._predicts:
                self._share_outcome(rests)
        self.before = None
        return result

    def _meet(self, what: str) -> list[str]:
        return self._client.gather("steps of an evaluation", what, patient=True)

    def end_loader(self) -> None:
        """A participant begins its next loader."""
        self._meet("between")

    def end(self) -> None:
        """A participant has evaluated its mini-batches."""
        if self._client.n_workers > 1:
            self._check_asked()
        self._roll = self._meet("end")

    def _check_asked(self) -> None:
        """Refuse loaders that have not asked for this worker's samples."""
        batches = self._loop.max_batches if self._predicts else evaluation_batches(self._loop)
        for loader, n in zip(combined_loader(self._loop).flattened, batches, strict=True):
            sampler = sampler_in(loader, SharedSampler)
            if n and sampler is not None:
                check_asked(loader, sampler)

    def conclude(self) -> None:
        """Before the callbacks of the evaluation's end, which may save."""
        self.before = None

    def _rest(self) -> list[str]:
        while "between" in (roll := self._meet("rests")):
            pass  # the participants begin their next loader
        return roll

    def _share_outcome(self, rests: bool) -> None:
        """Let resting workers take over the outcome of the first participant that is not lost."""
        trainer = self._trainer
        callbacks = self._callbacks
        mine = None if rests else StepOutcome.of(trainer, callbacks, collects=True)
        known = self._client.gather("end of an evaluation", mine, patient=True)
        outcome = next((each for each in known if each is not None), None)
        if rests and outcome is not None:
            outcome.give(trainer, callbacks)
            note_validation(trainer)
            set_evaluation_batches(self._loop, self._shown)


def share_evaluations(trainer: Any, worker: WorkerContext, loaders: Loaders) -> None:
    """Let workers rest in each of the trainer's evaluations that has no samples for them."""
    within = trainer.fit_loop.epoch_loop.val_loop
    others = trainer.validate_loop, trainer.test_loop, trainer.predict_loop
    begin = loaders.begin_evaluation
    validation, *_ = [UnevenEvaluation(e, trainer, worker, begin) for e in (within, *others)]
    loaders.checkpoint.follow_validation(lambda: validation.before)


def _is_share(limit: int | float) -> bool:
    return isinstance(limit, float) and limit not in (0.0, 1.0)
