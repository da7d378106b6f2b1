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

from hybridtrain.lightning.due_steps import DueFiles, count_all_updates
from hybridtrain.lightning.hooks.points import Point, around


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

    every: DueFiles
    one_update: OneUpdate

    def save(self, proceed: Callable[..., None], trainer: Any, *args: Any) -> None:
        """The callback's hook, whose names and files are of one update."""
        self.one_update.save(partial(proceed, trainer, *args))
        self.every.reach(trainer.global_step)


def save_by_all_updates(callback: ModelCheckpoint, one_update: OneUpdate) -> None:
    """Let the callback count updates of all workers."""
    every = count_all_updates(callback)
    around(Point.CHECKPOINT_START, callback, every.begin)
    around(Point.CHECKPOINT_HOOKS, callback, SavedMultiples(every, one_update).save)
