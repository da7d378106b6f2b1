"""Who looks at parameters between an optimizer's step and the next mini-batch.

Usually nobody: Lightning counts, logs and fetches meanwhile. Then a worker need not wait for its
release before it does all that; it *settles* when the next mini-batch begins, or before anything
that it asks of the server (a checkpoint, a meeting). Where somebody may look, it waits at the step.

That goes for data sets as well, which may hold the module that is trained.
"""

from __future__ import annotations

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
from hybridtrain.lightning.step.object_search import may_hold

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


def parameters_rest(trainer: Any) -> bool:
    """Whether nobody reads or writes parameters from the end of a step to the next mini-batch."""
    module = trainer.lightning_module
    if context_of(trainer).on_failure.choice == "restart":
        return False  # whoever waits for a release tells of a step that is not done
    if any(is_overridden(hook, module, parent=LightningModule) for hook in _MODULE_HOOKS):
        return False
    configs = trainer.lr_scheduler_configs
    if not all(_is_torchs(config.scheduler) for config in configs):
        return False
    loader = combined_loader(trainer.fit_loop)
    sources = [] if loader is None else loader.flattened
    return not any(map(_looks, trainer.callbacks)) and not may_hold(sources, module.modules())


def is_unwatched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nobody has hooked on to the end of its steps."""
    hooks: Any = optimizer
    return not hooks._optimizer_step_post_hooks and not _global_optimizer_post_hooks


def _looks(callback: Callback) -> bool:
    kind = type(callback)
    if kind in _HARMLESS or kind.__module__.partition(".")[0] == "hybridtrain":
        return False
    if isinstance(callback, LambdaCallback):
        return True
    return is_overridden("on_train_batch_end", callback, parent=Callback)


def _is_torchs(scheduler: object) -> bool:
    """Those look at ``param_groups`` only, and at no parameter in them."""
    return type(scheduler).__module__.startswith("torch.")
