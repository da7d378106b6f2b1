"""A server without processes: requests by hand, a clock that the test turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

from hybridtrain.engine.memory import Layout
from hybridtrain.engine.policies import Policy, WaitForAll
from hybridtrain.engine.protocol.events import Received
from hybridtrain.engine.protocol.messages import (
    Average,
    Changes,
    Done,
    ExchangePush,
    Gather,
    Gathered,
    GradientPush,
    Install,
    Refused,
    Released,
    Reply,
    Row,
    Share,
    Shared,
    Stop,
)
from hybridtrain.engine.server.rounds import Replies
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.updates.serialize import dump
from hybridtrain.engine.updates.staleness import Correction

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


class Served:
    """A server with shared parameters and installed optimizers.

    Args:
        policy: who decides.
        n_workers: W.
        parameters: the initial values.
        optimizers: made over all parameters; one or several.
        correction: of late gradients.
        averaging: gradients are averaged before they are pushed.
        make: the server.
        worker_updates: workers can make updates without the server.
    """

    def __init__(
        self,
        n_workers: int,
        policy: Policy | None = None,
        parameters: Sequence[torch.Tensor] = (torch.zeros(3),),
        optimizers: Sequence[Make] = (sgd,),
        correction: Correction | None = None,
        averaging: bool = False,
        make: Callable[..., ParameterServer] = ParameterServer,
        worker_updates: bool = False,
    ) -> None:
        self.now_s = 0.0
        self.n_workers = n_workers
        clock = lambda: self.now_s  # noqa: E731
        self.server = make(policy or WaitForAll(), n_workers, clock=clock, correction=correction)
        self.parameters = [torch.nn.Parameter(p.clone()) for p in parameters]
        self.layout = Layout.of((f"p{n}", p) for n, p in enumerate(self.parameters))
        self._optimizers, self._share = optimizers, Share(self.layout, averaging, worker_updates)
        self._begin()

    def _begin(self) -> None:
        replies = [self.server.on(Received(w, self._share)) for w in range(self.n_workers)]
        assert replies[:-1] == [[]] * (self.n_workers - 1), "nobody shares before all have asked"
        assert all(isinstance(reply, Shared) for _, reply in replies[-1])
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            self.store.master(slot).copy_(parameter.detach())
        numbers = {id(p): n for n, p in enumerate(self.parameters)}
        payloads = tuple(dump(make(self.parameters), numbers) for make in self._optimizers)
        requests = [Install(payloads), *(Install() for _ in range(self.n_workers - 1))]
        last = [self.server.on(Received(w, request)) for w, request in enumerate(requests)][-1]
        assert last == [(w, Done()) for w in range(self.n_workers)]

    @property
    def store(self) -> Any:
        assert self.server.store is not None
        return self.server.store

    def bring(self, worker: int, gradient: float) -> Replies:
        """Every element has this gradient; the worker wants the mean of all before it pushes."""
        for slot in self.layout.slots:
            self.store.gradient(worker, slot).fill_(gradient)
        return self.server.on(Received(worker, Average(1.0)))

    def push(self, worker: int, gradient: float, weight: float = 1.0, **rest: Any) -> Replies:
        """Every element of every parameter has this gradient."""
        for slot in self.layout.slots:
            self.store.gradient(worker, slot).fill_(gradient)
        return self.server.on(Received(worker, push_of(weight, **rest)))

    def gather(self, worker: int, tag: str = "t", payload: bytes = b"") -> Replies:
        return self.server.on(Received(worker, Gather(tag, payload)))

    def value(self, number: int = 0) -> float:
        """The first element of a master."""
        return self.store.master(self.layout.slots[number]).flatten()[0].item()


def released(version: int, *workers: int) -> Replies:
    return [(worker, Released(version)) for worker in workers]


def gathered(payloads: Sequence[bytes], *workers: int) -> Replies:
    return [(worker, Gathered(tuple(payloads), tuple(workers))) for worker in workers]


def stopped(*workers: int) -> Replies:
    return [(worker, Stop(now=True)) for worker in workers]


def refusals(replies: Replies) -> dict[int, str]:
    """Who is refused, and why; there must be nothing else among the replies."""

    def reason(reply: Reply) -> str:
        assert isinstance(reply, Refused), reply
        return reply.reason

    return {worker: reason(reply) for worker, reply in replies}


def push_of(weight: float, optimizer: int = 0, **given: Any) -> GradientPush | ExchangePush:
    """A push, its row and its changes from their fields."""
    row, changes = (
        kind(**{each.name: given.pop(each.name) for each in fields(kind) if each.name in given})
        for kind in (Row, Changes)
    )
    kind = ExchangePush if "invites" in given else GradientPush
    return kind(optimizer, weight, row, changes, **given)
