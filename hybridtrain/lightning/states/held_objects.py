"""The caller's own objects: what module, callbacks and loggers hold when a run starts.

The calling process notes them before workers start, and each worker notes the same objects, by the
same ways, before it runs anything: ``("callbacks", 0, "history", "loss")``. At the end worker 0
sends the content of each. The calling process puts it into the object that it has had all the time,
so whoever holds a list, a tensor, an average or an optimizer has it with what training has made of
it. What training has made anew comes home as plain data, in the attributes that hold it.

Looked into are containers, layers, optimizers, schedules, objects with ``state_dict``, random
number generators, and attributes of objects whose classes the user has written. Weights come home
on their own (``results/returned_training.py``), and so do the trainer's optimizers and schedules
(``results/returned_optimizers.py``); here they are only known.
"""

from __future__ import annotations

import pickle
from array import array
from collections import ChainMap, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.strategies import Strategy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, Sampler

from hybridtrain.engine.step.shared_buffers import lies_apart
from hybridtrain.lightning.hooks.trainer_hooks import HOW_IT_STEPS, WRITER
from hybridtrain.lightning.states.plain_data import (
    ATOMS,
    BUFFERS,
    DICTS,
    LIGHTNING,
    SEQUENCES,
    Held,
    NotPlain,
    Way,
    attributes_of,
    class_name,
    content_of,
    copied,
    is_users,
    resolved,
)
from hybridtrain.util.generators import GENERATORS, set_state, state_of

_MOST = 20_000  # objects
_MOST_PARTS = 1_000  # of a container that is looked into
_LEAST_ELEMENTS = 1_000_000  # of tensors, in all, or four times those of the model
_CONTAINERS = (*SEQUENCES, *DICTS, *BUFFERS, ChainMap, np.ndarray)
_LOADERS = frozenset(("train_dataloaders", "val_dataloaders", "dataloaders"))
_DATA = (Dataset, DataLoader, Sampler, pl.LightningDataModule, pl.Trainer, Strategy, type)

Contents = dict[Way, tuple[str, Any]]  # by the way to an object: its class, and what it holds


class HeldObjects:
    """The objects that can be reached when a run starts, by the ways to them.

    Args:
        trainer: of this process.
        given: arguments of the trainer's method; of the loaders among them only generators.
    """

    def __init__(self, trainer: Any, given: Mapping[str, Any]) -> None:
        self._objects: dict[Way, Any] = {}
        self._ways: dict[int, Way] = {}
        self._filled: list[Way] = []
        self._module: pl.LightningModule = trainer.lightning_module
        for name, part in self._parts_of_module():
            self._know(("model", name), part)
        due: deque[tuple[Way, Any]] = deque()
        for name, layer in self._module.named_modules():
            due += ((("model", name, x), v) for x, v in vars(layer).items() if is_own(x))
        for kind in ("callbacks", "loggers"):
            for number, each in enumerate(getattr(trainer, kind)):
                self._know((kind, number), each)
                due += (((kind, number, x), v) for x, v in vars(each).items() if x != WRITER)
        for name in sorted(_LOADERS & given.keys()):
            due += (((name, *way), each) for way, each in _generators_of(given[name]))
        while due and len(self._objects) < _MOST:
            way, value = due.popleft()
            if isinstance(value, ATOMS) or id(value) in self._ways or not _is_looked_into(value):
                continue
            self._know(way, value)
            self._filled.append(way)
            due += (((*way, name), part) for name, part in _parts(value))

    def _parts_of_module(self) -> Iterator[tuple[str, Any]]:
        """Layers, parameters and buffers."""
        yield from self._module.named_modules()
        yield from self._module.named_parameters()
        yield from self._module.named_buffers()

    def _know(self, way: Way, value: Any) -> None:
        if id(value) not in self._ways:
            self._objects[way], self._ways[id(value)] = value, way

    def refer(self, value: Any) -> Held | None:
        """Return a reference to a known object; ``None`` if it is not known."""
        way = self._ways.get(id(value))
        return None if way is None else Held(way)

    def at(self, way: Way) -> Any:
        """The object; raises ``LookupError`` if it is not there."""
        return self._objects[way]

    def contents(self, known: Collection[int]) -> Contents:
        """In worker 0: what the objects hold.

        Args:
            known: identities of objects that come home in another way.
        """
        model = sum(part.numel() for part in self._module.state_dict().values() if _is_tensor(part))
        left = max(_LEAST_ELEMENTS, 4 * model)
        found: Contents = {}
        for way in self._filled:
            value = self._objects[way]
            if id(value) in known:
                continue
            if _is_tensor(value):
                if value.numel() > left:
                    continue
                left -= value.numel()
            try:
                found[way] = class_name(value), _content(value, self.refer)
            except NotPlain:
                continue
        return found

    @torch.no_grad()
    def fill(self, contents: Mapping[Way, tuple[str, Any]], again: bool = False) -> None:
        """In the calling process: put them into the objects; warn of those that cannot take it.

        ``again``: but states and tensors, as a hook may have changed the others meanwhile.
        """
        own = {_place(p) for _, p in self._parts_of_module() if _is_tensor(p)} - {0}
        for way, (kind, content) in contents.items():
            mine = self._objects.get(way)
            if mine is None or class_name(mine) != kind:
                continue
            if _is_tensor(mine) and (again or _place(mine) in own):
                continue  # a view of weights, which are home
            if again and _has_state(mine):
                continue
            try:
                _fill(mine, content, self.at)
            except LookupError:
                continue  # it has an object that this process has not
            except Exception as error:
                rank_zero_warn(f"{type(mine).__name__} could not take its state home: {error!r}")


