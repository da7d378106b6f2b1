"""What the parts of a run may ask of its strategy.

Lightning hands the strategy around as ``trainer.strategy``. The parts are typed by these protocols,
so that none of them needs the class that puts them together.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch

from hybridtrain.exchanges import Exchange, Requirements
from hybridtrain.lightning.checkpointing.checkpoint_writing import CheckpointWriting
from hybridtrain.lightning.collectives import Collectives
from hybridtrain.lightning.failover.rng_mailbox import RngMailbox
from hybridtrain.lightning.fault_injection.in_parent import Faults
from hybridtrain.lightning.preflight.transport_options import Transport
from hybridtrain.lightning.replay.recording import Recording
from hybridtrain.lightning.strategy_options import DataOptions
from hybridtrain.monitoring.hang_detector import HangTimeout
from hybridtrain.policies import Policy
from hybridtrain.recovery.failure_policy import OnFailure
from hybridtrain.updates.named import NamedUpdate
from hybridtrain.updates.staleness import Correction
from hybridtrain.worker.client import Client


class RunContext(Protocol):
    """In the process that starts the workers, and in each worker."""

    policy: Policy
    exchange: Exchange
    update: NamedUpdate
    correction: Correction | None
    requirements: Requirements
    recording: Recording | None
    rng_mailbox: RngMailbox | None
    keeping: CheckpointWriting
    transport: Transport
    on_failure: OnFailure
    data_options: DataOptions
    faults: Faults
    patience: HangTimeout | None
    start_method: str
    threads_per_worker: int | Literal["auto"]
    stop_grace_s: float
    interrupted_by: int | None
    parallel_devices: list[torch.device] | None

    @property
    def world_size(self) -> int:
        """W."""
        ...

    def remember_stats(self, stats: dict[str, Any]) -> None:
        """What the server has counted."""
        ...


class WorkerContext(RunContext, Protocol):
    """In a worker."""

    @property
    def client(self) -> Client:
        """To the server."""
        ...

    @property
    def collectives(self) -> Collectives:
        """What workers agree on."""
        ...

    def meet(self) -> None:
        """All workers are here."""
        ...
