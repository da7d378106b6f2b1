"""The contract of a worker's step, and what all ways to step share.

A worker's step replaces the ``step`` of one of the user's optimizers, which stays where schedulers,
monitors and hooks expect it. What it does is the exchange's choice: hand the gradient over
(:mod:`hybridtrain.engine.step.gradient_step`), write to the shared masters
(:mod:`hybridtrain.engine.step.in_place`), or step parameters of the worker's own
(:mod:`hybridtrain.engine.step.local_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from hybridtrain.engine.exchanges import Requirements
from hybridtrain.engine.profiling import Phase
from hybridtrain.engine.protocol.messages import Clip
from hybridtrain.engine.step.accumulation import Accumulation
from hybridtrain.engine.step.guard import Guard
from hybridtrain.engine.step.hyper_parameters import HyperParameters
from hybridtrain.engine.step.shared_buffers import SharedBuffers
from hybridtrain.engine.step.trained_parameters import parameters_of, slot_numbers
from hybridtrain.engine.updates import SavedOptimizer
from hybridtrain.engine.updates.groups import Groups, Members, members_of, takes_sparse
from hybridtrain.engine.updates.named import NamedUpdate
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worker.replica import Replica
from hybridtrain.errors import UserError

Closure = Callable[[], Any]
MASTERS = "masters"  # in an optimizer's saved state: that of the masters' own optimizer


def is_empty(closure: Closure, nothing: Closure | None) -> bool:
    """Whether the closure is the empty one that Lightning passes if the user passes none."""
    while isinstance(closure, partial):  # how precision plugins wrap it: the last argument
        closure = closure.args[-1]
    return closure is nothing


def run(closure: Closure) -> Any:
    """With gradients, wherever it is called from."""
    with torch.enable_grad():
        return closure()


def is_unwatched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has no hook behind its steps."""
    hooks: Any = optimizer
    return not hooks._optimizer_step_post_hooks and not _global_optimizer_post_hooks


def as_float(loss: Any) -> float | None:
    """A loss as a number, if it is one."""
    if isinstance(loss, torch.Tensor):
        return float(loss.detach()) if loss.numel() == 1 else None
    return float(loss) if isinstance(loss, int | float) else None


@dataclass(frozen=True)
class StepParts:
    """Collaborators that the steps of all optimizers of one worker share.

    Args:
        client: to the server.
        replica: brings gradients out and parameters in.
        guard: judges gradients before they are handed over.
        update: how the masters move.
        requirements: of policy and exchange.
        number_of: slot numbers by ``id(parameter)``, of all that the module has.
        gathered: what the gradients since the last step count for.
        buffers: the module's, if workers share them.
        averaged: gradients are the mean of all workers' before the optimizer steps.
        only: the module has one optimizer.
        complete: makes the gradients of these slots so, before they are handed over.
        manual: the user's module steps its optimizers itself.
        released: is called with the version of each release.
        goes_ahead: nobody looks at parameters before the next mini-batch begins.
        endless: no step may be too many (``max_steps``).
        nothing: the closure that a caller passes if the user passes none.
    """

    client: Client
    replica: Replica
    guard: Guard
    update: NamedUpdate
    requirements: Requirements
    number_of: Mapping[int, int]
    gathered: Accumulation
    buffers: SharedBuffers | None
    averaged: bool
    only: bool
    complete: Callable[[Iterable[int]], object] = lambda numbers: None
    manual: bool = True
    released: Callable[[int], object] = lambda version: None
    goes_ahead: bool = False
    endless: bool = True
    nothing: Closure | None = None


