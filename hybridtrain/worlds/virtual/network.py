"""What lies between workers and server in virtual time.

The model: every worker has a link of its own to the server, with the same latency and the same
bandwidth in each direction. A contribution takes ``latency_s + size_bytes / bandwidth`` to reach
the server, and the release, which brings the parameters, the same to come back; a request without
a load takes the latency. Links do not disturb each other. With ``server_bandwidth`` the server's
own link is one queue in each direction: what has arrived over the workers' links passes it one
after the other, in the order of arrival. A worker computes only between release and push: sending
does not overlap with computing. Decisions take no time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridtrain.errors import UserError
from hybridtrain.worlds.virtual.service_times import positive


@dataclass(frozen=True, slots=True)
class Network:
    """Latency and bandwidth; by default there is no distance at all.

    Args:
        latency_s: of every message, one way.
        bandwidth: bytes per second of each worker's link.
        server_bandwidth: bytes per second of the server's link, shared by all.
        size_bytes: of a contribution, and of the parameters.

    Raises:
        UserError: if one of them is negative or, where it divides, zero.
    """

    latency_s: float = 0.0
    bandwidth: float = math.inf
    server_bandwidth: float = math.inf
    size_bytes: int = 0

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise UserError(
                f"network.latency_s={self.latency_s} was given; it must be a number from 0 on"
            )
        for name in ("bandwidth", "server_bandwidth"):
            value: float = getattr(self, name)
            if value != math.inf:
                positive(f"network.{name}", value)
        if self.size_bytes < 0:
            raise UserError(f"size_bytes={self.size_bytes} was given; it must not be negative")

    @property
    def loaded_s(self) -> float:
        """How long a contribution, or the parameters, take over a worker's own link."""
        return self.latency_s + self.size_bytes / self.bandwidth

    @property
    def passing_s(self) -> float:
        """How long they hold the server's link."""
        return self.size_bytes / self.server_bandwidth
