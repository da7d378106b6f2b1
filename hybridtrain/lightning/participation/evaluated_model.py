"""All workers validate the model that is saved.

Where workers train with copies or parameters of their own, each has buffers of its own (running
means of BatchNorm), and a callback that averages weights averages after each worker's own steps.
What is saved and returned has worker 0's. So in a validation all have these: the averages from then
on, the buffers until it ends.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch

from hybridtrain.lightning.hooks.trainer_hooks import averages_of
from hybridtrain.training.step.shared_buffers import lies_apart
from hybridtrain.worker.client import Client

Buffers = dict[str, torch.Tensor]


class _Lent(NamedTuple):
    """A buffer of this worker's module, its own value, and worker 0's."""

    buffer: torch.Tensor
    own: torch.Tensor
    theirs: torch.Tensor


class EvaluatedModel:
    """Gives a worker's module the buffers of worker 0 in validations.

    Args:
        trainer: of this worker.
        client: to the server.
    """

    def __init__(self, trainer: pl.Trainer, client: Client) -> None:
        self._trainer: Any = trainer
        self._client = client
        self._lent: list[_Lent] = []

    @torch.no_grad()
    def begin(self) -> None:
        """Collective, at the start of a validation."""
        client, mine = self._client, _buffers_of(self._trainer.lightning_module)
        averages = [averages_of(each) for each in self._trainer.callbacks]
        known = [dict(each.state_dict()) for each in averages if each is not None]
        if not (mine or known) or client.solo or client.n_workers == 1:
            return
        sent = [{k: v.cpu() for k, v in each.items()} for each in (mine, *known)]
        found = client.gather("what all validate with", sent if client.is_leader else None)[0]
        if client.is_leader or found is None:
            return
        theirs, *others = found
        for average, other in zip(known, others, strict=False):
            _take(average, other)
        kept = {k: v.clone() for k, v in mine.items()}
        self._lent = [_Lent(mine[k], kept[k], theirs[k]) for k in _take(mine, theirs)]

    @torch.no_grad()
    def end(self) -> None:
        """Give back the worker's own, where the validation has not written to them."""
        for buffer, own, theirs in self._lent:
            if torch.equal(buffer.cpu(), theirs):
                buffer.copy_(own)
        self._lent = []


def _buffers_of(module: Any) -> Buffers:
    return {name: b.detach() for name, b in module.named_buffers() if lies_apart(b)}


def _take(mine: Buffers, theirs: Buffers) -> list[str]:
    """Copy values of the same names and shapes; returns the names."""
    alike = [k for k, value in theirs.items() if k in mine and mine[k].shape == value.shape]
    for name in alike:
        mine[name].copy_(theirs[name])
    return alike
