"""A worker without data in a step, or in an epoch, runs no user code there.

In lock-step the last global mini-batch of an epoch may be too small to give every worker a sample.
A worker without one skips the step: no ``training_step``, hooks or callbacks, and no trace in logs,
metrics, buffers or counters. The others do not wait for it, neither in their round nor in their
meetings (a reduced metric, synchronised batch normalisation, a callback that saves). It waits for
them three times:

- until their gradients are computed: its own accumulated gradients belong to the same update, so it
  steps the optimizer with them;
- until the update is made: from then on all check whether the epoch is over;
- until their mini-batch has ended: then it takes over their logged metrics and decisions.

If all that have samples in the step are lost, it waits in the step for those that are restarted. If
none is, the step is not made, and its samples are among those that lost workers have left.

Where a loader ends before the length that it told Lightning (a stream with the length of the whole
that is shared out by rank), its end is the end of the worker's epoch: the step with what has been
accumulated, schedulers, the validation that would have been at the other end. Streams may give
workers different numbers of mini-batches: in lock-step all count those of the longest.

A free-running worker may find the queue empty as the epoch begins; its epoch ends at once, on the
usual path. Its contribution may also arrive too late to count: other workers process the samples
again, so it restores logged values, torchmetrics, buffers (batch normalisation) and the count of
mini-batches to their state before the mini-batch, and skips the hooks that follow it. Attributes
that user code changes stay. The copies take time at every mini-batch, so they are made only where a
contribution may not count.

A worker without data in a whole epoch has not logged the module's metrics. At the epoch's end all
workers reduce them together, so it gets the same entries, with neutral values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import WeightAveraging
from torchmetrics import Metric

from hybridtrain.engine.monitoring.hang_detector import Doing
from hybridtrain.engine.step.shared_buffers import KeptBuffer, kept
from hybridtrain.engine.worker.steps import Steps
from hybridtrain.lightning.hooks.loop_hooks import (
    accumulates,
    forget_batch,
    forget_group,
    hook_ends_epoch,
    is_at_last_batch,
    logged_step,
    metrics_in,
    put_back_metric,
    set_fetched_batches,
    set_logged_step,
    state_of_metric,
    step_with,
    training_fetcher,
    training_results,
    validates_at_end,
)
from hybridtrain.lightning.hooks.points import Point, around, before
from hybridtrain.lightning.participation.logged_metrics import (
    Entries,
    StepOutcome,
    entries,
    n_steps,
    steps_of,
    take_entries,
    take_steps,
)
from hybridtrain.lightning.participation.stop_wishes import OthersStop, Stopping
from hybridtrain.lightning.run_context import checkpoints_of
from hybridtrain.lightning.step.session import Session
from hybridtrain.lightning.worker_context import WorkerContext
from hybridtrain.util.attributes import temporarily

if TYPE_CHECKING:
    from hybridtrain.lightning.data.loaders import Loaders

_READY = "the gradients of a step that some sit out"
_MADE = "the update of a step that some sit out"
_ENDED = "the end of a step that some sit out"
_FIRST = "who has a mini-batch of a stream"


class DoesNotCount(Exception):
    """The mini-batch just done does not count."""


class Absence:
    """Lets one worker skip steps.

    Args:
        trainer: of this worker.
        worker: this one.
        loaders: know whether this worker has samples in a step.
    """

    def __init__(self, trainer: pl.Trainer, worker: WorkerContext, loaders: Loaders) -> None:
        self._trainer: Any = trainer
        self._client, self._loaders = worker.client, loaders
        requirements = worker.requirements
        self._requirements, self._whole_rounds = requirements, requirements.whole_rounds
        self._fixed = not worker.on_failure.changes  # no worker leaves or comes
        self._session: Session | None = None
        self.stopping = Stopping(trainer, worker.client, requirements.whole_rounds)
        self.uncounted: Uncounted | None = None  # where a contribution may not count
        self._has_had_some = False  # in this epoch
        self._had_some_before = False  # the mini-batches that may be dropped
        self._sits_out = False
        self._to_come: list[str] = []  # meetings left in which workers wait that skip this step
        self.passed = False  # the last iteration had no mini-batch that counted
        self._is_short = False  # it had none, before the length of the loaders
        self._asks = False  # in lock-step no sampler knows which workers have mini-batches
        self._loop = loop = self._trainer.fit_loop.epoch_loop
        around(Point.BATCH, loop, self.advance)
        around(Point.BATCH_END, loop, self.end_advance)
        around(Point.SCHEDULERS, loop, self.schedule_plateaus)
        around(Point.VALIDATION_DUE, loop, self.validation_is_due)
        before(Point.BATCHES, loop, self.begin_epoch)
        before(Point.STEP_MADE, loop.batch_progress, self.step_is_made)

    def begin(self, session: Session) -> None:
        """Start of training."""
        self._session = session
        self.stopping.begin(session)
        before(Point.AVERAGE, session, self.gradients_are_there)
        # With a limit of steps, contributions may arrive after the last.
        bounded = not self._whole_rounds and self._loop.max_steps != -1
        if self._requirements.drops_late or self._requirements.backs_up or bounded:
            self.uncounted = Uncounted(self._trainer, self._client.steps)

    def begin_epoch(self) -> None:
        """An epoch begins, or is resumed."""
        self._has_had_some = False
        self._asks = self._fixed and self._reads_streams

    # ---- mini-batches ---------------------------------------------------------------------------

    def advance(self, proceed: Callable[[Any], None], fetcher: Any) -> None:
        """Lightning's, except for a mini-batch that is missing or does not count."""
        self.passed = self._is_short = False
        if self.uncounted is not None and not self._loaders.committed.under_way:
            self.uncounted.keep()
            self._had_some_before = self._has_had_some
        ready = self._loop.batch_progress.current.ready
        try:
            proceed(fetcher)
        except OthersStop:
            self._leave_it()
            return
        except DoesNotCount:
            self._pass_over()
            return
        except StopIteration:
            if self._loop.batch_progress.current.ready != ready:  # the user ends the epoch
                self._tell_outcome()
                raise
            nothing = self._has_nothing()
            if not nothing and not self._comes_short():
                raise
            if not (nothing and self._whole_rounds):
                self._end_epoch(is_short=not nothing)
            elif self._sit_out():
                raise
            return
        self._has_had_some |= self._loop.batch_progress.current.ready != ready
        self._tell_outcome()
        self.stopping.end_batch()

    def end_advance(self, proceed: Callable[[Any], None], fetcher: Any) -> None:
        """Do not count the step of a mini-batch that does not count."""
        step = logged_step(self._trainer)
        if self._is_short and self._whole_rounds:
            set_logged_step(self._trainer, step - 1)  # a validation's row is the last step's
        proceed(fetcher)
        if self.passed:
            set_logged_step(self._trainer, step)

    def schedule_plateaus(
        self, proceed: Callable[..., None], interval: str, update_plateau_schedulers: bool
    ) -> None:
        """Not those by step behind a mini-batch that does not count."""
        if not (self.passed and interval == "step" and update_plateau_schedulers):
            proceed(interval, update_plateau_schedulers)

    def validation_is_due(self, proceed: Callable[[Any], bool], fetcher: Any) -> bool:
        """Lightning's decision, or where the loaders came short that of their planned end."""
        return validates_at_end(self._trainer) if self._is_short else proceed(fetcher)

    @property
    def _reads_streams(self) -> bool:
        """Whether in lock-step no loader is shared out by a sampler of ours."""
        several = self._client.n_workers > 1
        return several and self._whole_rounds and not self._loaders.samplers

    def _comes_short(self) -> bool:
        """Whether the loaders have ended before their length.

        An epoch in which no worker has a mini-batch ends as on one device, without validation.
        """
        ready = self._loop.batch_progress.current.ready
        some = ready > 0 or (self._asks and self._anybody_has_some(False))
        return some and ready < self._trainer.num_training_batches

    def _anybody_has_some(self, mine: bool) -> bool:
        """All meet at their first mini-batch of an epoch, or where they miss it."""
        self._asks = False
        return any(self._client.gather(_FIRST, mine, patient=True))

    def _has_nothing(self) -> bool:
        """No mini-batch was found: whether this worker should have none."""
        samplers = self._loaders.samplers
        if self._whole_rounds:
            return any(sampler.has_nothing_next for sampler in samplers)
        had_some = self._client.n_workers > 1 or self._loop.batch_progress.current.ready > 0
        return had_some and any(sampler.ended for sampler in samplers)

    # ---- in lock-step ---------------------------------------------------------------------------

    def step_is_made(self) -> None:
        """In a worker with samples: the step is made, or a hook ends the epoch instead."""
        if not self._loaders.pop_weighed() and not self._sits_out:
            self._miss()
        if self._asks:
            self._anybody_has_some(True)
        if self.uncounted is not None and not self._client.steps.counted:
            raise DoesNotCount
        self._look_who_waits()
        self.gradients_are_there()
        if _MADE in self._to_come:
            self._come_to(_MADE, (steps_of(self._loop), hook_ends_epoch(self._loop)))

    def _miss(self) -> None:
        """The mini-batch is ``None`` (``collate_fn`` has left all samples out), so it has no step.

        In lock-step with others that have one this worker takes part without samples.
        """
        together, session = self._loaders.pass_over(), self._session
        if not self._whole_rounds or self._client.n_workers == 1 or not self._is_automatic:
            return
        if session is not None and not accumulates(self._trainer):
            self._step_without_samples(session, together)

    def _look_who_waits(self) -> None:
        if not self._whole_rounds or self._sits_out:
            return
        without = [sampler.pop_without() for sampler in self._loaders.samplers]  # of each
        if any(without):
            self._to_come = [_READY, _MADE, _ENDED]

    def gated(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure of a step, followed by the meeting with workers that skip the step."""
        self._look_who_waits()
        return partial(self._close, closure) if self._to_come else closure

    def _close(self, closure: Callable[[], Any]) -> Any:
        result = closure()
        self.gradients_are_there()
        return result

    def gradients_are_there(self) -> None:
        """This worker's gradient is computed, for those that skip the step."""
        if _READY in self._to_come:
            self._come_to(_READY, None)

    def _come_to(self, where: str, item: Any) -> None:
        self._to_come.remove(where)
        self._client.gather(where, item, patient=True)

    def _tell_outcome(self) -> None:
        """The mini-batch has ended: send its outcome, and hooks' writes, to workers without it."""
        if _ENDED in self._to_come:
            assert self._session is not None, "training has begun"
            outcome = StepOutcome.of(self._trainer, checkpoints_of(self._trainer))
            left = self._session.replica.apart(), self._session.left_gradients()
            self._come_to(_ENDED, (outcome, *left))

    def _sit_out(self) -> bool:
        """Skip a step: only count as Lightning does, and contribute accumulated gradients.

        Returns whether a hook of the others ends the epoch instead.
        """
        assert self._session is not None, "training has begun"
        loop, progress = self._loop, self._loop.batch_progress
        progress.is_last_batch = training_fetcher(self._trainer).done
        progress.increment_ready()
        progress.increment_started()
        together, version = self._loaders.pass_over(), self._client.steps.expected_version
        with temporarily(self, _sits_out=True):
            self._client.gather(_READY, None, patient=True)
            if self._takes_part:
                self._step_without_samples(self._session, together)
            else:
                self._session.sit_out()
            steps, ended = self._await_step(self._session, together) or (None, False)
            take_steps(loop, steps)
            self._catch_up(self._session)
            made = self._session.has_own_parameters or self._client.steps.version > version
            self._loaders.committed.commit(self._session.has_unsent, made)
            progress.increment_processed()
        self._schedule(made or ended)  # as Lightning does where a hook ends the epoch
        outcomes = self._client.gather(_ENDED, None, patient=True)
        if made:
            self._average_weights()
        for outcome, writes, gradients in [each for each in outcomes if each is not None][:1]:
            outcome.give(self._trainer, checkpoints_of(self._trainer))
            self._session.repeat(writes)
            self._session.take_gradients(gradients)
        progress.increment_completed()
        return ended

    def _average_weights(self) -> None:
        """Let callbacks average the parameters after a step, as in the other workers."""
        trainer, index = self._trainer, self._loop.batch_idx
        for callback in trainer.callbacks:
            if isinstance(callback, WeightAveraging):
                callback.on_train_batch_end(trainer, trainer.lightning_module, None, None, index)

    def _await_step(self, session: Session, together: float | None) -> Any:
        """Counters of a worker with samples in the step, and whether its hook ends the epoch.

        ``None``: all such workers were lost.
        """
        while True:
            known = self._client.gather(_MADE, None, patient=True)
            steps = next((each for each in known if each is not None), None)
            if steps is not None or not (self._client.group.away and self._is_automatic):
                return steps
            self._step_without_samples(session, together)  # lost workers repeat the step

    def _step_without_samples(self, session: Session, together: float | None) -> None:
        session.begin_batch(None, 0.0, together)
        step_with(self._trainer, self._add_nothing)

    @property
    def _is_automatic(self) -> bool:
        return bool(self._trainer.lightning_module.automatic_optimization)

    @property
    def _takes_part(self) -> bool:
        """Whether this worker takes part in the step without samples.

        It has accumulated gradients, a gradient scaler, steps with its host, or is restarted: the
        others wait for it.
        """
        assert self._session is not None, "training has begun"
        if self._requirements.means_gradients or self._session.scales:
            return True
        return (self._session.has_gathered or self._client.group.joins) and self._is_automatic

    def _add_nothing(self) -> None:
        """In place of the closure."""
        if self._session is not None and self._session.averages:
            self._session.average()

    @staticmethod
    def _catch_up(session: Session) -> None:
        """Take over updates that the other workers have made."""
        if session.has_own_parameters:
            return
        version = session.pull()
        for step in session.steps:
            step.catch_up(version)
        if session.buffers is not None:
            session.buffers.put_back(version)

    def _schedule(self, made: bool = True) -> None:
        """Step schedulers as Lightning does after every mini-batch.

        If its step is not ``made``, none steps; but at the last mini-batch all workers meet here.
        """
        interval = "step" if made else "none"
        self._loop.update_lr_schedulers(interval, update_plateau_schedulers=False)
        if is_at_last_batch(self._trainer):
            self._loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    # ---- an epoch that ends without a mini-batch ------------------------------------------------

    def _end_epoch(self, is_short: bool) -> None:
        """End the epoch: this worker has no mini-batch, where workers run freely or it comes short.

        What earlier mini-batches have accumulated is stepped: they did not know of the end.
        """
        self.passed, self._is_short = True, is_short
        self._loop.batch_progress.is_last_batch = True
        session = self._session
        if session is not None and session.has_gathered and self._is_automatic:
            with temporarily(self, _sits_out=True):
                self._step_without_samples(session, None)
            self._loop.update_lr_schedulers("step", update_plateau_schedulers=False)
            set_logged_step(self._trainer, logged_step(self._trainer) + 1)
        self._loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    # ---- where workers run freely ---------------------------------------------------------------

    def _leave_it(self) -> None:
        """Drop a mini-batch that was fetched, but not begun."""
        self.passed = True
        progress = self._loop.batch_progress
        progress.current.ready -= 1
        progress.total.ready -= 1
        progress.is_last_batch = False
        forget_batch(self._trainer)

    def _pass_over(self) -> None:
        """Undo a mini-batch whose contribution came too late."""
        assert self.uncounted is not None, "it raised DoesNotCount"
        self.passed = True
        self.uncounted.put_back()
        self._has_had_some = self._had_some_before
        forget_batch(self._trainer, and_its_size=True)
        self._client.heartbeat.beat(Doing.BETWEEN)
        self._schedule()
        for callback in checkpoints_of(self._trainer):  # they count all workers' updates
            module, index = self._trainer.lightning_module, self._loop.batch_idx
            callback.on_train_batch_end(self._trainer, module, None, None, index)

    # ---- the end of an epoch --------------------------------------------------------------------

    def meet(self) -> None:
        """All workers meet: those without a mini-batch take over what the others have logged."""
        trainer, client = self._trainer, self._client
        callbacks = checkpoints_of(trainer)
        if self._session is None or trainer.sanity_checking or client.n_workers == 1:
            return
        self.stopping.meet()
        has_had_some = self._has_had_some
        steps = steps_of(self._loop) if self._reads_streams else None
        met = client.gather("who has had a mini-batch", (has_had_some, steps))
        if steps is not None:
            take_steps(self._loop, max((theirs for _, theirs in met), key=n_steps))
        if all(had_some for had_some, _ in met):
            return
        is_over = self._loop.batch_progress.is_last_batch or self._loaders.samplers
        if not is_over and any(had_some for had_some, _ in met):
            self._end_epoch(is_short=False)  # of a stream: as in the others
        mine = (entries(trainer), StepOutcome.of(trainer, callbacks)) if has_had_some else None
        known: list[tuple[Entries, StepOutcome] | None] = client.gather("what is logged", mine)
        found = next((each for each in known if each is not None), None)
        if not has_had_some and found is not None:
            take_entries(trainer, found[0])
            found[1].give(trainer, callbacks)


# ---- mini-batches that do not count --------------------------------------------------------------


class Uncounted:
    """Saves and restores the effects of a mini-batch on counts, logged values, metrics, buffers.

    Args:
        trainer: of this worker.
        steps: count pushes.
    """

    def __init__(self, trainer: pl.Trainer, steps: Steps) -> None:
        self._trainer: Any = trainer
        self._steps = steps
        self._batches = trainer.fit_loop.epoch_loop.batch_progress
        self._counts: list[dict[str, int]] = []  # of mini-batches, in all and in this epoch
        self._fetched = 0
        self._results: dict[str, dict[str, Any]] = {}
        self._metrics: list[tuple[Metric, Any]] = []
        self._buffers: dict[str, KeptBuffer] = {}

    @torch.no_grad()
    def keep(self) -> None:
        """Save, before a mini-batch."""
        self._steps.count_pushes()
        self._counts = [vars(each).copy() for each in (self._batches.total, self._batches.current)]
        self._fetched = training_fetcher(self._trainer).fetched
        module = self._trainer.lightning_module
        results = training_results(self._trainer)
        # Entries get other tensors, never other values in the same one.
        self._results = {key: dict(vars(each)) for key, each in results.items()}
        self._metrics = [(each, state_of_metric(each)) for each in metrics_in(module)]
        self._buffers = kept(module)

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore."""
        self._steps.count_pushes()
        for each, counts in zip(
            (self._batches.total, self._batches.current), self._counts, strict=True
        ):
            vars(each).update(counts)
        set_fetched_batches(self._trainer, self._fetched)
        self._batches.is_last_batch = training_fetcher(self._trainer).done
        results = training_results(self._trainer)
        for key in [key for key in results if key not in self._results]:
            del results[key]
        for key, known in self._results.items():
            vars(results[key]).update(known)
        forget_group(self._trainer)  # a resumed epoch may begin within one
        for metric, state in self._metrics:
            put_back_metric(metric, state)
        for buffer in self._buffers.values():
            buffer.put_back()
