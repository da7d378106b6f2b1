"""What is to be trained, and who looks at its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.utilities.model_helpers import is_overridden

from hybridtrain.errors import UserError

_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")
_MODULE_GRADIENT_HOOKS = (*_GRADIENT_HOOKS, "configure_gradient_clipping", "optimizer_step")


def ordered_parameters(
    module: LightningModule, optimizers: Sequence[torch.optim.Optimizer]
) -> list[tuple[str, torch.nn.Parameter]]:
    """The module's parameters, those of the optimizers first and group by group.

    Raises:
        UserError: if there is nothing to train, or an optimizer has parameters of its own.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    if not any(p.requires_grad for p in module.parameters()):
        raise UserError(
            f"{type(module).__name__} has no parameters that need gradients; there is nothing to "
            "train: check requires_grad, or use trainer.test"
        )
    found: dict[int, torch.nn.Parameter] = {}
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) not in names:
                raise UserError(
                    f"{type(optimizer).__name__} was given a tensor of shape "
                    f"{tuple(parameter.shape)} that is not a parameter of {type(module).__name__}; "
                    "register it on the module (torch.nn.Parameter), so that it can be shared"
                )
            found[id(parameter)] = parameter
    found |= {id(p): p for p in module.parameters()}
    return [(names[key], parameter) for key, parameter in found.items()]


def gradients_are_final(trainer: Any) -> bool:
    """Whether nobody reads or changes ``.grad`` between backward and the optimizer's step."""
    module = trainer.lightning_module
    if not module.automatic_optimization or getattr(trainer.precision_plugin, "scaler", None):
        return False
    if any(is_overridden(hook, module, parent=LightningModule) for hook in _MODULE_GRADIENT_HOOKS):
        return False
    return not any(
        is_overridden(hook, callback, parent=Callback)
        for callback in trainer.callbacks
        for hook in _GRADIENT_HOOKS
    )
