"""A world in virtual time: one process, thousands of workers, a clock that jumps.

Theory of operation. A heap holds when each worker will have computed its next gradient. The world
takes the earliest, turns the clock there, and hands the worker's push to the very server that
serves real processes, with the same policy and the same update code; whoever is released begins
anew from the parameters as they are then. Nothing waits and nothing depends on this machine's
speed, so a run is the same for its seed, down to the last bit. With a *task* gradients are real;
without one only time is simulated.

Legend: P elements of one dtype's buffer, W workers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from hybridtrain.memory import Layout, Store
from hybridtrain.messages import Push, Released
from hybridtrain.policies import Policy
from hybridtrain.server import Server
from hybridtrain.update import Optimizers, build_update
from hybridtrain.update.idle import IdleOptimizers
from hybridtrain.update.pool import Pool
from hybridtrain.worlds.service import ServiceTimes

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Task(Protocol):
    """Something to train: parameters, and gradients at any point."""

    def parameters(self) -> list[torch.Tensor]:
        """The initial values."""
        ...

    def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Of the worker's next mini-batch, at these parameters; each in its parameter's shape."""
        ...


class VirtualWorld:
    """Workers that take turns by the clock.

    Args:
        policy: when a contribution counts.
        n_workers: W.
        times: how long a worker computes.
        batch_size: samples of each mini-batch.
        seed: of the service times.
        task: what is trained, with ``optimizer``; without one, only time passes.
        optimizer: makes the user's optimizer for the task's parameters.
    """

    def __init__(
        self,
        policy: Policy,
        n_workers: int,
        times: ServiceTimes,
        batch_size: int = 1,
        seed: int = 0,
        task: Task | None = None,
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        self.now_s = 0.0
        self.events = 0
        self.server = Server(policy, n_workers, clock=lambda: self.now_s)
        self._task, self._push = task, Push(0, float(batch_size))
        self._draws = [times.stream(worker, seed) for worker in range(n_workers)]
        self._due: list[tuple[float, int]] = []  # virtual time, worker
        self._store = self._share(task, optimizer, n_workers)
        self.server.ledger.start()
        for worker in range(n_workers):
            self._begin(worker)

    def _share(
        self, task: Task | None, optimizer: MakeOptimizer | None, n_workers: int
    ) -> Store | None:
        if task is None or optimizer is None:
            self.server.adopt(None, IdleOptimizers())
            return None
        values = task.parameters()
        layout = Layout.of((f"{number}", value) for number, value in enumerate(values))
        store = Store(layout, n_workers, private_parameters=True)
        for slot, value in zip(layout.slots, values, strict=True):
            store.master(slot).copy_(value)
        masters = [torch.nn.Parameter(store.master(slot)) for slot in layout.slots]
        pool = Pool(1)
        update = build_update(optimizer(masters), range(len(masters)), store, pool)
        self.server.adopt(store, Optimizers([update], store, pool))
        for worker in range(n_workers):
            store.refresh(worker)
        return store

    # ---- time -----------------------------------------------------------------------------------

    def run(self, updates: int | None = None, until_s: float | None = None) -> None:
        """Go on until so many updates have been made in all, or that time has come."""
        while not self._over(updates, until_s):
            self._step()

    def _over(self, updates: int | None, until_s: float | None) -> bool:
        enough = updates is not None and self.server.ledger.version >= updates
        late = until_s is not None and (not self._due or self._due[0][0] > until_s)
        return enough or late

    def _step(self) -> None:
        """The next worker is done."""
        self.now_s, worker = heapq.heappop(self._due)
        self.events += 1
        if self._store is not None and self._task is not None:
            self._compute(worker, self._store, self._task)
        for freed, reply in self.server.handle(worker, self._push):
            assert isinstance(reply, Released), reply
            self._begin(freed)

    def _begin(self, worker: int) -> None:
        """Who is due at the same moment as others goes by its number."""
        heapq.heappush(self._due, (self.now_s + self._draws[worker](), worker))

    @torch.no_grad()
    def _compute(self, worker: int, store: Store, task: Task) -> None:
        slots = store.layout.slots
        values = [store.parameter(worker, slot) for slot in slots]
        for slot, gradient in zip(slots, task.gradient(worker, values), strict=True):
            store.gradient(worker, slot).copy_(gradient)

    def parameters(self) -> list[torch.Tensor]:
        """The masters as they are now, copied."""
        if self._store is None:
            return []
        return [self._store.master(slot).clone() for slot in self._store.layout.slots]
