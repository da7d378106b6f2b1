"""The number of updates of a training with free-running workers.

Schedulers take ``trainer.estimated_stepping_batches`` as their length. Lightning computes it from
this worker's loader, which has no length when it draws from the shared queue. Schedulers in steps
follow the updates of all workers (:mod:`hybridtrain.lightning.update_count`), so the
total is that of all workers.

It is exact where each mini-batch makes an update (async, hogwild, synchronous). It is an estimate

- where an update gathers several contributions (k_async, backup, softsync, ...): as if all gathered
  the usual number. At the end of an epoch, before a validation, or with fewer workers, some gather
  less; with ``backup`` and ``k=auto`` late workers are not known; with ``ssp`` contributions of
  held workers count together;
- with ``switch``: exact up to the above if the switch is at a known update; else as if the part
  with more updates had applied from the beginning;
- where several workers accumulate mini-batches: each has a last, smaller group in every epoch;
- where workers have different batch sizes (as if all made equally many mini-batches), or own
  loaders (as if all were as long as this worker's), and where several loaders are combined;
- where schedulers count the steps of each worker's own optimizer: as if all made equally many;
- where gradients are dropped (``on_nonfinite``), workers are lost, or training is stopped.

If the estimate is too low, schedulers stay at their end for the remaining steps, because
``OneCycleLR`` raises beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl

from hybridtrain.engine.exchanges import Requirements
from hybridtrain.lightning.data.user_loaders import batches_of, plan_behind
from hybridtrain.lightning.hooks.loop_hooks import combination_of, combined_loader
from hybridtrain.lightning.hooks.points import Point, instead
from hybridtrain.lightning.run_context import strategy_of
from hybridtrain.virtual.training_task import Timetable

_BY_MODE: dict[str, Callable[[list[float]], float]] = {"min_size": min, "sequential": sum}


class ExpectedUpdates:
    """Computes the number in one worker.

    Args:
        trainer: of this worker.
        requirements: contributions to an update.
        n_workers: W.
    """

    def __init__(self, trainer: pl.Trainer, requirements: Requirements, n_workers: int) -> None:
        self._trainer: Any = trainer
        self._requirements, self._n_workers = requirements, n_workers
        self.limit: int | None = None  # of scheduler steps, if an estimate was given
        self.asked_for_end = False  # user code has read that this mini-batch is the worker's last

    def total(self) -> int | None:
        """Updates of the whole training, before a checkpoint included; ``None``: ask Lightning.

        ``max_steps`` limits it.
        """
        trainer = self._trainer
        if trainer.max_epochs == -1:
            return None
        if trainer.train_dataloader is None:
            trainer.fit_loop.setup_data()
        epoch = self.mini_batches()
        if math.isinf(epoch):
            return None
        accumulated, epochs = int(trainer.accumulate_grad_batches), max(trainer.max_epochs, 1)
        wants, most = self._requirements, trainer.max_steps
        if own := wants.schedules_own_steps:
            found = epochs * math.ceil(math.ceil(epoch / self._n_workers) / accumulated)
            most = math.ceil(most * wants.gathers / self._n_workers) if most != -1 else most
        else:
            found = updates_of(wants, math.ceil(epoch / accumulated), epochs)
        found = found if most == -1 else min(found, most)
        alone = self._n_workers == 1 or wants.takes_turns
        exact = alone and most == -1 if own else wants.gathers == 1 and wants.later is None
        exact &= (accumulated == 1 or alone) and len(self._loaders()) == 1
        exact &= all(len(set(p.sizes)) == 1 for p in map(plan_behind, self._loaders()) if p)
        self.limit = None if exact else found
        return found

    def know_end(self) -> None:
        """User code has read ``is_last_batch``, and it is True."""
        self.asked_for_end = True

    def begin_batch(self) -> None:
        """A mini-batch begins: user code has not read it."""
        self.asked_for_end = False

    def _loaders(self) -> list[Any]:
        combined = combined_loader(self._trainer.fit_loop)
        return [] if combined is None else combined.flattened

    def mini_batches(self) -> float:
        """Mini-batches of all workers in one epoch; infinite: unknown."""
        combined = combined_loader(self._trainer.fit_loop)
        if not self._loaders() or combined.limits is None:
            return 0
        each = list(map(self._of_loader, combined.flattened, combined.limits))
        return _BY_MODE.get(combination_of(combined), max)(each)

    def _of_loader(self, loader: Any, limit: float) -> float:
        """``limit``: of this worker's mini-batches, or infinite."""
        plan = plan_behind(loader)
        mine = self._n_workers * limit
        return mine if plan is None else min(batches_of(plan), mine)


class ExpectsUpdates:
    """A strategy that knows how many updates are expected of all workers."""

    expected_updates: ExpectedUpdates | None = None  # of a free-running worker
    _trained_updates: float | None = None  # expected in worker 0, in the calling process

    def expected_total(self) -> float | None:
        """The updates of the whole training; ``None``: ask Lightning."""
        expected = self.expected_updates
        return self._trained_updates if expected is None else expected.total()


def updates_of(requirements: Requirements, pushes: int, epochs: int) -> int:
    """How many updates ``pushes`` in each epoch make."""
    usual = epochs * math.ceil(pushes / requirements.gathers)
    if requirements.later is None or usual <= requirements.later[0]:
        return usual
    before, gathers = requirements.later
    return before + math.ceil((epochs * pushes - before * requirements.gathers) / gathers)


def expected_in(table: Timetable, epochs: int, requirements: Requirements) -> int:
    """Steps of schedules in virtual time, in which nothing is accumulated."""
    pushes, n_workers = batches_of(table), len(table.sizes)
    if requirements.whole_rounds or requirements.schedules_own_steps:
        rounds = pushes / n_workers
        return epochs * (math.floor(rounds) if table.drop_last else math.ceil(rounds))
    return updates_of(requirements, pushes, epochs)


# ---- properties of the trainer ------------------------------------------------------------------

_lightnings: Any = pl.Trainer.estimated_stepping_batches
_is_last: Any = pl.Trainer.is_last_batch


def answer_for_all_workers() -> None:
    """From now on trainers of this process ask ``ExpectedUpdates`` first."""
    instead(Point.EXPECTED, pl.Trainer, property(estimated))
    instead(Point.LAST_BATCH, pl.Trainer, property(looked))


def estimated(trainer: pl.Trainer) -> float:
    """All workers' updates in this training; see Lightning's own."""
    strategy = strategy_of(trainer)
    found = strategy.expected_total() if isinstance(strategy, ExpectsUpdates) else None
    return _lightnings.fget(trainer) if found is None else found


def looked(trainer: pl.Trainer) -> bool:
    """Whether this mini-batch is the worker's last of the epoch; note that user code knows."""
    strategy, last = strategy_of(trainer), _is_last.fget(trainer)
    expected = strategy.expected_updates if isinstance(strategy, ExpectsUpdates) else None
    if expected is not None and last:
        expected.know_end()
    return bool(last)
