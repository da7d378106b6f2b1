"""The ways in which a worker of Lightning's can step, from which the exchange chooses one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from hybridtrain.errors import UserError
from hybridtrain.exchanges import LocalExchange
from hybridtrain.exchanges.compression import Codec
from hybridtrain.lightning.step.gradient_step import GradientStep
from hybridtrain.lightning.step.in_place import in_place_step
from hybridtrain.lightning.step.local_step import LocalStep
from hybridtrain.lightning.step.worker_step import StepParts, WorkerStep
from hybridtrain.memory import Store
from hybridtrain.updates.groups import calls_closure
from hybridtrain.worker.client import Client
from hybridtrain.worker.replica import Replica
from hybridtrain.worker.replica_cuda import open_replica
from hybridtrain.worker.replica_own import OwnReplica


class MakeStep(Protocol):
    """Makes the step of one of the module's optimizers."""

    def __call__(
        self, optimizer: torch.optim.Optimizer, number: int, parts: StepParts
    ) -> WorkerStep: ...


@dataclass(frozen=True)
class Stepping:
    """How a worker steps: its side of the parameters, and what makes the step of an optimizer."""

    replica: Replica
    make: MakeStep


@dataclass(frozen=True)
class StepWays:
    """See :class:`hybridtrain.exchanges.exchange.Ways`.

    Args:
        client: to the server.
        store: the shared buffers.
        parameters: the module's, in the order of the layout's slots.
        optimizers: the user's.
        unseen: nobody looks at gradients between backward and step.
        written: the module writes to its parameters, without an optimizer.
        whole_rounds: nobody computes while an update is applied.
        steps: the worker's steps, when training has begun.
    """

    client: Client
    store: Store
    parameters: Sequence[torch.nn.Parameter]
    optimizers: Sequence[torch.optim.Optimizer]
    unseen: bool
    written: bool
    whole_rounds: bool
    steps: Callable[[], Sequence[WorkerStep]]

    def hand_over_gradients(self, codec: Codec | None) -> Stepping:
        """Raises ``UserError`` if an optimizer compares losses, whose gradients are rounded."""
        if codec is not None:
            self._refuse_closures(codec)
        client = self.client
        place = self.parameters, self.store, client.worker
        replica = open_replica(*place, self.unseen, codec)
        client.meanwhile = replica.meanwhile
        client.meet(self.store, lambda: [(s.optimizer, s.numbers) for s in self.steps()])
        return Stepping(replica, GradientStep)

    def write_to_masters(self, private_state: bool) -> Stepping:
        """Workers step the masters themselves."""
        replica = open_replica(self.parameters, self.store, self.client.worker, False)
        return Stepping(replica, partial(in_place_step, self.written, private_state))

    def step_own_parameters(self, exchange: LocalExchange) -> Stepping:
        """Workers step parameters of their own."""
        keeps = exchange.keeps or self.whole_rounds
        replica = OwnReplica(self.parameters, self.store, self.client.worker, keeps)
        return Stepping(replica, partial(LocalStep, replica=replica, exchange=exchange))

    def _refuse_closures(self, codec: Codec) -> None:
        for optimizer in self.optimizers:
            if calls_closure(optimizer):
                raise UserError(
                    f"exchange.compress={codec} was given with {type(optimizer).__name__}, which "
                    "evaluates its closure several times in a step and compares the losses, so "
                    "its gradients must not be rounded; leave it out, or use SGD or Adam"
                )
