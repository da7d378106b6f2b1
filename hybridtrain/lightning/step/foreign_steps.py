"""Refuse steps that each worker would make alone.

An optimizer that Lightning does not know, stepped in ``training_step`` or in a hook of backward
(``register_post_accumulate_grad_hook``), moves one worker's view of the parameters by its own
gradient. Where all workers have one set of parameters, only worker 0's moves would be kept; where
they share parameters in place or train their own, that holds for those that no optimizer of
Lightning's has. One worker alone keeps all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hybridtrain.engine.exchanges import Requirements
from hybridtrain.engine.step.trained_parameters import parameters_of
from hybridtrain.errors import UserError
from hybridtrain.lightning.hooks.points import Point, around

_LOOKS = 8  # backward passes in which values are compared


class _UserCode:
    """Entered while user code of a mini-batch runs, and again within it."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


class ForeignSteps:
    """Watches those of one worker's parameters to which it alone could write.

    Args:
        module: with a trainer.
        named: its parameters, before this package has put hooks on them.
        optimizers: that Lightning steps.
        requirements: say where parameters lie.
        n_workers: W; one alone is not watched.

    Within ``user_code`` such a step raises ``UserError``.
    """

    def __init__(
        self,
        module: LightningModule,
        named: Iterable[tuple[str, torch.nn.Parameter]],
        optimizers: Iterable[torch.optim.Optimizer],
        requirements: Requirements,
        n_workers: int,
    ) -> None:
        self._name, self._trainer = type(module).__name__, module.trainer
        parameters = [parameter for _, parameter in named]
        if requirements.parameters not in ("masters", "copy"):  # all share, or exchange, the others
            stepped = {id(p) for each in optimizers for p in parameters_of(each)}
            parameters = [p for p in parameters if id(p) not in stepped]
        self._parameters = [] if n_workers == 1 else parameters
        self._known = set(map(id, self._parameters))
        # ``p.data.add_()`` leaves no trace in a version; hooks are where it is done.
        self._hooked = [p for p in self._parameters if _is_hooked(p)]
        self._looks = _LOOKS if self._hooked else 0
        self.user_code, self._hook = _UserCode(), None
        if self._parameters:
            self._hook = register_optimizer_step_pre_hook(self._see)
            around(Point.BACKWARD, module.trainer.precision_plugin, self.backward)

    def close(self) -> None:
        """Training is over."""
        if self._hook is not None:
            self._hook.remove()

    def _see(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.user_code.depth:
            return
        if any(map(partial(_has, optimizer), self._trainer.optimizers)):
            return
        if any(id(p) in self._known for p in parameters_of(optimizer)):
            raise self._refusal(f"steps {type(optimizer).__name__}")

    def backward(self, proceed: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Lightning's, without the hooks behind it, in which all workers write alike.

        Raises ``UserError`` also if a hook of autograd writes to a parameter without an optimizer.
        """
        versions = [p._version for p in self._parameters]
        values = [p.detach().clone() for p in self._hooked] if self._looks else []
        self._looks -= bool(values)
        with self.user_code:
            proceed(*args, **kwargs)
        written = [p._version for p in self._parameters] != versions
        pairs = zip(values, self._hooked, strict=True) if values else ()
        if written or any(_differs(*pair) for pair in pairs):
            raise self._refusal("writes to its parameters")

    def _refusal(self, does: str) -> UserError:
        return UserError(
            f"{self._name} {does} within training_step or backward, outside of Lightning: with "
            "several workers only worker 0's steps would be kept; return the optimizer from "
            "configure_optimizers (with automatic_optimization=False, self.optimizers() steps it "
            "by hand), or use one worker"
        )


def _has(inner: torch.optim.Optimizer, optimizer: Any) -> bool:
    """Whether it is this optimizer, or the one in it, which its own methods step."""
    return inner is optimizer or any(inner is each for each in vars(optimizer).values())


def _is_hooked(parameter: torch.nn.Parameter) -> bool:
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def _differs(before: torch.Tensor, parameter: torch.nn.Parameter) -> bool:
    return not torch.allclose(before, parameter.detach(), rtol=0, atol=0, equal_nan=True)
