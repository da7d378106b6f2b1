"""The network between workers and server in virtual time.

The model: every worker has its own link to the server, with the same latency and bandwidth in each
direction. A gradient takes ``latency_s + size_bytes / bandwidth`` to the server, and the release,
with the parameters, the same back; a request without data takes the latency. Contributions of
workers with their own parameters have their real size, after encoding. Links are independent. With
``server_bandwidth`` the server's link is a FIFO queue in each direction. Sending does not overlap
with computing. Decisions take no time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from hybridtrain.protocol.messages import Visits
from hybridtrain.util.option_types import Checked, Natural, NotNegative, Range
from hybridtrain.worlds.virtual.script import Script

INWARDS, OUTWARDS = 0, 1


Bandwidth = Annotated[float, Range(0, open="(", infinite=True)]  # bytes a second


@dataclass(frozen=True, slots=True)
class Network(Checked):
    """Latency and bandwidth; by default messages take no time.

    Args:
        latency_s: of every message, one way.
        bandwidth: bytes per second of each worker's link.
        server_bandwidth: bytes per second of the server's link, shared by all.
        size_bytes: of a gradient, and of the parameters.

    Raises:
        UserError: if a value is negative, or a bandwidth is zero.
    """

    latency_s: NotNegative = 0.0
    bandwidth: Bandwidth = math.inf
    server_bandwidth: Bandwidth = math.inf
    size_bytes: Natural = 0
    prefix = "network."


class Links:
    """The equal links between the workers and the server.

    ``loaded_s``: time of a gradient on a worker's link; ``passing_s``: on the server's link;
    ``latency_s``: time of a request without data.
    """

    def __init__(self, network: Network) -> None:
        self._network, self.latency_s = network, network.latency_s
        self.loaded_s, self.passing_s = self.loads_s(network.size_bytes)
        self._busy_s = [0.0, 0.0]
        self._inside: set[int] = set()  # workers whose gradient passes the server's link

    def loads_s(self, n_bytes: float) -> tuple[float, float]:
        """Time of so many bytes on a worker's link, and on the server's."""
        own_s = self.latency_s + n_bytes / self._network.bandwidth
        return own_s, n_bytes / self._network.server_bandwidth

    def back_s(self, now_s: float, loaded: bool) -> float:
        """Arrival time of a release that is sent now; ``loaded``: with parameters."""
        if not loaded:
            return now_s + self.latency_s
        passing_s = self.passing_s
        sent_s = self.passed_s(OUTWARDS, now_s, passing_s) if passing_s else now_s
        return sent_s + self.loaded_s

    def enters_s(self, worker: int, now_s: float, passing_s: float) -> float | None:
        """When the gradient, now at the server's link, has passed it; ``None``: it just has."""
        if not passing_s or worker in self._inside:
            self._inside.discard(worker)
            return None
        self._inside.add(worker)
        return self.passed_s(INWARDS, now_s, passing_s)

    def forget(self, worker: int) -> None:
        """Drop the worker's gradient on the server's link."""
        self._inside.discard(worker)

    def passed_s(self, way: int, now_s: float, passing_s: float) -> float:
        """When data that enter the server's link now have passed it."""
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

    Raises:
        UserError: if ``update_s`` is negative or infinite.
    """

    network: Network = field(default_factory=Network)
    script: Script = field(default_factory=Script)
    interrupt: bool = False
    update_s: NotNegative = 0.0
    foresight: bool = False
    visits: Visits | None = None
