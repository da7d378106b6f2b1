"""The workers of one host that go on together, while an exchange goes on between hosts.

They take the mean of their gradients before each step, or now and then that of their parameters, in
shared memory. So all have the same to hand over, and the first one does it for all.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import torch

from hybridtrain.engine.memory import Store
from hybridtrain.engine.protocol.host_round import HostRound
from hybridtrain.engine.protocol.messages import Average, Averaged, Row, StillWaits
from hybridtrain.engine.server.mean_round import average
from hybridtrain.engine.updates.thread_pool import Pool
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worker.replica_own import OwnReplica

_PATIENCE_S = 0.5  # then the server hears that this worker has gone on, and waits for another one
_NAP_S = 0.0005  # between two looks, where workers cannot wake one another


class HostGroup:
    """One worker's view of the workers of its host.

    Args:
        client: to the server.
        store: the shared buffers of this host, with a row for means.
        workers: on each host.
    """

    def __init__(self, client: Client, store: Store, workers: int) -> None:
        self.number, self._place = divmod(client.worker, workers)  # of the host; among its workers
        self.n_groups, self.first = client.n_workers // workers, self.number * workers
        self._client, self._store = client, store
        self._pool = Pool(workers * torch.get_num_threads())  # the others wait meanwhile
        slots = store.layout.slots
        self._round = HostRound(store.protocol_words, workers, len(slots), store.arena.fd)
        self._waited_s = 0.0
        self._weight = 0.0  # of all gradients in the mean that has not been stepped with
        self.means = [store.mean(slot) for slot in slots]

    @property
    def leads(self) -> bool:
        """Whether this worker hands over for all."""
        return self._place == 0

    def average(self, request: Average) -> Averaged:
        """Write the mean of the gradients in the workers' rows to the row for means."""
        brings = set(range(len(self.means))).difference(request.row.absent)
        self._weight = self.mean(request.weight, brings)
        return Averaged(self._round.absent)

    def pop_weight(self) -> float:
        """The samples of all workers behind the mean gradient of this step."""
        weight, self._weight = self._weight, 0.0
        return weight

    def mean(self, weight: float, brings: Collection[int] = ()) -> float:
        """Write the mean of the rows to the row for means; returns the sum of the weights."""

        def make(weights: Sequence[float]) -> None:
            rows = enumerate(weights, self.first)
            average({w: Average(share, Row()) for w, share in rows}, self._store, self._pool)

        return self._complete_round(weight, brings, make)

    def settle(self) -> None:
        """Wait for the answer to a movement that is under way: it lies in the row."""
        self._client.pushes.settle()

    def sum(self, weight: float) -> float:
        """The sum of the weights of this host's workers."""
        return self._complete_round(weight, (), lambda weights: None)

    def _complete_round(self, weight: float, brings: Collection[int], make: Any) -> float:
        """Raises ``StopRequested`` if the run ends meanwhile."""
        number, bells = self._round.come(self._place, weight, brings, make), self._client.bells
        if self._round.is_made(number) and bells is not None:
            bells.ring()
        came_s = time.monotonic()
        patient_until_s = came_s + _PATIENCE_S
        self._client.heartbeat.wait_for_mates(True)
        try:
            while not self._round.is_made(number):
                self._client.check_stop()
                if time.monotonic() > patient_until_s:
                    patient_until_s = float("inf")
                    self._client.note(StillWaits())
                time.sleep(_NAP_S) if bells is None else bells.wait(_PATIENCE_S)
        finally:
            self._client.heartbeat.wait_for_mates(False)
            self._waited_s += time.monotonic() - came_s
        return self._round.total

    def pop_waited_s(self) -> float:
        """How long this worker has waited for the others since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s


class HostMean:
    """A worker's own parameters, which become the mean of its host's now and then.

    Args:
        own: the worker's.
        group: the workers of its host.
        numbers: slot numbers of all that are stepped.
        every: steps between two means.
    """

    def __init__(
        self, own: OwnReplica, group: HostGroup, numbers: tuple[int, ...], every: int
    ) -> None:
        self._own, self._group, self._numbers, self._every = own, group, numbers, every
        self._since, self._weight = 0, 0.0  # steps since the last mean, samples behind them

    def parameters(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        return self._own.parameters(numbers)

    def masters(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        return self._own.masters(numbers)

    def moved(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """How far the mean of the host has moved."""
        self._take_mean()
        return self._own.moved(numbers)

    def begin_step(self, samples: float) -> None:
        """All workers of the host make a step, this one with so many samples."""
        self._since, self._weight = self._since + 1, self._weight + samples

    def end_step(self) -> None:
        if self._since >= self._every:
            self._take_mean()

    @torch.no_grad()
    def _take_mean(self) -> None:
        if not self._since:
            return
        self._group.settle()
        own = self._own.parameters(self._numbers)
        self._own.hand_over(self._numbers, own)
        if self._group.mean(self._weight):
            for parameter, number in zip(own, self._numbers, strict=True):
                parameter.copy_(self._group.means[number])
        self._since, self._weight = 0, 0.0

    def state(self) -> tuple[int, float]:
        """For a checkpoint between two means."""
        return self._since, self._weight

    def load_state(self, state: tuple[int, float]) -> None:
        self._since, self._weight = state
