"""Schedulers that user code steps by hand, in free-running workers.

On one device ``scheduler.step()`` in a mini-batch is a call for every mini-batch. Here each worker
has its own scheduler and runs some of the mini-batches. So a worker sends each call made in a
mini-batch to the other workers, which repeat it, and the calls of all workers add up. A call that
every worker makes (in a hook at the end of an epoch, in a validation, or because
``trainer.is_last_batch``) counts once and is not sent.

Lightning steps a schedule on a plateau by hand, too, with a metric of the mini-batch. With
``interval=step``, ``frequency`` counts the updates of all workers, as for other schedules: behind
each that is due one worker calls, with its own metric, and all follow, the caller included. It is
the worker that has made the update, or the first that has made a later one. The server decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from hybridtrain.engine.protocol.messages import ScheduleCall
from hybridtrain.engine.worker.client import Client
from hybridtrain.lightning.async_training.expected_updates import ExpectedUpdates
from hybridtrain.lightning.due_steps import DueCalls, Every
from hybridtrain.lightning.hooks.loop_hooks import training_results
from hybridtrain.lightning.hooks.points import Point, instead_in
from hybridtrain.lightning.update_count import (
    Schedules,
    schedules_of,
    take_schedules,
    updates_due,
)

Step = Callable[..., Any]


class CallsByHand:
    """Exchanges one worker's calls of ``scheduler.step()`` with the other workers.

    Args:
        trainer: of this worker.
        client: sends this worker's calls, and receives those of the others.
        expected: whether user code has asked for the end of the epoch.
        own: each worker's schedules follow its own steps.
    """

    def __init__(self, trainer: Any, client: Client, expected: ExpectedUpdates, own: bool) -> None:
        self._trainer, self._client, self._expected = trainer, client, expected
        self._manual = not trainer.lightning_module.automatic_optimization
        self._together = True  # all workers make the current calls
        self._steps: dict[int, Step] = {}  # by the number of the scheduler
        self._due: dict[int, DueCalls] = {}  # of those that Lightning steps with a metric
        # Up to here this worker has looked for updates that are due.
        self._seen = client.steps.version
        alone = client.n_workers == 1 or own
        for number, config in enumerate(() if alone else trainer.lr_scheduler_configs):
            by_step = config.reduce_on_plateau and config.interval == "step"
            if self._manual or by_step:  # Lightning steps the others by the number of updates
                call = partial(self.call, number)
                self._steps[number] = instead_in(Point.SCHEDULER_STEP, config.scheduler, call)
            if by_step and not self._manual:
                self._due[number] = DueCalls(config.frequency)
                config.frequency = Every.by(self._due[number])
        client.listeners.on_calls(self._take)

    def begin_batch(self) -> None:
        """A mini-batch begins: calls from now on are this worker's own."""
        self._together = False
        self._expected.begin_batch()

    def meet(self) -> None:
        """All workers meet and take over the schedulers with most calls."""
        self._together = self._manual
        self.pass_over()
        if not self._steps:
            return
        known = self._client.gather("schedules", schedules_of(self._trainer))
        take_schedules(self._trainer, *max(known, key=_n_calls))

    def pass_over(self) -> None:
        """Leave the calls for updates up to now to other workers."""
        self._seen = self._client.steps.version

    def call_for_logged(self, count_batches: Callable[[], float]) -> None:
        """Find the updates, since this worker's last mini-batch, for which it may call.

        It calls now where training has logged the metric. Else Lightning calls, behind a
        validation if there is one, where workers call in any order.

        ``count_batches``: returns the number of the epoch's mini-batches.
        """
        if not self._due:
            return
        batches = count_batches()
        self._client.pushes.settle()
        before, now = self._seen, self._client.steps.version
        for due in self._due.values():
            due.find(updates_due(self._trainer, due.every, before, now, batches))
        self.pass_over()
        names = {each.meta.name for each in training_results(self._trainer).values()}
        metrics, module = self._trainer.callback_metrics, self._trainer.lightning_module
        for number, due in self._due.items():
            config = self._trainer.lr_scheduler_configs[number]
            if due.updates and config.monitor in names & metrics.keys():
                module.lr_scheduler_step(config.scheduler, metrics[config.monitor])

    def call(self, number: int, *args: Any, **options: Any) -> Any:
        """User code has called ``step`` of this worker's scheduler."""
        step, sent = self._steps[number], apply_to_collection((args, options), Tensor, Tensor.item)
        if number in self._due:
            self._client.schedule_calls.add((number, *sent, self._due[number].pop()))
            self._client.stats()  # its answer comes after the call, if the server lets that through
            return None
        if self._together or self._expected.asked_for_end:
            return step(*args, **options)
        self._client.pushes.settle()
        if not self._client.steps.counted:  # another worker repeats the mini-batch and its call
            return None
        self._client.schedule_calls.add((number, *sent, ()))
        return step(*args, **options)

    def _take(self, calls: Sequence[ScheduleCall]) -> None:
        """Repeat calls of other workers, and make those that the server has let through."""
        for optimizer in self._trainer.optimizers:
            vars(optimizer)["_opt_called"] = True  # or schedules warn about the order
        for number, args, options, _ in calls:
            self._steps[number](*args, **options)


def _n_calls(found: Schedules) -> list[int]:
    return [state.get("last_epoch", 0) for state in found[0]]
