"""Read and set Lightning's counters: ``global_step`` and schedulers.

A free-running worker's own count of steps depends on its speed. With the server's version as
Lightning's ``global_step``, ``max_steps``, checkpoint names, loggers and schedulers in steps mean
the same under every policy (:mod:`hybridtrain.lightning.async_training.counting`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytorch_lightning as pl

from hybridtrain.engine.updates.groups import Groups, plain
from hybridtrain.lightning.hooks.trainer_hooks import step_scheduler

Schedules = tuple[list[dict[str, Any]], list[Groups]]


def set_global_step(trainer: pl.Trainer, completed: int) -> None:
    """Make ``completed`` updates the trainer's global step (before it counts the current one)."""
    counts = _counts(trainer)
    more = completed - counts.total.completed
    for each in (counts.total, counts.current):
        each.completed += more
        each.ready += more


def _counts(trainer: pl.Trainer) -> Any:
    """Lightning's counts of updates: in ``total``, and ``current`` in this epoch."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        return loop.automatic_optimization.optim_progress.optimizer.step
    return loop.manual_optimization.optim_step_progress


def lift_dev_run_limit(trainer: Any) -> None:
    """Let ``limit_train_batches`` alone bound ``fast_dev_run``: N mini-batches of each worker.

    Lightning also sets ``max_steps=N``, which free-running workers reach before the epoch ends.
    """
    if trainer.fast_dev_run:
        vars(trainer.fit_loop.epoch_loop).update(max_steps=-1)  # Lightning's own


def step_schedulers(trainer: pl.Trainer, before: int, now: int, most: float) -> None:
    """Step the schedulers with ``interval=step`` for the updates from ``before`` to ``now``.

    As in Lightning, ``frequency`` counts the epoch's mini-batches: of one device that has made as
    many updates, and has ``most`` mini-batches in the epoch.
    """
    progress = trainer.fit_loop.epoch_loop.scheduler_progress
    for _, batches in _updates(trainer, before, now, most):
        for config in trainer.lr_scheduler_configs:
            by_step = config.interval == "step" and not config.reduce_on_plateau
            if by_step and batches % config.frequency == 0:
                progress.increment_ready()
                step_scheduler(trainer, config.scheduler)
                progress.increment_completed()


def updates_due(
    trainer: pl.Trainer, frequency: int, before: int, now: int, most: float
) -> tuple[int, ...]:
    """The updates among these behind which a schedule of this frequency steps."""
    updates = _updates(trainer, before, now, most)
    return tuple(update for update, batches in updates if batches % frequency == 0)


def _updates(
    trainer: pl.Trainer, before: int, now: int, most: float
) -> Iterator[tuple[int, float]]:
    """Each update, and how many of the epoch's mini-batches one device has made with it."""
    counts, accumulated = _counts(trainer), int(trainer.accumulate_grad_batches)
    began = counts.total.completed - counts.current.completed
    for update in range(before + 1, now + 1):
        yield update, min((update - began) * accumulated, most)


def scheduled_steps(trainer: pl.Trainer) -> int:
    """How many steps the schedulers in steps have counted."""
    configs = [c for c in trainer.lr_scheduler_configs if c.interval == "step"]
    return max((getattr(c.scheduler, "last_epoch", 0) * c.frequency for c in configs), default=0)


def schedules_of(trainer: pl.Trainer) -> Schedules:
    """The states of all schedulers, and the hyper-parameters that they have changed."""
    states = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    return states, list(map(plain, trainer.optimizers))


def take_schedules(
    trainer: pl.Trainer, states: Sequence[dict[str, Any]], groups: Sequence[Groups]
) -> None:
    """Take over another worker's schedulers."""
    for config, state in zip(trainer.lr_scheduler_configs, states, strict=True):
        config.scheduler.load_state_dict(state)
    for optimizer, theirs in zip(trainer.optimizers, groups, strict=True):
        for group, values in zip(optimizer.param_groups, theirs, strict=True):
            group.update(values)


def multiples(every: int, before: int, now: int) -> int:
    """How many multiples of ``every`` lie after step ``before``, up to ``now``."""
    return now // every - before // every
