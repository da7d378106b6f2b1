"""Attributes of ``trainer`` behind a run, in the calling process, which did not train.

Sizes come from worker 0. Loaders, optimizers and schedules are made when somebody asks for them:
the hooks of the user that make them (``train_dataloader``, ``configure_optimizers``) run here then,
and optimizers and schedules get the states that they have come to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.utilities import CombinedLoader

from hybridtrain.lightning.hooks.loop_hooks import (
    give_loaders,
    has_loaders,
    loops_of,
    set_sizes,
    sizes_of,
    source_of,
)
from hybridtrain.lightning.hooks.trainer_hooks import attach_data, configured_optimizers
from hybridtrain.lightning.run_context import context_of


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run, as worker 0 knows them.

    ``sizes``: what its loops have counted before they began; ``loaders``: whether each has some;
    ``total``: how many updates were to be made, of a training.
    """

    sizes: dict[str, Any]
    loaders: list[bool]
    total: float | None

    @classmethod
    def of(cls, trainer: Any) -> Sizes:
        """In that worker."""
        total = None
        with suppress(Exception):  # of loaders that cannot tell
            total = trainer.estimated_stepping_batches if trainer.state.fn == "fit" else None
        known, expected = sizes_of(trainer), context_of(trainer).expected_updates
        if expected is not None and total is not None:  # one queue has the mini-batches of all
            known["max_batches"] = expected.mini_batches()
        return cls(known, list(map(has_loaders, loops_of(trainer))), total)

    def give(self, trainer: Any, given: Mapping[str, Any]) -> None:
        """To the trainer of the calling process; ``given``: the arguments of its function."""
        attach_data(trainer, given)
        set_sizes(trainer, self.sizes)
        for loop, has_some in zip(loops_of(trainer), self.loaders, strict=True):
            if has_some:
                give_loaders(loop, LoadersAtHome(source_of(loop), str(trainer.state.fn.value)))


class UpdatesAtHome:
    """As :class:`ExpectedUpdates`, of a training that is over."""

    def __init__(self, total: float | None) -> None:
        self._total: Any = total

    def total(self) -> Any:
        """As worker 0 has said it; ``None``: it is Lightning's to say."""
        return self._total

    def mini_batches(self) -> float:
        """None are to follow."""
        return 0

    def know_end(self) -> None:
        """Nor does the last."""


class LoadersAtHome(CombinedLoader):
    """Asks for the loaders of one stage once they are wanted.

    Args:
        source: asks the user's code for them.
        stage: what ``setup`` is called with, where they cannot be made before.
    """

    def __init__(self, source: Any, stage: str) -> None:
        super().__init__([])
        self._source, self._stage, self._asked = source, stage, False

    @property
    def iterables(self) -> Any:
        """The loaders that were given, or that the user's hook returns."""
        if not self._asked:
            self._asked = True
            self._found = made_or_none(self._make, "the loaders")
        return self._found

    def _make(self) -> Any:
        with suppress(Exception):
            return self._source.dataloader()
        self._source.instance.setup(self._stage)
        return self._source.dataloader()


def trained_optimizers(module: Any, states: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Optimizers and schedules as they are behind training; none where they cannot be made."""
    made = made_or_none(lambda: configured_optimizers(module), "the optimizers")
    optimizers, schedules = made or ([], [])
    for optimizer, state in zip(optimizers, states["optimizer_states"], strict=False):
        if state:
            optimizer.load_state_dict(state)
    for config, state in zip(schedules, states["lr_schedulers"], strict=False):
        config.scheduler.load_state_dict(state)
    return optimizers, schedules


def made_or_none(make: Callable[[], Any], what: str) -> Any:
    """Call ``make``; warn and return None if it raises, as ``setup`` ran in workers only."""
    try:
        return make()
    except Exception as error:
        rank_zero_warn(
            f"{what} of the last run are in the workers, and cannot be made again in the calling "
            f"process: {type(error).__name__}: {error}"
        )
        return None
