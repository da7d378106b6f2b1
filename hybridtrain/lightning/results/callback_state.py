"""Copy attributes of callbacks and module from worker 0 to the calling process.

Under DDP rank 0 is the calling process, so a callback's list of losses is there after ``fit``. Here
worker 0 sends it: plain data by value, into the lists and dictionaries that the user holds, and
states by ``state_dict``. Other attributes (a module, a file, a progress bar) stay as they were.
"""

from __future__ import annotations

import datetime
import pickle
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import PurePath
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.callbacks import LearningRateFinder, ModelCheckpoint
from pytorch_lightning.utilities.parsing import lightning_getattr, lightning_setattr
from torch.utils._pytree import tree_map_only

from hybridtrain.lightning.hooks.trainer_hooks import DECIDED, HOW_IT_STEPS, searched_attribute

_MOST_ITEMS = 100_000  # of one attribute; more is data, not a result
_ATOMS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    PurePath,
    datetime.date,
    datetime.timedelta,
    torch.device,
    torch.dtype,
)


_LIGHTNING = ("pytorch_lightning.", "lightning.")  # modules of either package
_NUMPY = "biufcSUMm"  # kinds of numbers, texts, times


class _NotPlain(Exception):
    pass


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


def of_callback(callback: pl.Callback, module: pl.LightningModule) -> CallbackState:
    """In worker 0."""
    found = isinstance(callback, LearningRateFinder)
    plain = {} if found else plain_attributes(callback)
    return CallbackState(class_name(callback), plain, state_of(callback, module))


def of_module(module: pl.LightningModule) -> ModuleState:
    """In worker 0. Weights and buffers are sent separately."""
    return ModuleState(
        {
            name: CallbackState(
                class_name(layer), plain_attributes(layer, _is_returned if name else _is_own), {}
            )
            for name, layer in module.named_modules()
        },
        {name: parameter.requires_grad for name, parameter in module.named_parameters()},
    )


def _is_returned(name: str) -> bool:
    """Public attributes."""
    return name[0] != "_"


@cache
def _internal() -> frozenset[str]:
    """The attributes of every module, which torch and Lightning use themselves."""
    return frozenset(vars(pl.LightningModule()))


def _is_own(name: str) -> bool:
    """The module's own attributes, and the kind of optimization, on which counts depend."""
    return name == HOW_IT_STEPS or _is_returned(name) or name not in _internal()


def give_to_module(module: pl.LightningModule, belongings: ModuleState) -> None:
    """In the calling process, to the layers that are there, too."""
    for name, layer in module.named_modules():
        theirs = belongings.layers.get(name)
        if theirs is not None and theirs.kind == class_name(layer):
            give_plain(layer, theirs.plain)
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


def class_name(thing: object) -> str:
    """The name of its class, or of a class; spawned workers name a script's module differently."""
    kind = thing if isinstance(thing, type) else type(thing)
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    return f"{module}.{kind.__qualname__}"


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
    return not known and home.startswith(_LIGHTNING)


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


# ---- plain data ---------------------------------------------------------------------------------


def plain_attributes(
    thing: Any, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Any]:
    """Copies of the attributes that are plain data."""
    found = {}
    for name, value in vars(thing).items():
        if wanted(name):
            try:
                found[name] = _copy(value, [_MOST_ITEMS])
            except _NotPlain:
                continue
    return found


def _copy(value: Any, left: list[int]) -> Any:
    if isinstance(value, Enum) and type(value).__module__.startswith(_LIGHTNING):
        return value  # keys of ``Timer``
    numpys = isinstance(value, np.generic | np.ndarray)  # numpy's float64 is a float, too
    if isinstance(value, _ATOMS) and not numpys:
        if type(value).__module__.startswith(("builtins", "pathlib", "datetime", "torch")):
            return value
        raise _NotPlain
    left[0] -= _items(value)
    if left[0] < 0:
        raise _NotPlain
    match value:
        case np.generic() | np.ndarray() if value.dtype.kind in _NUMPY:
            return value.copy()
        case torch.Tensor() if type(value) is torch.Tensor:
            return value.detach().to("cpu", copy=True)
        case list() | tuple() | set() | frozenset() | deque() if type(value) in _SEQUENCES:
            return type(value)(_copy(each, left) for each in value)
        case dict() if type(value) in (dict, OrderedDict, defaultdict):
            copied = {_copy(k, left): _copy(v, left) for k, v in value.items()}
            if isinstance(value, defaultdict):
                if value.default_factory not in (None, int, float, list, dict, set):
                    raise _NotPlain
                return defaultdict(value.default_factory, copied)
            return type(value)(copied)
    raise _NotPlain


_SEQUENCES = (list, tuple, set, frozenset, deque)


def _items(value: Any) -> int:
    if type(value) is torch.Tensor:
        return value.numel()
    if isinstance(value, np.ndarray):
        return value.size
    return len(value) if isinstance(value, (*_SEQUENCES, dict)) else 0


def give_plain(thing: Any, values: dict[str, Any]) -> None:
    """Set the attributes; fill containers in place, as the user may hold them, too."""
    for name, theirs in values.items():
        mine = vars(thing).get(name)
        if type(mine) is not type(theirs) or not _fill(mine, theirs):
            vars(thing)[name] = theirs


def _fill(mine: Any, theirs: Any) -> bool:
    """Put the items into the container; False if it is none."""
    match mine:
        case list() | deque():
            mine.clear()
            mine.extend(theirs)
        case dict() | set():
            mine.clear()
            mine.update(theirs)
        case _:
            return False
    return True
