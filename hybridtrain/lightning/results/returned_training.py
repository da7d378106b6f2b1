"""Attributes of ``trainer`` after a run, in the calling process, which did not train.

Worker 0 sends the sizes. Loaders are made on first use, by the user's hooks; so are optimizers and
schedulers (:mod:`hybridtrain.lightning.results.returned_optimizers`).

Lightning calls ``configure_model`` after ``setup``, in the workers. The calling process calls it
once, before it loads the weights, so that the module has all layers. It does not call ``setup``,
which may read data: the module's plain attributes (a number of classes) are sent as they were just
before ``configure_model``, which may itself note that it has been called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch.nn.parameter import is_lazy

from hybridtrain.engine.step.shared_buffers import lies_apart
from hybridtrain.lightning.async_training.expected_updates import ExpectedUpdates
from hybridtrain.lightning.hooks.loop_hooks import (
    combined_loader,
    give_loaders,
    loops_of,
    set_sizes,
    sizes_of,
    source_of,
)
from hybridtrain.lightning.hooks.trainer_hooks import attach_data
from hybridtrain.lightning.states.callback_state import ModuleState, give_to_module, of_module


@dataclass(frozen=True)
class Sizes:
    """Worker 0's sizes of a run.

    ``sizes``: see ``sizes_of``; ``loaders``: whether each loop has some; ``total``: the expected
    number of updates, of a training.
    """

    sizes: dict[str, Any]
    loaders: list[bool]
    total: float | None

    @classmethod
    def of(cls, trainer: Any, expected: ExpectedUpdates | None) -> Sizes:
        """In worker 0; ``expected``: of a worker that runs freely."""
        total = None
        with suppress(Exception):  # of loaders that cannot tell
            total = trainer.estimated_stepping_batches if trainer.state.fn == "fit" else None
        known = sizes_of(trainer)
        if expected is not None and total is not None:  # one queue has the mini-batches of all
            known["max_batches"] = expected.mini_batches()
        return cls(known, [combined_loader(each) is not None for each in loops_of(trainer)], total)

    def give(self, trainer: Any, given: Mapping[str, Any]) -> None:
        """Set them in the calling process; ``given``: the arguments of the trainer's function."""
        attach_data(trainer, given)
        set_sizes(trainer, self.sizes)
        for loop, has_some in zip(loops_of(trainer), self.loaders, strict=True):
            if has_some:
                give_loaders(loop, LoadersAtHome(source_of(loop), str(trainer.state.fn.value)))


class LoadersAtHome(CombinedLoader):
    """The loaders of one stage, made on first use.

    Args:
        source: Lightning's source of them.
        stage: argument of ``setup``, which is called if making them fails without it.
    """

    def __init__(self, source: Any, stage: str) -> None:
        super().__init__([])
        self._source, self._stage = source, stage

    @cached_property
    def iterables(self) -> Any:
        """The loaders given to the trainer, or returned by the user's hook."""
        return made_or_none(self._make, "the loaders")

    def _make(self) -> Any:
        with suppress(Exception):
            return self._source.dataloader()
        self._source.instance.setup(self._stage)
        return self._source.dataloader()


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


# ---- layers of configure_model ------------------------------------------------------------------

_HOOKS = ("configure_sharded_model", "configure_model")  # Lightning's older name comes first


def before_configuring(module: pl.LightningModule) -> ModuleState | None:
    """In a worker, after ``setup``: the module's attributes; ``None``: it has no such hook."""
    return of_module(module) if _hooks(module) else None


def load_weights(
    trainer: pl.Trainer, heavy: Mapping[str, dict[str, Any]], before: ModuleState | None
) -> None:
    """In the calling process: call the hook if a worker has, then load weights and buffers.

    Args:
        heavy: ``weights``: the state that the module has saved, which may lack parameters or have
            other names for them; ``parameters``: all, by their names in the module, ``None`` for
            those in ``weights``; ``buffers``: all.

    Warns of weights that fit no parameter of the module.
    """
    module, weights = trainer.lightning_module, heavy["weights"]
    error = None if before is None else _configure(trainer, before)
    trainer.precision_plugin.convert_module(module)  # as the workers did
    _take_buffers(module, heavy["buffers"], weights)
    # Not strict: a worker may have made layers that this process has not. torch does not count as
    # unexpected what would belong to an attribute that is None here.
    module.load_state_dict(weights, strict=False)
    homeless = weights.keys() - module.state_dict().keys()
    homeless |= _take_parameters(module, heavy["parameters"])
    if homeless:
        why = "make layers in __init__ or configure_model"
        if error is not None:
            why = f"its configure_model ends here with {type(error).__name__}: {error}"
        rank_zero_warn(
            f"{', '.join(sorted(homeless))} of {type(module).__name__} were made in the workers "
            f"and cannot come home, as this process has no such layers; {why}, or load the last "
            "checkpoint"
        )


@torch.no_grad()
def _take_parameters(
    module: torch.nn.Module, parameters: dict[str, torch.Tensor | None]
) -> set[str]:
    """Take over those that the weights have not; returns the names that are no parameter's here."""
    here = dict(module.named_parameters(remove_duplicate=False))
    for name, theirs in parameters.items():
        mine = here.get(name)
        if mine is None or theirs is None or is_lazy(mine):
            continue
        if mine.shape == theirs.shape:
            mine.copy_(theirs)
    return parameters.keys() - here.keys()


@torch.no_grad()
def _take_buffers(
    module: torch.nn.Module, buffers: dict[str, torch.Tensor], weights: dict[str, Any]
) -> None:
    """Take over buffers; ``load_state_dict`` fills those it knows, in their shape."""
    layers = dict(module.named_modules(remove_duplicate=False))
    here = dict(module.named_buffers(remove_duplicate=False))
    for path, theirs in buffers.items():
        owner, _, name = path.rpartition(".")
        mine = here.get(path)
        if mine is not None and (is_lazy(mine) or _fits(mine, theirs)):
            if path not in weights:
                mine.copy_(theirs)
        elif owner in layers:
            with suppress(KeyError):  # an attribute of that name is no buffer here
                layers[owner].register_buffer(name, theirs.clone(), persistent=path in weights)


def _fits(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether the one can be written into the other; an expanded one has one place for many."""
    return mine.shape == theirs.shape and lies_apart(mine)


def _configure(trainer: pl.Trainer, before: ModuleState) -> Exception | None:
    """Call the hook on the CPU; return its exception, which must not fail a finished training."""
    module: Any = trainer.lightning_module
    give_to_module(module, before)
    module.trainer = trainer  # as after a run in one process
    try:
        with trainer.precision_plugin.module_init_context():
            for hook in _hooks(module):
                getattr(module, hook)()
    except Exception as error:
        return error
    return None


def _hooks(module: pl.LightningModule) -> list[str]:
    return [hook for hook in _HOOKS if is_overridden(hook, module)]
