"""A strategy's timing: virtual time, in which contributions take longer where workers share cores.

Theory of operation. Nothing is trained: the policy and the server get the facts of a run, and a
contribution is one number. How long one takes is what was recorded, times a factor that depends on
how many workers have been released together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

from hybridtrain.exchanges import Exchange
from hybridtrain.policies import Policy
from hybridtrain.protocol.events import Admitted, Event
from hybridtrain.protocol.messages import Released
from hybridtrain.server.rounds import Replies
from hybridtrain.worlds.virtual.network import Conditions
from hybridtrain.worlds.virtual.service_times import Draw, Stream
from hybridtrain.worlds.virtual.virtual_world import VirtualWorld


@dataclass(frozen=True)
class Contributions:
    """Times of contributions of several mini-batches.

    ``times``: of mini-batches; ``sizes``: how many a contribution has, in turn; ``between_s`` comes
    to each contribution, ``step_s`` to each mini-batch.
    """

    times: Stream
    sizes: Sequence[int] = (1,)
    between_s: float = 0.0
    step_s: float = 0.0

    def stream(self, worker: int, seed: int) -> Draw:
        """Draws the worker's times."""
        draw, size = self.times.stream(worker, seed), cycle(self.sizes)
        return lambda: self.between_s + sum(draw() + self.step_s for _ in range(next(size)))


class Contention(NamedTuple):
    """Times as long as recorded that mini-batches take.

    ``longer``: of so many workers that begin at the same time; ``alone``: of one that waits for no
    other; ``slower``: workers on slower devices, which wait no more seconds than the others.
    """

    longer: Callable[[int], float]
    alone: float = 1.0
    slower: Mapping[int, float] = MappingProxyType({})


class TimingRun(VirtualWorld):
    """Runs a policy on recorded times.

    Args:
        policy: decides when contributions count.
        exchange: says how many mini-batches a contribution has.
        n_workers: on all hosts together.
        times: of contributions.
        conditions: network, bytes and updates.
        epoch: contributions after which all workers meet; ``None``: they never do.
        contention: how much longer workers take that begin at the same time.

    Raises:
        UserError: if policy and exchange contradict each other, or make no sense for so many.
    """

    def __init__(
        self,
        policy: Policy,
        exchange: Exchange,
        n_workers: int,
        times: Stream,
        conditions: Conditions,
        epoch: int | None = None,
        contention: Contention | None = None,
    ) -> None:
        self._times, self._contention, self._n_workers = times, contention, n_workers
        self._factor = 1.0 if contention is None else contention.longer(n_workers)
        self._factors = 0.0
        self._begin_anew = False  # all workers, whose releases come one by one
        self.counted = 0.0  # contributions until the last update
        super().__init__(
            policy, n_workers, self, conditions=conditions, exchange=exchange, epoch=epoch
        )

    def stream(self, worker: int, seed: int) -> Draw:
        """Draws the worker's times, longer by contention."""
        draw = self._times.stream(worker, seed)
        return lambda: draw() * self._longer(worker)

    def _longer(self, worker: int) -> float:
        self._factors += self._factor
        if self._contention is None or worker not in self._contention.slower:
            return self._factor
        alone = self._contention.alone
        return alone + (self._factor - alone) / self._contention.slower[worker]

    def _handle(self, event: Event, told_s: float) -> None:
        statistics = self.server.statistics
        before, self._begin_anew = statistics.version, isinstance(event, Admitted)
        super()._handle(event, told_s)
        if statistics.version > before:
            self.counted = statistics.samples

    def _answer(self, replies: Replies) -> None:
        released = sum(isinstance(reply, Released) for _, reply in replies)
        if self._contention is not None and released:
            together = self._n_workers if self._begin_anew else released
            self._factor = self._contention.longer(together)
        super()._answer(replies)

    # ---- figures --------------------------------------------------------------------------------

    @property
    def contributions_per_s(self) -> float:
        """Those that count, until the last update."""
        return self.counted / float(self.server.statistics.stats()["training_s"])

    @property
    def waiting_share(self) -> float:
        """Mean over the workers of the share of their time in which they wait for a release."""
        return fmean(self.server.statistics.stats()["waiting_share"])

    @property
    def mean_factor(self) -> float:
        """Times as long as recorded that a mini-batch took."""
        return self._factors / (self.events + self._n_workers)
