"""What lies between workers and server in virtual time.

The model: every worker has a link of its own to the server, with the same latency and the same
bandwidth in each direction. A contribution takes ``latency_s + size_bytes / bandwidth`` to reach
the server, and the release, which brings the parameters, the same to come back; a request without
a load takes the latency. What workers with parameters of their own hand over is as large as it is
in their rows: less where it is encoded. Links do not disturb each other. With ``server_bandwidth``
the server's own link is one queue in each direction: what has arrived over the workers' links
passes it one after the other, in the order of arrival. A worker computes only between release and
push: sending does not overlap with computing. Decisions take no time.

Where the parameters lie in several shards, each has a server of its own, and links of its own with
these figures; a worker goes on when the last of them has answered. If the delays of their messages
vary, what several workers have sent reaches the shards in different orders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated

from hybridtrain.util.option_types import Checked, Filled, Natural, NotNegative, Range

INWARDS, OUTWARDS = 0, 1


Bandwidth = Annotated[float, Range(0, open="(", infinite=True)]  # bytes a second


@dataclass(frozen=True, slots=True)
class Network(Checked):
    """Latency and bandwidth; by default there is no distance at all.

    Args:
        latency_s: of every message, one way.
        bandwidth: bytes per second of each worker's link.
        server_bandwidth: bytes per second of the server's link, shared by all.
        size_bytes: of a contribution, and of the parameters.
        shards: for each shard, by how many seconds its messages take longer than that, one way; the
            mean of an exponential distribution, drawn for each message.

    Raises:
        UserError: if one of them is negative or, where it divides, zero.
    """

    latency_s: NotNegative = 0.0
    bandwidth: Bandwidth = math.inf
    server_bandwidth: Bandwidth = math.inf
    size_bytes: Natural = 0
    shards: Annotated[tuple[NotNegative, ...], Filled()] = (0.0,)
    prefix = "network."

    def links(self, shares: Sequence[float], n_workers: int, seed: int) -> list[Links]:
        """To each shard, which has such a share of the parameters."""
        made = []
        for shard, (mean_s, share) in enumerate(zip(self.shards, shares, strict=True)):
            drawn = [Random(f"{seed}/{shard}/{worker}") for worker in range(n_workers)]
            made.append(Links(self, share * self.size_bytes, mean_s, drawn))
        return made


class Links:
    """Between the workers and one server, all alike.

    Args:
        network: latency and bandwidths.
        n_bytes: of a contribution, and of the parameters.
        mean_s: by how much a message takes longer, on average.
        drawn: random numbers of each worker.

    ``loaded_s``: how long a contribution takes over a worker's own link; ``passing_s``: how long it
    holds the server's; ``latency_s``: of a request without a load.
    """

    def __init__(
        self, network: Network, n_bytes: float, mean_s: float, drawn: list[Random]
    ) -> None:
        self._network, self._drawn, self.mean_s = network, drawn, mean_s
        self.latency_s = network.latency_s
        self.loaded_s, self.passing_s = self.carries_s(n_bytes), self.passes_s(n_bytes)
        self._busy_s = [0.0, 0.0]
        self._inside: set[int] = set()  # whose contribution passes the server's link

    def carries_s(self, n_bytes: float) -> float:
        """How long so much takes over a worker's own link."""
        return self.latency_s + n_bytes / self._network.bandwidth

    def passes_s(self, n_bytes: float) -> float:
        """How long so much holds the server's link."""
        return n_bytes / self._network.server_bandwidth

    def loads_s(self, n_bytes: int | None) -> tuple[float, float]:
        """How long so much (a contribution) is on a worker's link, and holds the server's."""
        if n_bytes is None:
            return self.loaded_s, self.passing_s
        return self.carries_s(n_bytes), self.passes_s(n_bytes)

    def back_s(self, worker: int, now_s: float, loaded: bool) -> float:
        """When a release that the server sends now is at the worker, ``loaded`` with parameters."""
        if not loaded:
            return now_s + self.latency_s
        passing_s = self.passing_s
        sent_s = self.passed_s(OUTWARDS, now_s, passing_s) if passing_s else now_s
        at_s = sent_s + self.loaded_s
        return at_s + self.delay_s(worker) if self.mean_s else at_s

    def enters_s(self, worker: int, now_s: float, passing_s: float) -> float | None:
        """When the worker's contribution, now at the server's link, has passed it; ``None``: it has
        done so already.
        """
        if not passing_s or worker in self._inside:
            self._inside.discard(worker)
            return None
        self._inside.add(worker)
        return self.passed_s(INWARDS, now_s, passing_s)

    def forget(self, worker: int) -> None:
        """What the worker has sent will not arrive."""
        self._inside.discard(worker)

    def delay_s(self, worker: int) -> float:
        """By how much the worker's next message takes longer."""
        return self._drawn[worker].expovariate(1 / self.mean_s) if self.mean_s else 0.0

    def passed_s(self, way: int, now_s: float, passing_s: float) -> float:
        """When what comes to the server's link now has passed it, ``INWARDS`` or ``OUTWARDS``."""
        self._busy_s[way] = max(self._busy_s[way], now_s) + passing_s
        return self._busy_s[way]
