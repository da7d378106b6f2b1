"""What is to be trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pytorch_lightning import LightningModule

from hybridtrain.errors import UserError


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
