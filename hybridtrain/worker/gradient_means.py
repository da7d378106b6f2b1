"""The mean of all gradients, where every worker must see it before it steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hybridtrain.memory import unpack
from hybridtrain.protocol.messages import Averaged
from hybridtrain.worker.replica import Replica


def take_means(
    replica: Replica,
    trained: Mapping[int, torch.nn.Parameter],
    means: Sequence[torch.Tensor],
    averaged: Averaged,
) -> None:
    """Copy the server's means to every ``.grad``.

    Args:
        replica: makes the copies.
        trained: parameters by slot number.
        means: the place of each slot's mean, host, shared.
        averaged: says which are absent and which are sparse.
    """
    sparse = {each.number: each for each in averaged.packed}
    gradients, sources = [], []
    for number in sorted(trained.keys() - set(averaged.absent)):
        parameter, mean = trained[number], means[number]
        if number in sparse:
            parameter.grad = unpack(sparse[number], mean).to(parameter.device, copy=True)
            continue
        if parameter.grad is None or parameter.grad.is_sparse:
            parameter.grad = torch.empty_like(parameter)
        gradients.append(parameter.grad)
        sources.append(mean)
    replica.take_means(gradients, sources)
