"""The update begins before backward ends.

Only where the user has asked for it (``overlap_update``), as it cannot be taken back: if a later
part of the same backward fails, the masters are those of no step, and can be saved by nobody. A
worker announces a gradient once it lies in its row, finite, and nobody will change it any more.
That rules out, and then the whole push is stepped as ever: mini-batches that only add up, code that
looks at gradients, gradient scalers and clipping, hooks of the optimizer's step, optimizers that
drive the evaluation, steps in which parameters, groups or state were changed by hand.
"""

from __future__ import annotations

from operator import is_
from typing import Any

from torch.optim.optimizer import _global_optimizer_pre_hooks

from hybridtrain.lightning.step.gradient_guard import GradientGuard
from hybridtrain.lightning.step.remote_optimizer import RemoteOptimizer
from hybridtrain.lightning.step.trained_parameters import parameters_of
from hybridtrain.protocol.early_gradients import GradientsReady
from hybridtrain.updates.optimizer_traits import calls_closure
from hybridtrain.worker.client import Client
from hybridtrain.worker.finite import FiniteCheck
from hybridtrain.worker.replica_cuda import CudaReplica


class Overlap:
    """What a worker does while its backward runs.

    Args:
        exchange: of a worker that computes on copies of the parameters.
        client: to the server.
        check: looks at the worker's row.
        guard: knows whether this step is to be left out.
        module: the user's.
    """

    def __init__(
        self,
        exchange: CudaReplica,
        client: Client,
        check: FiniteCheck,
        guard: GradientGuard,
        module: Any,
    ) -> None:
        self._exchange, self._client, self._check = exchange, client, check
        self._guard, self._module = guard, module
        self._step: RemoteOptimizer | None = None
        self._told = False

    def begin_backward(self, steps: list[RemoteOptimizer], final: bool) -> None:
        """``final``: what it makes is all, and nobody will look at it before it is pushed."""
        may = final and len(steps) == 1 and self._can_promise(steps[0])
        self._step, self._told = (steps[0] if may else None), False
        self._exchange.announce = self._announce if may else None

    def _can_promise(self, step: RemoteOptimizer) -> bool:
        """Whether no more will be pushed than a whole gradient of the same parameters as before."""
        trainer = self._module.trainer
        (optimizer,) = trainer.optimizers
        hooked = bool(optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks)
        moved = not all(map(is_, parameters_of(optimizer), step.parameters))
        state = optimizer.state is not step.state or step.state.changed
        undone = step.weight <= 0 or step.trying or step.averaged or self._guard.veto
        special = moved or state or undone or calls_closure(optimizer)
        return not (
            special or hooked or trainer.gradient_clip_val or self._exchange.written_openly()
        )

    def _announce(self, numbers: tuple[int, ...]) -> None:
        step = self._step
        if step is None:
            return
        ours = set(step.numbers)
        numbers = tuple(n for n in numbers if n in ours)
        known = self._exchange.known_finite
        if self._check.offender(numbers, (), known=known) is not None:
            self._step = None  # the push will say so
        elif numbers:
            groups = None if self._told else step.hyper_parameters.changed(whole=False)
            self._exchange.incoming.settle()  # the masters will move now
            self._client.note(GradientsReady(step.number, numbers, step.weight, groups))
            self._told = True
