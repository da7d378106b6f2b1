"""Choose the worker's side of the parameters by the device that they lie on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridtrain.engine.exchanges.compression import Codec
from hybridtrain.engine.memory import Store
from hybridtrain.engine.worker.device import KINDS
from hybridtrain.engine.worker.replica import HostReplica, Leads, Replica
from hybridtrain.engine.worker.replica_cuda import CudaReplica
from hybridtrain.engine.worker.replica_staged import StagedReplica
from hybridtrain.engine.worker.row_encoder import RowEncoder


def open_replica(
    parameters: Sequence[torch.nn.Parameter],
    store: Store,
    worker: int,
    eager: bool,
    codec: Codec | None = None,
    leads: Leads | None = None,
) -> Replica:
    """The one for the device that the parameters lie on.

    ``codec``: of the gradients; ``leads``: whether this worker speaks for all now.
    """
    encoder = None if codec is None else RowEncoder(codec, parameters, store, worker)
    device = parameters[0].device
    if device.type not in KINDS:
        return HostReplica(parameters, store, worker, eager, encoder, leads)
    streams = KINDS[device.type](device)
    kind = StagedReplica if store.on_devices else CudaReplica
    return kind(parameters, store, worker, eager, streams, encoder, leads)
