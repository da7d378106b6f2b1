"""What a worker of :mod:`tests.support.mortals` does: one epoch, with a client of its own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from hybridtrain.engine.exchanges import Requirements
from hybridtrain.engine.memory import Store
from hybridtrain.engine.protocol.messages import (
    Draw,
    DrawnBatch,
    GradientPush,
    Install,
    LoaderPass,
    Shared,
    StepRequest,
)
from hybridtrain.engine.step.in_place import InPlaceOptimizer
from hybridtrain.engine.updates.serialize import dump
from hybridtrain.engine.worker.client import Client

if TYPE_CHECKING:
    from tests.support.mortals import Model, Mortal


class Line:
    """A worker's line to the server."""

    def __init__(self, model: Model, mortal: Mortal) -> None:
        self._model, self._mortal = model, mortal

    def send(self, message: Any) -> None:
        self._mortal.outbox.append(message)

    def ready(self) -> bool:
        return bool(self._mortal.inbox)

    def receive(self) -> tuple[Any, int | None]:
        while not self._mortal.inbox:
            self._model.ask("message")
        reply, store = self._mortal.inbox.popleft(), self._model.server.store
        if not isinstance(reply, Shared):
            return reply, None
        assert store is not None
        return reply, os.dup(store.descriptor(reply.lent))

    def ring(self) -> None:
        """For all others."""
        for other in self._model.mortals:
            other.rung |= other is not self._mortal

    def wait(self, for_s: float) -> None:
        """Until somebody has rung, or the server has said something, or for so long."""
        if not self._mortal.rung and not self._mortal.inbox:
            self._model.ask("bell")


class Life:
    """One epoch, in which each sample is one mini-batch."""

    def __init__(self, model: Model, mortal: Mortal, joins: bool, version: int) -> None:
        self.model, self.plan = model, model.plan
        needs: Requirements = model.server.requirements
        line, bells = Line(model, mortal), None if needs.in_place else Line(model, mortal)
        self.client = client = Client(mortal.number, model.plan.workers, line, bells=bells)
        if joins:
            client.group.rejoin()
        self.store: Store = client.shared_store(
            model.layout, needs, lambda: [(self.optimizer, (0,))]
        )
        self.own = torch.nn.Parameter(self.store.parameter(mortal.number, model.layout.slots[0]))
        self.optimizer: Any = self._optimizer(needs)
        payload = (dump(self.optimizer, {id(self.own): 0}),) if mortal.number == 0 else ()
        client.install(Install(() if joins else payload, version))
        self.steps = InPlaceOptimizer(self.optimizer, client) if needs.in_place else None
        if self.steps is not None and needs.steps_unasked:
            self.steps.step_unasked()
        self.lock_step = needs.whole_rounds

    def _optimizer(self, needs: Requirements) -> torch.optim.Optimizer:
        """Each moves an element by 1 for a gradient, whatever that is, and not without one."""
        if needs.in_place:
            return torch.optim.SGD([self.own], lr=1.0)
        return torch.optim.Adam([self.own], lr=1.0, betas=(0.0, 0.0), eps=1e-8)

    def live(self) -> None:
        """The epoch."""
        if self.lock_step:
            self._in_lock_step()
        else:
            self._freely()

    def _in_lock_step(self) -> None:
        n = self.plan.workers
        while self.client.steps.version < self.plan.steps:
            self._step(self.client.steps.version * n + self.client.worker)
            self.client.pushes.settle()
        self.model.ask("end")

    def _freely(self) -> None:
        lap, sizes = LoaderPass(0, 0), (1,) * self.plan.workers
        ask, begins, left = Draw(lap, ((0, self.model.size),), self.model.size, sizes), True, True
        while left:
            ticket = self.client.queue.draw(Draw(*_fields(ask), begins=begins))
            begins = not ticket.spans
            if ticket.spans:
                self.client.tickets.cover(DrawnBatch(lap, ticket.spans))
                self._step(ticket.spans[0][0])
            else:
                self.client.pushes.settle()
                left = self.model.ask("end")

    def _step(self, sample: int) -> None:
        self.model.ask("suspended")  # it computes
        client, slot = self.client, self.model.layout.slots[0]
        if client.steps.unsettled is not None:
            client.pushes.settle()
        gradient = torch.zeros_like(self.own)
        gradient[sample] = 1.0
        self.own.grad = gradient
        own = self.steps is not None and self.steps.can_step((0,), [self.own])
        if not own:
            self.store.gradient(client.worker, slot).copy_(gradient)
        push = (StepRequest if own else GradientPush)(0, 1.0, samples=1.0)
        if self.steps is not None and own and (step := self.steps.unasked()) is not None:
            client.pushes.make(step, push, self.steps.heard)
        elif self.steps is not None:
            steps = self.steps
            client.pushes.offer(push, lambda released: steps.released(released, 0))
            client.pushes.settle()
        else:
            client.pushes.offer(push, lambda released: None)


def _fields(ask: Draw) -> tuple[Any, ...]:
    return ask.lap, ask.spans, ask.length, ask.sizes
