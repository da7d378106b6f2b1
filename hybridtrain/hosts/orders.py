"""Messages between the host of the server and the relay of another host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hybridtrain.engine.worlds.start_workers import RestartPoint

# ---- from the server's host to a relay ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start a process for each of these workers; ``anew``: of a new run, with its own memory."""

    numbers: tuple[int, ...]
    restart: RestartPoint | None = None
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand these replies of the server to their workers, by number, in this order.

    ``turn``: of the server's memory, if it has turns; this host's has the same from here on, and
    these buffers have the masters (``exact``).
    """

    replies: tuple[tuple[int, Any], ...]
    turn: tuple[int, ...] | None = None
    exact: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Moved:
    """What workers read next has moved so, encoded, by dtype; it goes to this ``buffer``."""

    buffer: int
    encoded: Mapping[torch.dtype, torch.Tensor]


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Kill the worker's process; ``cause``: for the message about its end."""

    number: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Over:
    """The call of the trainer has ended. ``results``: of all workers.

    ``error``: why there is none, in words; ``signum``: the signal that ended it, if one did;
    ``stats``: the run's statistics.
    """

    results: list[Any] = field(default_factory=list)
    error: str = ""
    signum: int = 0
    stats: dict[str, Any] = field(default_factory=dict)


# ---- from a relay to the server's host ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunBegun:
    """A new run has begun: all that was sent before belongs to an earlier one."""


@dataclass(frozen=True, slots=True)
class FromWorker:
    """A message of a worker to the server."""

    number: int
    message: Any


@dataclass(frozen=True, slots=True)
class Ended:
    """The worker's process has ended; ``exit_text``, ``metrics_note``: see ``WorkerHandle``."""

    number: int
    exit_text: str
    metrics_note: str = ""


@dataclass(frozen=True, slots=True)
class Signalled:
    """The relay's process got a signal that ends the run."""

    signum: int
