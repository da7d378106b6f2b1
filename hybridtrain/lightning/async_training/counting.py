"""Free-running workers: ``global_step``, schedulers and rows of loggers follow the updates.

Lightning counts its own process: it would step a scheduler at each push of this worker, also one
without an update, and number logged rows by this worker's mini-batches. Then the workers' numbers
differ, and a worker that logs in place of a lost one would repeat rows. So a row has the number of
its update, as on one device, whichever worker has made it; and an update has at most one row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hybridtrain.lightning.async_training.calls_by_hand import CallsByHand, Step
from hybridtrain.lightning.async_training.expected_updates import ExpectedUpdates
from hybridtrain.lightning.due_steps import DueRows, Every
from hybridtrain.lightning.hooks.loop_hooks import (
    accumulates,
    hook_ends_epoch,
    logged_step,
    set_logged_step,
)
from hybridtrain.lightning.hooks.points import Point, around, before
from hybridtrain.lightning.update_count import (
    scheduled_steps,
    set_global_step,
    step_schedulers,
)
from hybridtrain.lightning.worker_context import WorkerContext

if TYPE_CHECKING:
    from hybridtrain.lightning.participation.absent_steps import Absence


class UpdateCount:
    """The count of updates in one training worker.

    Args:
        trainer: of this worker.
        worker: this one.
        expected: the number of updates that the user's schedulers were given.
        absence: knows mini-batches that do not count.
    """

    def __init__(
        self,
        trainer: Any,
        worker: WorkerContext,
        expected: ExpectedUpdates,
        absence: Absence,
    ) -> None:
        self._expected, self._absence = expected, absence
        client, wants = worker.client, worker.requirements
        self.by_hand = CallsByHand(trainer, client, expected, wants.schedules_own_steps)
        self._trainer, self._client, self._before = trainer, client, client.steps.version
        around(Point.SCHEDULERS, trainer.fit_loop.epoch_loop, self.update)
        before(Point.VALIDATION_DUE, trainer.fit_loop.epoch_loop, self.call_for_logged)
        self._automatic = trainer.lightning_module.automatic_optimization
        self._own, self._evaluates = wants.schedules_own_steps, wants.evaluates
        self._steps = scheduled_steps(trainer)
        # With manual optimization Lightning counts mini-batches, of any number of steps.
        self._numbers_rows = self._automatic or client.n_workers > 1
        self._made, self._counted = client.steps.version, True  # the last step; by Lightning, too
        self._rows = DueRows(trainer)
        if self._numbers_rows and trainer.loggers:
            trainer.log_every_n_steps = Every.by(self._rows)
        self._rows.pass_over(client.steps.version)

    def reach(self, version: int) -> None:
        """Count up to ``version``, which is that of this worker's parameters."""
        set_global_step(self._trainer, version)
        if not self._counted and not self._evaluates:  # the row of the step has this number, too
            self._made = max(self._made, version)
        self._catch_up()
        self._number_rows()

    def join(self, version: int) -> None:
        """As ``reach``, in a restarted worker: another worker has logged meanwhile."""
        self.reach(version)
        self._rows.pass_over(version)
        self.by_hand.pass_over()

    def begin_batch(self) -> None:
        """A mini-batch begins, with the parameters that this worker has now."""
        self._number_rows()  # a dropped one has left the number of the last update
        self._rows.begin(logged_step(self._trainer) + 1)

    def begin_rows(self) -> None:
        """Give the next rows the number of the last update, which Lightning has not counted."""
        if not accumulates(self._trainer):
            self._counted = False
            self._number_rows()

    def update(self, proceed: Step, interval: str, update_plateau_schedulers: bool) -> None:
        """Step schedulers by the updates of all workers, in place of Lightning."""
        if interval == "step" and not update_plateau_schedulers:  # after a mini-batch
            if not (accumulates(self._trainer) or self._skips_rest()):
                if self._client.steps.unsettled is not None and self._must_be_exact():
                    self._client.pushes.settle()
                self._step_own(proceed) if self._own else self._catch_up()
                self._made, self._counted = self._client.steps.expected_version, False
                self._rows.has_stepped()
                self._number_rows(least=-1)  # no update yet, and so no row
            return
        proceed(interval, update_plateau_schedulers)
        if interval == "step" and not self._counted:  # Lightning counts it now
            self._counted = True
            self._rows.end(self._made)

    def _skips_rest(self) -> bool:
        """``on_train_batch_start`` has returned -1: an epoch ends, and no update was made.

        Lightning steps schedules all the same, so a worker's own ones do, too.
        """
        return not self._own and hook_ends_epoch(self._trainer.fit_loop.epoch_loop)

    def call_for_logged(self) -> None:
        """Step schedules on a plateau of training: all workers may meet next, for a validation."""
        if not (self._absence.passed or accumulates(self._trainer)):
            self.by_hand.call_for_logged(self._batches)

    def _must_be_exact(self) -> bool:
        """Whether a logger or scheduler needs the update's number before the release brings it."""
        now, schedules = self._client.steps.expected_version, self._trainer.lr_scheduler_configs
        logs = self._trainer.loggers and self._rows.are_due_up_to(now)
        follow = any(config.interval == "step" for config in schedules) and not self._own
        return bool(logs) or follow

    def _step_own(self, proceed: Step) -> None:
        """Step the schedulers of the worker's own optimizer, after its step."""
        limit = self._expected.limit
        if not self._absence.passed and (limit is None or self._steps < limit):
            proceed("step", False)
            self._steps += 1

    def _catch_up(self) -> None:
        if self._automatic and not self._own:
            now, limit = self._client.steps.expected_version, self._expected.limit
            to = now if limit is None else min(now, limit)
            if self._trainer.lr_scheduler_configs:
                step_schedulers(self._trainer, self._before, to, self._batches())
            self._before = now

    def _batches(self) -> float:
        """Mini-batches of all workers in this epoch; one alone has made its last when it steps.

        Infinite where every schedule steps behind each update, and the number makes no difference.
        """
        if all(config.frequency == 1 for config in self._trainer.lr_scheduler_configs):
            return math.inf
        alone = self._client.n_workers == 1
        loop = self._trainer.fit_loop.epoch_loop
        return int(loop.batch_idx) + 1 if alone else self._expected.mini_batches()

    def _number_rows(self, least: int = 0) -> None:
        if self._numbers_rows:
            step = self._client.steps.expected_version - (not self._counted)
            set_logged_step(self._trainer, max(step, least))
