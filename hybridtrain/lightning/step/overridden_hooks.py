"""Decide from the hooks that user code overrides what a worker has to do around its step.

Under all-reduce ``.grad`` holds the mean of all workers from the end of backward on. Here that mean
costs a second exchange per step. So gradients are averaged before the step only where the module or
a callback overrides one of the hooks that are there to look at them; user code elsewhere sees this
worker's own gradient. No code is read: an overridden hook is all that counts.
"""

from __future__ import annotations

from typing import Any

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

from hybridtrain.lightning.hooks.trainer_hooks import scaler_of

_CALLBACK_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_MODULE_HOOKS = (
    *_CALLBACK_HOOKS,
    "backward",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
)
# Packages whose own callbacks neither read nor write parameters in the hooks of `is_hooked`.
_FRAMEWORKS = {"hybridtrain", "pytorch_lightning", "lightning", "lightning_fabric", "torchmetrics"}
# Their ``on_train_batch_end`` looks at metrics, clocks and devices; a checkpoint settles first.
_HARMLESS = {DeviceStatsMonitor, ModelCheckpoint, ProgressBar, RichProgressBar, ThroughputMonitor}
_HARMLESS |= {Timer, TQDMProgressBar}


def gradients_are_final(trainer: Any) -> bool:
    """Whether no hook between backward and ``zero_grad`` may read or change ``.grad``."""
    module, callbacks = trainer.lightning_module, trainer.callbacks
    if not module.automatic_optimization or scaler_of(trainer) is not None:
        return False
    if any(is_overridden(hook, module, parent=LightningModule) for hook in _MODULE_HOOKS):
        return False
    return not any(
        is_overridden(hook, each, parent=Callback) for each in callbacks for hook in _CALLBACK_HOOKS
    )


def is_hooked(trainer: Any, *hooks: str) -> bool:
    """Whether the user's module, or a callback of the user's, has one of these hooks."""
    module, callbacks = trainer.lightning_module, trainer.callbacks
    if any(is_overridden(hook, module, parent=LightningModule) for hook in hooks):
        return True
    own = [x for x in callbacks if not _is_frameworks(x) or isinstance(x, LambdaCallback)]
    known = [hook for hook in hooks if hasattr(Callback, hook)]
    return any(is_overridden(hook, each, parent=Callback) for hook in known for each in own)


def parameters_rest(trainer: Any, tells: bool) -> bool:
    """Whether no hook reads or writes parameters from the end of a step to the next fetch.

    Then a worker need not await its release before Lightning has counted and logged the step.

    Args:
        trainer: of this worker.
        tells: workers tell of the state of training when they are asked, for others to restart.
    """
    module = trainer.lightning_module
    if tells:
        return False  # a worker that awaits its release tells of a step that is not done
    behind = ("on_train_batch_end", "lr_scheduler_step")
    if any(is_overridden(hook, module, parent=LightningModule) for hook in behind):
        return False
    if any(map(_looks, trainer.callbacks)):
        return False
    # Torch's own schedulers look at ``param_groups`` only, and at no parameter in them.
    kinds = (type(config.scheduler) for config in trainer.lr_scheduler_configs)
    return all(kind.__module__.startswith("torch.") for kind in kinds)


def _looks(callback: Callback) -> bool:
    kind = type(callback)
    if kind in _HARMLESS or kind.__module__.partition(".")[0] == "hybridtrain":
        return False
    return is_overridden("on_train_batch_end", callback, parent=Callback)


def _is_frameworks(callback: Callback) -> bool:
    return type(callback).__module__.partition(".")[0] in _FRAMEWORKS
