"""What callbacks and the module have written down while training.

Under DDP rank 0 is the calling process, so a list of losses that a callback keeps is there after
``fit``. Here it is in worker 0, and has to be brought home: plain data by value, into the very
lists and dictionaries that the user holds, and states by ``state_dict``. What is not plain data (a
module, a file, a progress bar) stays as it was.
"""

from __future__ import annotations

import datetime
import pickle
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.callbacks import LearningRateFinder, ModelCheckpoint
from pytorch_lightning.utilities.parsing import lightning_getattr, lightning_setattr
from torch.utils._pytree import tree_map_only

from hybridtrain.lightning.hooks.callback_hooks import DECIDED, HOW_IT_STEPS, searched_attribute

_MOST_ITEMS = 100_000  # of one attribute; more is data, not something written down
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


def what_was_found(finder: LearningRateFinder, module: pl.LightningModule) -> dict[str, Any]:
    """The curve of losses, and the learning rate that the module has now."""
    found: dict[str, Any] = {"optimal_lr": finder.optimal_lr}
    if (name := searched_attribute(finder, module)) is not None:
        found["attribute"] = (name, lightning_getattr(module, name))
    return found


def take_what_was_found(
    finder: LearningRateFinder, module: pl.LightningModule, found: dict[str, Any]
) -> None:
    """The other half, in the calling process."""
    finder.optimal_lr = found["optimal_lr"]
    if "attribute" in found:
        lightning_setattr(module, *found["attribute"])


class _NotPlain(Exception):
    pass


@dataclass(frozen=True)
class CallbackState:
    """Of one callback, or of the module."""

    kind: str
    plain: dict[str, Any]
    state: dict[str, Any]


def of_callback(callback: pl.Callback, module: pl.LightningModule) -> CallbackState:
    """In worker 0."""
    found = isinstance(callback, LearningRateFinder)
    plain = {} if found else plain_attributes(callback)
    return CallbackState(_kind(callback), plain, state_of(callback, module))


def of_module(module: pl.LightningModule) -> CallbackState:
    """In worker 0. Weights and buffers travel on their own."""
    plain = plain_attributes(module, _comes_home)
    return CallbackState(_kind(module), plain, {})


def _comes_home(name: str) -> bool:
    """Also how the module optimizes, which ``setup`` may decide: steps are counted by that."""
    return name == HOW_IT_STEPS or (name[0] != "_" and name != "training")


def give_to_callback(
    callback: pl.Callback, module: pl.LightningModule, belongings: CallbackState
) -> None:
    """In the calling process."""
    give_plain(callback, belongings.plain)
    give_state(callback, module, belongings.state)


def give_to_module(module: pl.LightningModule, belongings: CallbackState) -> None:
    """In the calling process."""
    if belongings.kind == _kind(module):
        give_plain(module, belongings.plain)


def pairs(
    callbacks: Iterable[pl.Callback], brought: Iterable[CallbackState]
) -> list[tuple[pl.Callback, CallbackState]]:
    """Each callback of this process with what its counterpart has brought, by kind and order."""
    waiting = list(brought)
    found = []
    for callback in callbacks:
        mine = next((each for each in waiting if each.kind == _kind(callback)), None)
        if mine is not None:
            waiting.remove(mine)
            found.append((callback, mine))
    return found


def _kind(thing: object) -> str:
    """The name of its class, which spawned workers know by another one if a script defines it."""
    module = type(thing).__module__
    return f"{'__main__' if module == '__mp_main__' else module}.{type(thing).__qualname__}"


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
    """What a callback says of itself."""
    if isinstance(callback, LearningRateFinder):
        return what_was_found(callback, module)
    if isinstance(callback, ModelCheckpoint):
        return _at_home({name: getattr(callback, name) for name in _CHECKPOINT_FIELDS})
    state: dict[str, Any] = _at_home(callback.state_dict())
    try:
        pickle.dumps(state)
    except Exception:
        return {}  # it cannot travel; the other callback stays as it was
    return state


def standing_of(callback: pl.Callback, module: pl.LightningModule) -> dict[str, Any]:
    """What another worker's has to know, too, to decide as this one will."""
    state = state_of(callback, module)
    if isinstance(callback, ModelCheckpoint):
        known = vars(callback)
        state |= {name: known[name] for name in DECIDED if name in known}
        state = _at_home(state)
    return state


def _at_home(state: Any) -> Any:
    """With its tensors in host memory, as no device is this process's and the other's."""
    return tree_map_only(torch.Tensor, lambda value: value.cpu(), state)


def give_state(callback: pl.Callback, module: pl.LightningModule, state: dict[str, Any]) -> None:
    """The other half, elsewhere."""
    if isinstance(callback, LearningRateFinder):
        take_what_was_found(callback, module, state)
    elif isinstance(callback, ModelCheckpoint):
        for name, value in state.items():
            setattr(callback, name, value)
    elif state:
        try:
            callback.load_state_dict(state)
        except Exception as error:  # it prepares itself only in a run (SpikeDetection)
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
    if isinstance(value, _ATOMS):
        if type(value).__module__.startswith(("builtins", "pathlib", "datetime", "torch")):
            return value
        raise _NotPlain
    left[0] -= value.numel() if type(value) is torch.Tensor else len(value) if _sized(value) else 0
    if left[0] < 0:
        raise _NotPlain
    match value:
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


def _sized(value: Any) -> bool:
    return isinstance(value, (*_SEQUENCES, dict))


def give_plain(thing: Any, values: dict[str, Any]) -> None:
    """Set the attributes; what the user holds, too, is filled instead of replaced."""
    for name, theirs in values.items():
        mine = vars(thing).get(name)
        if type(mine) is not type(theirs) or not _fill(mine, theirs):
            vars(thing)[name] = theirs


def _fill(mine: Any, theirs: Any) -> bool:
    """Put the items into the container that others may hold too; False if it is none."""
    match mine:
        case list():
            mine[:] = theirs
        case dict() | set():
            mine.clear()
            mine.update(theirs)
        case deque():
            mine.clear()
            mine.extend(theirs)
        case _:
            return False
    return True
