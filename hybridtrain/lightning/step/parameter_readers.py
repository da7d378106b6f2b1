"""Whether anything may look at parameters between an optimizer's step and the next mini-batch.

Usually nothing does: Lightning counts, logs and fetches meanwhile. Then a worker need not await its
release before it does all that; it *settles* when the next mini-batch begins, or before anything
that it asks of the server (a checkpoint, a meeting). With a hook of the user's, a schedule of the
user's, or data that hold the module, it awaits the release at the step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import (
    DeviceStatsMonitor,
    ModelCheckpoint,
    ProgressBar,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from pytorch_lightning.utilities.model_helpers import is_overridden

from hybridtrain.lightning.hooks.loop_hooks import combined_loader
from hybridtrain.lightning.step.gradient_readers import filled_cells

_MODULE_HOOKS = (
    "on_train_batch_end",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "lr_scheduler_step",
)
# Their ``on_train_batch_end`` looks at metrics, clocks and devices; a checkpoint settles first.
_HARMLESS = {DeviceStatsMonitor, ModelCheckpoint, ProgressBar, RichProgressBar, ThroughputMonitor}
_HARMLESS |= {Timer, TQDMProgressBar}
_MOST = 100_000  # objects of data sets to look at, in about 0.1 s
_OPAQUE = (type, ModuleType, CodeType, BuiltinFunctionType)
_FRAMEWORKS = {"hybridtrain", "pytorch_lightning", "lightning", "lightning_fabric"}


def parameters_rest(trainer: Any, tells: bool) -> bool:
    """Whether nothing reads or writes parameters from the end of a step to the next mini-batch.

    ``tells``: workers tell of the state of training when they are asked, for others to restart.
    """
    module = trainer.lightning_module
    if tells:
        return False  # a worker that awaits its release tells of a step that is not done
    if any(is_overridden(hook, module, parent=LightningModule) for hook in _MODULE_HOOKS):
        return False
    if any(map(_looks, trainer.callbacks)):
        return False
    # Torch's own schedulers look at ``param_groups`` only, and at no parameter in them.
    kinds = (type(config.scheduler) for config in trainer.lr_scheduler_configs)
    if not all(kind.__module__.startswith("torch.") for kind in kinds):
        return False
    loader = combined_loader(trainer.fit_loop)
    return loader is None or not may_hold(loader.flattened, module)


def _looks(callback: Callback) -> bool:
    kind = type(callback)
    if kind in _HARMLESS or kind.__module__.partition(".")[0] == "hybridtrain":
        return False
    return is_overridden("on_train_batch_end", callback, parent=Callback)


def may_hold(sources: Iterable[object], module: torch.nn.Module) -> bool:
    """Whether one of these objects leads to a part of the module: a module, a parameter or buffer,
    or a tensor in the same memory. Behind so many objects that it takes long to tell, one may.
    """
    tensors = [*module.parameters(), *module.buffers()]
    sought = set(map(id, (*module.modules(), *tensors)))
    memory = {place for tensor in tensors if (place := _place(tensor))}
    waiting: list[object] = list(sources)
    seen = {id(each): each for each in waiting}  # kept, or another object could get one's number
    while waiting:
        each = waiting.pop()
        if id(each) in sought or (isinstance(each, torch.Tensor) and _place(each) in memory):
            return True
        for part in _parts(each):
            if id(part) not in seen and gc.is_tracked(part) and not _is_opaque(part):
                seen[id(part)] = part
                waiting.append(part)
        if len(seen) > _MOST:
            return True
    return False


def _is_opaque(part: object) -> bool:
    """Skip classes, modules and objects of Lightning or this package, which lead to the trainer."""
    made_in = part.__module__ if isinstance(part, FunctionType) else type(part).__module__
    return isinstance(part, _OPAQUE) or (made_in or "").partition(".")[0] in _FRAMEWORKS


def _parts(each: object) -> Iterator[object]:
    """Objects it refers to; a function's: closure, defaults, attributes, the globals it names."""
    if not isinstance(each, FunctionType):
        yield from gc.get_referents(each)
        return
    yield from (*filled_cells(each), *(each.__defaults__ or ()), each.__kwdefaults__, vars(each))
    yield from (each.__globals__.get(name) for name in each.__code__.co_names)


def _place(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors, and those of other libraries
        return 0
