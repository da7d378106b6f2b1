"""The network between workers and server in virtual time.

The model: every worker has its own link to the server, with the same latency and bandwidth in each
direction. A gradient takes ``latency_s + size_bytes / bandwidth`` to the server, and the release,
with the parameters, the same back; a request without data takes the latency. Contributions of
workers with their own parameters have their real size, after encoding. Links are independent. With
``server_bandwidth`` the server's link is a FIFO queue in each direction. Sending does not overlap
with computing. Decisions take no time.

Of several hosts the first has the server, whose memory its workers share, so their messages take no
time. The workers of another host share its link, a FIFO queue in each direction: rows go up one by
one, and parameters come down once for each host and version (one by one where each worker has a
copy). Host 0's own link is ``server_bandwidth``. What is sent passes both links at once, in frames.
Where all wait for one another, masters of :data:`FAR_BYTES` and more go down beside the last row
that comes up, as each part is stepped when that part of the row is there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from hybridtrain.engine.memory.layout import FAR_BYTES
from hybridtrain.engine.protocol.messages import Visits
from hybridtrain.util.option_types import Checked, Natural, NotNegative, Positive, Range
from hybridtrain.virtual.contention import NO_CONTENTION, Contention
from hybridtrain.virtual.script import Script

INWARDS, OUTWARDS = 0, 1


Bandwidth = Annotated[float, Range(0, open="(", infinite=True)]  # bytes a second


@dataclass(frozen=True, slots=True)
class Network(Checked):
    """Latency and bandwidth; by default messages take no time.

    Args:
        latency_s: of every message, one way.
        bandwidth: bytes per second of each worker's link, or of each host's.
        server_bandwidth: bytes per second of the server's link, shared by all.
        size_bytes: of a gradient, and of the parameters.
        row_bytes: of a contribution, if it is encoded.
        hosts: each with as many workers; 1: each worker is a host of its own, and so is the server.

    Raises:
        UserError: if a value is negative, or a bandwidth is zero.
    """

    latency_s: NotNegative = 0.0
    bandwidth: Bandwidth = math.inf
    server_bandwidth: Bandwidth = math.inf
    size_bytes: Natural = 0
    hosts: Positive = 1
    row_bytes: Natural | None = None
    prefix = "network."


class Links:
    """The equal links between the workers and the server.

    ``loaded_s``: time of the parameters on a worker's link; ``row_s``: of a contribution, which
    has ``row_bytes``.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        size, row = network.size_bytes, network.row_bytes
        self.row_bytes = size if row is None else row
        self.loaded_s, self.row_s = self.own_s(size), self.own_s(self.row_bytes)
        self._central = Queue(network.server_bandwidth)
        self._inside: set[int] = set()  # workers whose gradient passes a queue

    @property
    def server_s(self) -> float:
        """Time for which the server's link has been busy, in the direction with more to do."""
        return max(self._central.worked_s)

    def latency_s(self, worker: int) -> float:
        """Time of a request without data."""
        return self.network.latency_s

    def own_s(self, n_bytes: float) -> float:
        """Time of so many bytes on a worker's link."""
        return self.network.latency_s + n_bytes / self.network.bandwidth

    def back_s(self, worker: int, now_s: float, loaded: bool, version: int) -> float:
        """Arrival time of a release that is sent now; ``loaded``: with parameters."""
        if not loaded:
            return now_s + self.network.latency_s
        return self._central.passed_s(OUTWARDS, now_s, self.network.size_bytes) + self.loaded_s

    def enters_s(self, worker: int, now_s: float, n_bytes: float) -> float | None:
        """When the gradient has passed the queue that it joins now; ``None``: there is none."""
        if worker in self._inside:
            self._inside.discard(worker)
            return None
        through_s = self._through_s(worker, now_s, n_bytes)
        if through_s <= now_s:
            return None
        self._inside.add(worker)
        return through_s

    def _through_s(self, worker: int, now_s: float, n_bytes: float) -> float:
        return self._central.passed_s(INWARDS, now_s, n_bytes)

    def forget(self, worker: int) -> None:
        """Drop the worker's gradient in a queue."""
        self._inside.discard(worker)