# ---- which attributes, which objects ------------------------------------------------------------


@cache
def _internal() -> frozenset[str]:
    """The attributes of every module, which torch and Lightning use themselves."""
    return frozenset(vars(pl.LightningModule()))


def is_own(name: str) -> bool:
    """Public attributes of a module and its own, and the kind of optimization: counts go by it."""
    return name == HOW_IT_STEPS or name[0] != "_" or name not in _internal()


def _is_tensor(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def _has_state(value: Any) -> bool:
    """An optimizer, a schedule; of a library an average or a scaler, but none of Lightning's."""
    kind: type = type(value)
    if isinstance(value, Optimizer | LRScheduler):
        return True
    both = callable(getattr(kind, "state_dict", None)) and hasattr(kind, "load_state_dict")
    return both and not is_users(kind) and not kind.__module__.startswith(LIGHTNING)


def _is_looked_into(value: Any) -> bool:
    kind: type = type(value)
    if isinstance(value, _DATA):
        return False
    if kind in _CONTAINERS or _is_tensor(value):
        return True
    return isinstance(value, (torch.nn.Module, *GENERATORS)) or _has_state(value) or is_users(kind)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    kind: type = type(value)
    if kind in (list, tuple, deque) and len(value) <= _MOST_PARTS:
        yield from enumerate(value)
    elif kind in DICTS and len(value) <= _MOST_PARTS:
        yield from enumerate(value.values())
    elif kind is ChainMap:
        yield from enumerate(value.maps)
    elif kind is np.ndarray and value.dtype == object and value.size <= _MOST_PARTS:
        yield from enumerate(value.flat)
    elif isinstance(value, torch.nn.Module):
        yield from _tensors(value).items()
        yield from value.named_children()
        yield from _attributes(value)
    elif not _has_state(value) and is_users(kind):
        yield from _attributes(value)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """List an object's attributes; of a module, none that torch and Lightning use themselves."""
    own = getattr(value, "__dict__", {})
    is_module = isinstance(value, torch.nn.Module)
    return [(name, each) for name, each in own.items() if not is_module or is_own(name)]


def _generators_of(loaders: Any) -> Iterator[tuple[Way, Any]]:
    """Yield the random generators of loaders and their samplers; not those of data sets."""
    leaves = tree_leaves(getattr(loaders, "iterables", loaders))
    for number, loader in enumerate(islice(leaves, _MOST_PARTS)):
        batches = getattr(loader, "batch_sampler", None)
        samplers = getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)
        for place, part in enumerate((loader, *samplers)):
            if not isinstance(part, Dataset | pl.LightningDataModule):
                own = getattr(part, "__dict__", {}).items()
                yield from (((number, place, x), v) for x, v in own if isinstance(v, GENERATORS))


