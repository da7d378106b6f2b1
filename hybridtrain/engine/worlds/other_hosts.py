"""The interface of a world of processes to the other hosts of its run, if there are any."""

from __future__ import annotations

from collections.abc import Sequence
from selectors import BaseSelector
from typing import Protocol

from hybridtrain.engine.protocol.events import Announced
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.worlds.start_workers import RestartPoint, WorkerHandle, WorkerStarter


class StartsWorkers(Protocol):
    """Starts the workers of a run, wherever they run."""

    @property
    def workers(self) -> Sequence[WorkerHandle]:
        """The latest process of each worker."""

    def start(
        self, numbers: Sequence[int], selector: BaseSelector, restart: RestartPoint | None = None
    ) -> None:
        """Start a process for each of these workers."""

    def kill(self) -> None:
        """Kill all processes."""

    def close(self) -> None:
        """Free what starting has taken."""


class OtherHosts(Protocol):
    """The other hosts of a run. Their workers are served as those of this host are."""

    def beside(self, here: WorkerStarter, server: ParameterServer) -> StartsWorkers:
        """A starter of the workers of all hosts, for one run."""

    def absent(self) -> set[int]:
        """The workers of hosts that are not there, and may come."""

    def take_signals(self) -> list[int]:
        """The signals that other hosts have got since this was asked last."""

    def arriving(self) -> Announced | None:
        """Pushes whose rows are arriving, if there are any."""

    def flush(self) -> None:
        """Send what has been queued."""

    def tell_of_update(self) -> None:
        """Send the masters, which have the update that workers did not wait for."""

    def look(self, now_s: float, admits: bool) -> list[int]:
        """Once a second: show and see signs of life; the workers of hosts that have come."""
