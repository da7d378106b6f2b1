"""The worker's optimizer as a remote control.

The user's optimizer object stays where schedulers, monitors and hooks expect it, but its ``step``
sends the gradient to the server, where the masters and the optimizer's state live.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hybridtrain.client import Client
from hybridtrain.exchange import Exchange
from hybridtrain.lightning.guard import Guard
from hybridtrain.messages import Clip

Groups = tuple[dict[str, Any], ...]


class RemoteStep:
    """Replaces ``optimizer.step``.

    Args:
        number: which of the module's optimizers.
        optimizer: the user's; its ``param_groups`` are read at every step.
        numbers: the slot number of each of its parameters.
        exchange: brings gradients out and parameters in.
        client: to the server.
        guard: whether what is brought out may count.
    """

    # Schedulers look for this mark and warn of a step that was replaced after they were made.
    _wrapped_by_lr_sched = True

    def __init__(
        self,
        number: int,
        optimizer: torch.optim.Optimizer,
        numbers: tuple[int, ...],
        exchange: Exchange,
        client: Client,
        guard: Guard,
    ) -> None:
        self._number, self._optimizer, self._numbers = number, optimizer, numbers
        self._exchange, self._client, self._guard = exchange, client, guard
        self._sent: Groups | None = None
        self.weight = 0.0  # samples behind the gradients gathered so far
        self.clip: Clip | None = None
        self.version = 0
        self.averaged = False  # the gradients are the mean of all already
        self.pushed = False  # since the mini-batch began
        self.count = 0  # pushes so far

    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, push, wait for the release; with the optimizer's own step hooks."""
        optimizer: Any = self._optimizer
        for hook in list(optimizer._optimizer_step_pre_hooks.values()):
            hook(optimizer, (closure,), {})
        loss = self._compute_and_push(closure)
        for hook in list(optimizer._optimizer_step_post_hooks.values()):
            hook(optimizer, (closure,), {})
        return loss

    def _compute_and_push(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.push(self.weight)
        return loss

    def push(self, weight: float) -> None:
        """Offer the gradients with this weight; 0 abstains, so that nobody waits in vain."""
        absent = self._exchange.collect(self._numbers) if weight > 0 else ()
        if weight > 0 and not self._guard.accepts(self._numbers, absent):
            weight, absent = 0.0, ()
        self.version = self._client.push(
            self._number,
            weight,
            absent,
            self._changed_groups(),
            self.clip,
            self.averaged,
            writes=self._exchange.writes(),
            fault=self._guard.pop_fault(),
            veto=self._guard.veto,
        )
        self._exchange.refresh()
        self.pushed, self.clip = True, None
        self.count += 1
        vars(self._optimizer)["_opt_called"] = True  # or schedulers warn about the order

    def _changed_groups(self) -> Groups | None:
        groups = tuple(
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        )
        if groups == self._sent:
            return None
        self._sent = groups
        return groups