def _tensors(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Its own parameters and buffers."""
    return dict((*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)))


def _place(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors, and those of other libraries
        return 0


# ---- what they hold -----------------------------------------------------------------------------


def _content(value: Any, refer: Callable[[Any], Held | None]) -> Any:
    if _is_tensor(value):
        if torch.nn.parameter.is_lazy(value):
            raise NotPlain
        return value.detach().to("cpu", copy=True)
    if isinstance(value, torch.nn.Module):
        known = {
            name: refer(tensor) or copied(tensor.detach())
            for name, tensor in _tensors(value).items()
        }
        return known, attributes_of(_attributes(value), refer)
    if _has_state(value):
        return _sendable(value.state_dict())
    if type(value) in (tuple, frozenset):
        raise NotPlain  # it cannot change
    if type(value) in _CONTAINERS:
        return content_of(value, refer)
    if isinstance(value, GENERATORS):
        return _state_in(value), attributes_of(_attributes(value), refer)
    return attributes_of(_attributes(value), refer)


def _state_in(generator: Any) -> Any:
    try:
        return state_of(generator)
    except NotImplementedError:
        raise NotPlain from None


def _sendable(state: Any) -> Any:
    try:
        pickle.dumps(state)
    except Exception:
        raise NotPlain from None
    return state


def _fill(mine: Any, content: Any, at: Callable[[Way], Any]) -> None:
    match mine:
        case torch.Tensor():
            if mine.shape == content.shape and lies_apart(mine):
                mine.copy_(content)
            else:
                mine.data = content.to(mine.device, mine.dtype)
        case np.ndarray():
            if mine.shape == content.shape and mine.flags.writeable:
                mine[...] = resolved(content, at)
        case torch.nn.Module():
            tensors, attributes = content
            _fill_module(mine, tensors)
            _set(mine, attributes, at)
        case Optimizer():
            load_in_place(mine, content)
        case list() | deque() if type(mine) in SEQUENCES:
            items = list(resolved(content, at))
            mine.clear()
            mine.extend(items)
        case dict() | set() if type(mine) in DICTS or type(mine) is set:
            items = resolved(content, at)
            mine.clear()
            mine.update(items)
        case bytearray() | array() if type(mine) in BUFFERS:
            mine[:] = content
        case ChainMap() if type(mine) is ChainMap:
            mine.maps[:] = resolved(content, at).maps
        case _ if isinstance(mine, GENERATORS):
            state, attributes = content
            _set(mine, attributes, at)
            set_state(mine, state)
        case _ if _has_state(mine):
            mine.load_state_dict(content)
        case _:
            _set(mine, content, at)


def _fill_module(mine: torch.nn.Module, tensors: Mapping[str, Any]) -> None:
    """Set what the layer has got in place of a parameter or buffer."""
    for name, theirs in tensors.items():
        if isinstance(theirs, torch.Tensor):
            if isinstance(getattr(mine, name, None), torch.nn.Parameter):
                theirs = torch.nn.Parameter(theirs)
            setattr(mine, name, theirs)


def _set(mine: Any, attributes: Mapping[str, Any], at: Callable[[Way], Any]) -> None:
    for name, theirs in attributes.items():
        try:
            vars(mine)[name] = resolved(theirs, at)
        except LookupError:
            continue  # it has an object that this process has not


def set_attributes(thing: Any, values: Mapping[str, Any], held: HeldObjects | None) -> None:
    """In the calling process: set the attributes of a module, a layer, a callback or a logger."""
    _set(thing, values, _knows_none if held is None else held.at)


def _knows_none(way: Way) -> Any:
    raise LookupError(way)


@torch.no_grad()
def load_in_place(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state into the very groups, dictionaries and tensors that the optimizer has.

    One that loads in a way of its own (around another optimizer) is left to it.
    """
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        optimizer.load_state_dict(dict(state))
        return
    groups, states = optimizer.param_groups, optimizer.state
    known = list(groups)
    optimizer.load_state_dict(dict(state))
    for mine, theirs in zip(known, optimizer.param_groups, strict=True):
        mine.clear()
        mine.update(theirs)
    for parameter in states.keys() - optimizer.state.keys():
        del states[parameter]
    for parameter, theirs in optimizer.state.items():
        mine = states.setdefault(parameter, {})
        if not isinstance(mine, dict) or not isinstance(theirs, dict):
            states[parameter] = theirs
            continue
        kept = {name: _filled(mine.get(name), value) for name, value in theirs.items()}
        mine.clear()
        mine.update(kept)
    optimizer.param_groups, optimizer.state = groups, states


def _filled(mine: Any, theirs: Any) -> Any:
    """The tensor that is there, with the values of the other; else the other."""
    if not (_is_tensor(mine) and _is_tensor(theirs)) or mine.shape != theirs.shape:
        return theirs
    return mine.copy_(theirs) if mine.dtype == theirs.dtype and lies_apart(mine) else theirs
