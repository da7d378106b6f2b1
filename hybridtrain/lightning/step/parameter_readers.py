"""Who looks at parameters between an optimizer's step and the next mini-batch.

Usually nobody: Lightning counts, logs and fetches meanwhile. Then a worker need not wait for its
release before it does all that; it *settles* when the next mini-batch begins, or before anything
that it asks of the server (a checkpoint, a meeting). Where somebody may look, it waits at the step.

That goes for data sets as well, which may hold the module that is trained.

A user's hook at the end of a mini-batch is read (:mod:`hybridtrain.util.code_reading`). So are all
methods of its class, so that none of them keeps the module for the hook to find.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import (
    DeviceStatsMonitor,
    LambdaCallback,
    ModelCheckpoint,
    ProgressBar,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch.optim.optimizer import _global_optimizer_post_hooks

from hybridtrain.lightning.hooks.loop_hooks import combined_loader
from hybridtrain.lightning.run_context import context_of
from hybridtrain.lightning.step.gradient_readers import FOREIGN
from hybridtrain.lightning.step.object_search import elements_of, may_hold
from hybridtrain.util.code_reading import STANDARD_LIBRARY, CodeReader, Roles

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

_LOG = (LightningModule.log, LightningModule.log_dict)
_HOOK = "on_train_batch_end"
_TRAINER, _MODULE, _EITHER = "trainer", "module", "either"
# What trainer and module have that leads to no parameter.
_OF_BOTH = {"current_epoch", "global_rank", "global_step", "local_rank", "logger", "loggers"}
_OF_TRAINER = {"callback_metrics", "default_root_dir", "estimated_stepping_batches"}
_OF_TRAINER |= {"is_global_zero", "is_last_batch", "log_dir", "log_every_n_steps"}
_OF_TRAINER |= {"logged_metrics", "max_epochs", "max_steps", "node_rank", "num_training_batches"}
_OF_TRAINER |= {"progress_bar_metrics", "sanity_checking", "should_stop", "state", "training"}
_OF_TRAINER |= {"world_size"}
_OF_MODULE = {"automatic_optimization", "device", "dtype", "log", "log_dict", "print", "training"}
_ALLOWED = {_TRAINER: _OF_BOTH | _OF_TRAINER, _MODULE: _OF_BOTH | _OF_MODULE, _EITHER: _OF_BOTH}
_WAYS = {(_MODULE, "trainer"): _TRAINER}
_LIBRARIES = frozenset({*STANDARD_LIBRARY, *FOREIGN, "numpy"})


def parameters_rest(trainer: Any) -> bool:
    """Whether nobody reads or writes parameters from the end of a step to the next mini-batch."""
    module = trainer.lightning_module
    if context_of(trainer).on_failure.choice == "restart":
        return False  # whoever waits for a release tells of a step that is not done
    reader = reader_for(module)
    if any(_module_looks(module, hook, reader) for hook in _MODULE_HOOKS):
        return False
    configs = trainer.lr_scheduler_configs
    if not all(_is_torchs(config.scheduler) for config in configs):
        return False
    loader = combined_loader(trainer.fit_loop)
    sources = [] if loader is None else loader.flattened
    looks = any(_looks(callback, reader) for callback in trainer.callbacks)
    return not looks and not may_hold(sources, module)


def reader_for(module: LightningModule) -> CodeReader:
    """Who reads the code of this module and of callbacks."""
    return CodeReader(_ALLOWED, _WAYS, lambda each: may_hold([each], module), _LIBRARIES, module)


def is_unwatched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nobody has hooked on to the end of its steps."""
    hooks: Any = optimizer
    return not hooks._optimizer_step_post_hooks and not _global_optimizer_post_hooks


def _module_looks(module: LightningModule, hook: str, reader: CodeReader) -> bool:
    if not is_overridden(hook, module, parent=LightningModule):
        return False
    function = getattr(type(module), hook)
    return reader.is_library(function) or not reader.is_harmless(function, {"self": _MODULE})


def _looks(callback: Callback, reader: CodeReader) -> bool:
    kind: Any = type(callback)
    if kind in _HARMLESS or kind.__module__.partition(".")[0] == "hybridtrain":
        return False
    if isinstance(callback, LambdaCallback):
        return True
    if not is_overridden(_HOOK, callback, parent=Callback):
        return False
    harmless = any(kind.on_train_batch_end is vars(each).get(_HOOK) for each in _HARMLESS)
    if reader.is_library(kind.on_train_batch_end) and not harmless:
        return True
    if reader.leads(list(_kept_by(callback))):
        return True
    own = list(reader.functions_of(kind))
    return not all(reader.is_harmless(each, _roles(each, kind, reader)) for each in own)


def _kept_by(callback: Callback) -> Iterator[object]:
    """What it holds, but for the module's ``log``, which Lightning gives every callback."""
    for each in elements_of(callback):
        if not isinstance(each, MethodType) or each.__func__ not in _LOG:
            yield each


def _roles(function: FunctionType, kind: type[Callback], reader: CodeReader) -> Roles:
    """Which parameters of a method are trainer and module, or may be."""
    names, hook = list(inspect.signature(function).parameters), function.__name__
    if hasattr(Callback, hook):
        expected = list(inspect.signature(getattr(Callback, hook)).parameters)
        known = {"trainer": _TRAINER, "pl_module": _MODULE}
        roles = {n: known[e] for n, e in zip(names, expected, strict=False) if e in known}
    else:  # one of a library's class may be called by that class, with whatever it has
        above = any(hook in vars(each) for each in kind.__mro__ if reader.is_library(each))
        roles = dict.fromkeys(names[1:], _EITHER) if above else {}
    parts = inspect.signature(function).parameters.values()
    spread = {p.name for p in parts if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return {**roles, **dict.fromkeys(spread if roles else (), _EITHER)}


def _is_torchs(scheduler: object) -> bool:
    """Those look at ``param_groups`` only, and at no parameter in them."""
    return type(scheduler).__module__.startswith("torch.")