class HostLinks(Links):
    """The links between the hosts.

    Args:
        network: of several hosts.
        n_workers: on all hosts together.
        once: workers read the masters, which come down once for each host and version.
        overlaps: an update is one gradient of each worker, so large rows and masters overlap.
    """

    def __init__(
        self, network: Network, n_workers: int, once: bool, overlaps: bool = False
    ) -> None:
        super().__init__(network)
        self._each, self._once = n_workers // network.hosts, once
        self._queues = [Queue(network.bandwidth) for _ in range(network.hosts)]
        self._brought: dict[int, tuple[int, float]] = {}  # host -> version, and its arrival
        self._row_s = network.size_bytes / min(network.bandwidth, network.server_bandwidth)
        self._overlaps = overlaps and network.size_bytes >= FAR_BYTES
        self._last_row_s = -math.inf  # when the last whole row began to arrive

    def latency_s(self, worker: int) -> float:
        return self.network.latency_s if worker >= self._each else 0.0

    def own_s(self, n_bytes: float) -> float:
        return 0.0  # a row joins the queue of its host as soon as it is computed

    def back_s(self, worker: int, now_s: float, loaded: bool, version: int) -> float:
        host, at_s = worker // self._each, now_s + self.latency_s(worker)
        if not (host and loaded):
            return at_s
        then, arrived_s = self._brought.get(host, (-1, 0.0))
        if not (self._once and then == version):
            from_s = min(now_s, self._last_row_s) if self._overlaps else now_s
            arrived_s = self._passed_s(OUTWARDS, host, from_s, self.network.size_bytes)
            self._brought[host] = version, arrived_s
        return max(at_s, arrived_s)

    def _through_s(self, worker: int, now_s: float, n_bytes: float) -> float:
        host, size = worker // self._each, self.network.size_bytes
        through_s = self._passed_s(INWARDS, host, now_s, n_bytes) if host else now_s
        # Other rows than whole ones are decoded once they are there: nothing overlaps with them.
        self._last_row_s = max(
            self._last_row_s, through_s - self._row_s * (host and n_bytes == size)
        )
        return through_s

    def _passed_s(self, way: int, host: int, now_s: float, n_bytes: float) -> float:
        both = (self._queues[host], self._central)
        return max(each.passed_s(way, now_s, n_bytes) for each in both) + self.network.latency_s


class Queue:
    """A link that is passed in the order of entering, in each direction.

    Args:
        bandwidth: bytes per second.
    """

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._busy_s = [0.0, 0.0]
        self.worked_s = [0.0, 0.0]

    def passed_s(self, way: int, now_s: float, n_bytes: float) -> float:
        """When data that enter now have passed."""
        if not (passing_s := n_bytes / self._bandwidth):
            return now_s
        self.worked_s[way] += passing_s
        self._busy_s[way] = max(self._busy_s[way], now_s) + passing_s
        return self._busy_s[way]


# ---- the conditions of a simulation: network, script, and options of the server -----------------


@dataclass(frozen=True)
class Conditions(Checked):
    """The network, and what happens to workers.

    ``interrupt``: a worker whose gradient would be dropped begins anew at once, as the literature
    assumes of K-sync (Dutta et al. 2018); else its gradient is dropped on arrival, as with real
    processes. ``update_s``: duration of an update in seconds; messages that arrive meanwhile wait.
    ``foresight``: a time window in which nothing more will arrive ends at the last arrival, as the
    literature assumes (Liu et al. 2024). ``visits``: workers draw from shards of the data.
    ``contention``: how much longer workers take that begin together.

    Raises:
        UserError: if ``update_s`` is negative or infinite.
    """

    network: Network = field(default_factory=Network)
    script: Script = field(default_factory=Script)
    interrupt: bool = False
    update_s: NotNegative = 0.0
    foresight: bool = False
    visits: Visits | None = None
    contention: Contention = NO_CONTENTION
