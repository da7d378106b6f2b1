"""Attributes of callbacks and module, from worker 0 to the calling process.

Under DDP rank 0 is the calling process, so a callback's list of losses is there after ``fit``. Here
worker 0 sends it: plain data, what the objects that were there before hold
(:mod:`hybridtrain.lightning.states.held_objects`), and states by ``state_dict``. Other attributes
(a file, a progress bar) stay as they were.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.callbacks import LearningRateFinder, ModelCheckpoint
from pytorch_lightning.utilities.parsing import lightning_getattr, lightning_setattr
from torch.utils._pytree import tree_map_only

from hybridtrain.lightning.hooks.trainer_hooks import DECIDED, searched_attribute
from hybridtrain.lightning.states.held_objects import (
    HeldObjects,
    is_own,
    set_attributes,
)
from hybridtrain.lightning.states.plain_data import (
    LIGHTNING,
    Refer,
    attributes_of,
    class_name,
    nothing_held,
)


@dataclass(frozen=True)
class CallbackState:
    """Plain attributes and ``state_dict`` of one callback; of a layer only the former."""

    kind: str
    plain: dict[str, Any]
    state: dict[str, Any]


@dataclass(frozen=True)
class ModuleState:
    """By name: the module and its layers, and whether a parameter needs gradients."""

    layers: dict[str, CallbackState]
    needs_gradient: dict[str, bool]


def of_callback(callback: pl.Callback, module: pl.LightningModule, refer: Refer) -> CallbackState:
    """In worker 0."""
    found = isinstance(callback, LearningRateFinder)
    plain = {} if found else attributes_of(vars(callback).items(), refer)
    return CallbackState(class_name(callback), plain, state_of(callback, module))


def give_to_callback(
    callback: pl.Callback, module: pl.LightningModule, given: CallbackState, held: HeldObjects
) -> None:
    """In the calling process. Attributes come last, or a state could put others in their place."""
    if not resumes_by_state(callback):
        give_state(callback, module, given.state)
    set_attributes(callback, given.plain, held)


def of_module(module: pl.LightningModule, refer: Refer = nothing_held) -> ModuleState:
    """In worker 0. Weights and buffers are sent separately."""

    def plain(layer: torch.nn.Module) -> CallbackState:
        own = attributes_of(((x, v) for x, v in vars(layer).items() if is_own(x)), refer)
        return CallbackState(class_name(layer), own, {})

    return ModuleState(
        {name: plain(layer) for name, layer in module.named_modules()},
        {name: parameter.requires_grad for name, parameter in module.named_parameters()},
    )


def give_to_module(
    module: pl.LightningModule, belongings: ModuleState, held: HeldObjects | None = None
) -> None:
    """In the calling process, to the layers that are there, too."""
    for name, layer in module.named_modules():
        theirs = belongings.layers.get(name)
        if theirs is not None and theirs.kind == class_name(layer):
            set_attributes(layer, theirs.plain, held)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(belongings.needs_gradient.get(name, parameter.requires_grad))


def pairs(
    callbacks: Iterable[pl.Callback], brought: Iterable[CallbackState]
) -> list[tuple[pl.Callback, CallbackState]]:
    """Match callbacks of this process with the states of worker 0's, by class and order."""
    waiting = list(brought)
    found = []
    for callback in callbacks:
        mine = next((each for each in waiting if each.kind == class_name(callback)), None)
        if mine is not None:
            waiting.remove(mine)
            found.append((callback, mine))
    return found


# ---- states -------------------------------------------------------------------------------------

_CHECKPOINT_FIELDS = (
    "best_model_path",
    "best_model_score",
    "best_k_models",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
    "current_score",
    "dirpath",
)


def state_of(callback: pl.Callback, module: pl.LightningModule) -> dict[str, Any]:
    """A callback's state, with tensors in host memory."""
    if isinstance(callback, LearningRateFinder):
        found: dict[str, Any] = {"optimal_lr": callback.optimal_lr}
        if (name := searched_attribute(callback, module)) is not None:
            found["attribute"] = (name, lightning_getattr(module, name))
        return found
    if isinstance(callback, ModelCheckpoint):
        return _on_host({name: getattr(callback, name) for name in _CHECKPOINT_FIELDS})
    state: dict[str, Any] = _on_host(callback.state_dict())
    try:
        pickle.dumps(state)
    except Exception:
        return {}  # it cannot be sent; the other callback stays as it was
    return state


def standing_of(callback: pl.Callback, module: pl.LightningModule) -> dict[str, Any]:
    """The state that another worker's callback needs, too, to decide like this one."""
    state = state_of(callback, module)
    if isinstance(callback, ModelCheckpoint):
        known = vars(callback)
        state |= {name: known[name] for name in DECIDED if name in known}
        state = _on_host(state)
    return state


def _on_host(state: Any) -> Any:
    """The state with its tensors in host memory: the other process may use another device."""
    return tree_map_only(torch.Tensor, lambda value: value.cpu(), state)


def resumes_by_state(callback: pl.Callback) -> bool:
    """Whether ``load_state_dict`` is Lightning's own, after which the next run is a resumed one.

    As that of ``StochasticWeightAveraging``, ``BaseFinetuning``, ``Timer``. Attributes are plain.
    """
    home = type(callback).load_state_dict.__module__
    known = isinstance(callback, LearningRateFinder | ModelCheckpoint)
    return not known and home.startswith(LIGHTNING)


def give_state(callback: pl.Callback, module: pl.LightningModule, state: dict[str, Any]) -> None:
    """In another process: restore it."""
    if isinstance(callback, LearningRateFinder):
        callback.optimal_lr = state["optimal_lr"]
        if "attribute" in state:
            lightning_setattr(module, *state["attribute"])
    elif isinstance(callback, ModelCheckpoint):
        for name, value in state.items():
            setattr(callback, name, value)
    elif state:
        try:
            callback.load_state_dict(state)
        except Exception as error:  # some are set up only in a run (SpikeDetection)
            rank_zero_warn(f"{type(callback).__name__} could not take its state home: {error!r}")
