"""Decide at which steps a free-running worker logs, saves, and steps a schedule with a metric.

Lightning asks ``step % every_n == 0`` for each of these, and has no hook for the answer. But here
other workers make some of the steps: the multiple itself is perhaps one of theirs. So its number is
replaced by an :class:`Every`, whose remainder one of the rules below decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pytorch_lightning.callbacks import ModelCheckpoint

from hybridtrain.lightning.hooks.trainer_hooks import save_every, saves_every
from hybridtrain.lightning.update_count import multiples


class DueSteps(Protocol):
    """A rule that takes the place of whole multiples of ``every``."""

    every: int

    def is_due(self, step: int) -> bool:
        """Whether Lightning is to act at this step."""


class Every(int):
    """One of Lightning's ``every_n`` numbers, whose multiples a rule decides.

    A subclass of ``int``, because Lightning also compares and prints the number; its remainder is
    the only question that Lightning asks about a step.
    """

    rule: DueSteps

    @classmethod
    def by(cls, rule: DueSteps) -> Every:
        """The rule as a number."""
        number = cls(rule.every)
        number.rule = rule
        return number

    def __rmod__(self, step: int) -> int:
        return 0 if self.rule.is_due(step) else 1


class DueRows:
    """Rows of loggers: a worker's first step at or after a multiple counts as one.

    In a mini-batch that has not stepped the number of its update is not known. A callback that asks
    there (``LearningRateMonitor``) gets the first mini-batch that can make a multiple or has begun
    after it.

    Args:
        trainer: of this worker; its ``log_every_n_steps`` is the rule's.
    """

    def __init__(self, trainer: Any) -> None:
        self.every, self._trainer = int(trainer.log_every_n_steps), trainer
        self._before = 0  # the last step that may have had a row
        self._begun_before = 0  # the least step that the last mini-batch could have made
        self._begun = 0  # the same of this one
        self._stepped = False  # this one

    def is_due(self, step: int) -> bool:
        if not self._trainer.training:  # an evaluation counts its own mini-batches
            return step % self.every == 0
        before, now = (self._before, step) if self._stepped else (self._begun_before, self._begun)
        return multiples(self.every, before, now) > 0

    def are_due_up_to(self, step: int) -> bool:
        """Whether a row is due, if this mini-batch makes this step."""
        return multiples(self.every, self._before, step) > 0

    def begin(self, step: int) -> None:
        """A mini-batch begins that makes at least this step."""
        self._begun = max(self._begun, step)

    def has_stepped(self) -> None:
        """The mini-batch has made its step."""
        self._stepped = True

    def end(self, step: int) -> None:
        """The mini-batch has made this step, and perhaps a row of it."""
        self._before, self._begun_before = max(self._before, step), self._begun
        self._stepped = False

    def pass_over(self, step: int) -> None:
        """Leave rows up to this step to another worker."""
        self.begin(step)
        self.end(step)


class DueFiles:
    """Files of a ``ModelCheckpoint``: a worker's first step at or after a multiple counts as one.

    Args:
        every: its ``every_n_train_steps``.
    """

    def __init__(self, every: int) -> None:
        self.every = int(every)
        self.since = 0  # the last step that was asked for

    def begin(self, proceed: Callable[..., None], trainer: Any, module: Any) -> None:
        """Training begins: multiples up to now do not count."""
        self.since = trainer.global_step
        proceed(trainer, module)

    def reach(self, step: int) -> None:
        """Other workers may have come to this step."""
        self.since = step

    def is_due(self, step: int) -> bool:
        before, self.since = self.since, step
        return multiples(self.every, before, step) > 0


class DueCalls:
    """Steps of a schedule on a plateau: due where this worker may call for an update.

    Args:
        every: its ``frequency``.
    """

    def __init__(self, every: int) -> None:
        self.every = int(every)
        self.updates: tuple[int, ...] = ()

    def is_due(self, step: int) -> bool:
        return bool(self.updates)

    def find(self, updates: tuple[int, ...]) -> None:
        """These are the updates for which this worker may call."""
        self.updates = updates

    def pop(self) -> tuple[int, ...]:
        """The updates for which it calls now."""
        found, self.updates = self.updates, ()
        return found


def rows_of(trainer: Any) -> DueRows | None:
    """The trainer's rule, if it has one."""
    rule = getattr(trainer.log_every_n_steps, "rule", None)
    return rule if isinstance(rule, DueRows) else None


def files_of(callback: ModelCheckpoint) -> DueFiles:
    """The callback's rule; a new one, not in use, if it was added during the run."""
    rule = getattr(saves_every(callback), "rule", None)
    return rule if isinstance(rule, DueFiles) else DueFiles(saves_every(callback))


def count_all_updates(callback: ModelCheckpoint) -> DueFiles:
    """Let the callback count the updates of all workers."""
    rule = DueFiles(saves_every(callback))
    save_every(callback, Every.by(rule))
    return rule
