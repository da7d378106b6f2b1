"""The parts of one worker, from its start to its end."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridtrain.engine.exchanges import Requirements
from hybridtrain.engine.recording.run_description import Recording
from hybridtrain.engine.recovery.failure_policy import OnFailure
from hybridtrain.engine.worker.client import Client
from hybridtrain.lightning.collectives import Collectives


@dataclass(frozen=True)
class WorkerContext:
    """Handed to each part of a worker that needs more than one of these.

    Args:
        client: to the server.
        collectives: of this worker.
        requirements: of policy and exchange, for this number of workers.
        on_failure: what follows when a worker fails.
        device: of this worker.
        n_hosts: of the run, or of the run that is replayed.
        recording: of the run, if there is one.
    """

    client: Client
    collectives: Collectives
    requirements: Requirements
    on_failure: OnFailure
    device: torch.device
    n_hosts: int
    recording: Recording | None
