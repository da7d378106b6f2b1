"""A ``ModelCheckpoint`` of workers that run freely counts the updates of all of them.

``global_step`` counts all workers' updates, so a worker's first step at or after a multiple of
``every_n_train_steps`` counts as that multiple. The names and files of one hook are of one update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pytorch_lightning.callbacks import ModelCheckpoint

from hybridtrain.lightning.hooks.points import Point, around
from hybridtrain.lightning.hooks.trainer_hooks import save_every, saves_every
from hybridtrain.lightning.update_count import multiples


class Multiples(int):
    """An ``every_n_train_steps`` without remainder for the first step at or after a multiple."""

    since = 0  # the last step that was divided

    def begin(self, proceed: Callable[..., None], trainer: Any, module: Any) -> None:
        """Training begins: multiples up to now do not count."""
        self.since = trainer.global_step
        proceed(trainer, module)

    def reach(self, step: int) -> None:
        """Other workers may have come to this step."""
        self.since = step

    def __rmod__(self, step: int) -> int:
        before, self.since = self.since, step
        return 0 if multiples(int(self), before, step) > 0 else 1


@dataclass(frozen=True)
class OneUpdate:
    """Lets the names and files of a ``ModelCheckpoint`` be of one update.

    Args:
        decide: called before the callback builds a name.
        save: runs a hook of the callback.
    """

    decide: Callable[[], None]
    save: Callable[[Callable[[], None]], None]


@dataclass(frozen=True)
class SavedMultiples:
    """Runs the hooks of a callback that counts updates of all workers."""

    every: Multiples
    one_update: OneUpdate

    def save(self, proceed: Callable[..., None], trainer: Any, *args: Any) -> None:
        """The callback's hook, whose names and files are of one update."""
        self.one_update.save(partial(proceed, trainer, *args))
        self.every.reach(trainer.global_step)


def count_all_updates(callback: ModelCheckpoint, one_update: OneUpdate) -> None:
    """Let the callback count updates of all workers."""
    every = Multiples(saves_every(callback))
    save_every(callback, every)
    around(Point.CHECKPOINT_START, callback, every.begin)
    around(Point.CHECKPOINT_HOOKS, callback, SavedMultiples(every, one_update).save)


def multiples_of(callback: ModelCheckpoint) -> Multiples:
    """The callback's, or an unused one if the callback was added during the run."""
    every = saves_every(callback)
    return every if isinstance(every, Multiples) else Multiples(every)