class WorkerStep:
    """One optimizer's step in one worker.

    Args:
        optimizer: the user's; its ``param_groups`` are read at every step.
        number: which of the module's optimizers.
        parts: shared by all steps of this worker.
    """

    # Schedulers look for this mark and warn of a step that was replaced after they were made.
    _wrapped_by_lr_sched = True
    trying = False  # the optimizer evaluates points that it may reject, where infinity is an answer
    answered: int | None = None  # the version of the answer that it took over last; None: at once

    def __init__(self, optimizer: torch.optim.Optimizer, number: int, parts: StepParts) -> None:
        self.optimizer, self.number, self._parts = optimizer, number, parts
        self._client, self._replica, self._guard = parts.client, parts.replica, parts.guard
        self._gathered = parts.gathered
        self.parameters = parameters_of(optimizer)  # that the server knows of, group by group
        self._sizes = [len(group["params"]) for group in optimizer.param_groups]
        self.numbers = slot_numbers(optimizer, parts.number_of)
        self.hyper_parameters = HyperParameters(optimizer)
        self._joins = parts.client.group.joins  # and has pushed nothing so far
        self.count = 0  # steps so far
        self.version = 0  # of the last release
        self._clip: Clip | None = None
        self._loss: torch.Tensor | None = None  # of the last backward, if the policy watches it

    def renumber(self, number: int, only: bool) -> None:
        """It is this one of the module's optimizers now; ``only``: it has no other."""
        self.number = number

    # ---- the step -------------------------------------------------------------------------------

    def clip_next(self, clip: Clip) -> None:
        """The server clips the merged gradient of the next step."""
        self._clip = clip

    def watch(self, loss: torch.Tensor) -> None:
        """The policy wants the loss of the next step."""
        self._loss = loss

    def __call__(self, closure: Closure | None = None) -> Any:
        """In place of ``optimizer.step``, with the step hooks of this and of all optimizers."""
        optimizer: Any = self.optimizer
        own = optimizer._optimizer_step_pre_hooks
        for hook in [*_global_optimizer_pre_hooks.values(), *own.values()]:
            hook(optimizer, (closure,), {})
        loss = self._step(closure)
        own = optimizer._optimizer_step_post_hooks
        for hook in [*own.values(), *_global_optimizer_post_hooks.values()]:
            hook(optimizer, (closure,), {})
        return loss

    def _step(self, closure: Closure | None) -> Any:
        """Run the closure, if there is one, and step; returns the loss."""
        raise NotImplementedError

    def skip(self) -> None:
        """The others make a step for which this worker has no data; nobody waits for it."""
        raise NotImplementedError

    def flush(self, ends: bool) -> None:
        """The workers meet: hand over what is left; ``ends``: the epoch or training ends."""

    def _end_step(self) -> None:
        """The step is counted, whatever becomes of it."""
        self._gathered.step()
        self._clip = None
        self.count += 1
        vars(self.optimizer)["_opt_called"] = True  # or schedulers warn about the order

    def catch_up(self, version: int) -> None:
        """Other workers have made updates that this one had no part in."""
        self.version = version
        self._gathered.step()

    # ---- hyper-parameters and state -------------------------------------------------------------

    def _told_groups(self, whole: bool) -> Groups | None:
        """Changed hyper-parameters that the update of the masters follows.

        A worker that repeats a lost one's step tells those that a schedule moves, too: the lost one
        may have moved them behind its last push.
        """
        scheduled, self._joins = self._joins, False
        changed = self.hyper_parameters.changed(whole, scheduled)
        return self._parts.update.told(self.optimizer, changed)

    def state_dict(self, saved: SavedOptimizer) -> dict[str, Any]:
        """The ``optimizer.state_dict()`` of a single process; ``saved``: the server's part."""
        raise NotImplementedError

    def _of_masters(self, saved: SavedOptimizer) -> dict[str, Any]:
        """The state of the masters' own optimizer, as a checkpoint has it."""
        numbered = enumerate(self.numbers)
        states = {n: saved.parameters[x] for n, x in numbered if x in saved.parameters}
        return {MASTERS: {"update": self._parts.update.name, "state": states}}

    def _check_members(self) -> None:
        """The masters' own optimizer, if they have one, has the parameters that it began with.

        Raises:
            UserError: if the user's optimizer has got others.
        """
        if self._changed_members() is not None:
            raise UserError(
                f"{type(self.optimizer).__name__} was given other parameters in mid-training, but "
                f"update={self._parts.update.name} has an optimizer of its own in host memory, "
                "over those that training began with; use update=user with exchange=gradient, or "
                "give the optimizer all parameters from the start (frozen ones have no gradient)"
            )

    def _changed_members(self) -> Members | None:
        """The slot numbers of each group, if anything about them has changed."""
        if not self.admit():
            return None
        self.numbers = slot_numbers(self.optimizer, self._parts.number_of)
        self.parameters = parameters_of(self.optimizer)
        self._sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        return members_of(self.optimizer, self.numbers)

    def admit(self) -> bool:
        """Let parameters that the optimizer has got lately follow the masters; returns if any."""
        now, groups = parameters_of(self.optimizer), self.optimizer.param_groups
        same = [len(group["params"]) for group in groups] == self._sizes
        if same and all(map(is_, now, self.parameters)):
            return False
        numbers = slot_numbers(self.optimizer, self._parts.number_of)
        self._replica.admit(numbers, takes_sparse(self.optimizer))
        return True

    def own_state(self) -> dict[str, Any]:
        """State that only this worker has, for a checkpoint; may be empty."""
        return {}

    def load_own_state(self, saved: Mapping[str, Any]) -> None:
        """Resume from what :meth:`own_state` has returned."""

    @property
    def has_unsent(self) -> bool:
        """Whether the masters lack steps that this worker has made."""
        return False

    def timed(self) -> list[tuple[Phase, object, str, str]]:
        """Methods that a profile times: phase, object, its method, and the name to show."""
        return []

    def close(self) -> None:
        """Training is over."""
