"""Adam and SGD with torch's fused engines.

``torch._fused_adam_`` and the like implement ``fused=True``. They are private, but all supported
versions of torch have them.
"""

from __future__ import annotations

import torch

from hybridtrain.updates.kernels.kernel import Figures, Group, Kernel, StepChunk, Tensors


class FusedAdam(Kernel):
    """Adam and AdamW; the bits of ``fused=True``."""

    def names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq") + ("max_exp_avg_sq",) * bool(group["amsgrad"])

    def prepare(self, group: Group, figures: Figures, first: bool) -> StepChunk:
        decoupled = group.get("decoupled_weight_decay", False)
        engine = torch._fused_adamw_ if decoupled else torch._fused_adam_
        beta1, beta2 = map(float, group["betas"])
        lr, decay, eps = float(group["lr"]), float(group["weight_decay"]), float(group["eps"])
        amsgrad, maximize = bool(group["amsgrad"]), bool(group["maximize"])
        figures["step"] += 1
        steps = [figures["step"]]

        def step(p: torch.Tensor, g: torch.Tensor, state: Tensors, scratch: Tensors) -> None:
            engine(
                [p],
                [g],
                [state[0]],
                [state[1]],
                [state[2]] if amsgrad else [],
                steps,
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=decay,
                eps=eps,
                amsgrad=amsgrad,
                maximize=maximize,
            )

        return step


class FusedSgd(Kernel):
    """SGD, with or without momentum; its bits do not depend on ``fused``."""

    figures = ()

    def names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) * bool(group["momentum"])

    def keeps(self, group: Group) -> bool:
        return bool(group["momentum"])

    def prepare(self, group: Group, figures: Figures, first: bool) -> StepChunk:
        engine, lr, momentum = torch._fused_sgd_, float(group["lr"]), float(group["momentum"])
        decay, dampening = float(group["weight_decay"]), float(group["dampening"])
        nesterov, maximize = bool(group["nesterov"]), bool(group["maximize"])

        def step(p: torch.Tensor, g: torch.Tensor, state: Tensors, scratch: Tensors) -> None:
            engine(
                [p],
                [g],
                [state[0]] if momentum else [],
                lr=lr,
                momentum=momentum,
                dampening=dampening,
                weight_decay=decay,
                nesterov=nesterov,
                maximize=maximize,
                is_first_step=first,
            )

        return step
