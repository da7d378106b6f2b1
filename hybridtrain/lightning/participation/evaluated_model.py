"""All workers validate the model that is saved.

Where workers train with copies or parameters of their own, each has buffers of its own (running
means of BatchNorm), and a callback that averages weights averages after each worker's own steps.
What is saved and returned has worker 0's. So in a validation all have these: the averages from then
on, the buffers until it ends.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch

from hybridtrain.engine.step.shared_buffers import KeptBuffer, kept, put
from hybridtrain.engine.worker.client import Client
from hybridtrain.lightning.hooks.trainer_hooks import averages_of


class EvaluatedModel:
    """Gives a worker's module the buffers of worker 0 in validations."""

    def __init__(self, trainer: pl.Trainer, client: Client) -> None:
        self._trainer: Any = trainer
        self._client = client
        self._own: dict[str, KeptBuffer] = {}  # while they are worker 0's
        self._theirs: dict[str, torch.Tensor | None] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """Collective, at the start of a validation."""
        client, own = self._client, kept(self._trainer.lightning_module)
        found = (averages_of(each) for each in self._trainer.callbacks)
        averages = [each.state_dict() for each in found if each is not None]
        if not (own or averages) or client.group.solo or client.n_workers == 1:
            return
        sent: Any = None
        if client.group.is_leader:
            values = {path: each.value for path, each in own.items()}
            sent = [_on_host(each) for each in (values, *averages)]
        known = client.gather("what all validate with", sent)[0]
        if client.group.is_leader or known is None:
            return
        self._theirs, *others = known
        for average, other in zip(averages, others, strict=True):
            for name, value in other.items():
                average[name].copy_(value)
        self._own = {path: own[path] for path in own.keys() & self._theirs.keys()}
        for path, each in self._own.items():
            put(each.buffers, each.name, self._theirs[path])

    @torch.no_grad()
    def end(self) -> None:
        """Give back the worker's own, where the validation has not written to them."""
        for path, each in self._own.items():
            now, theirs = each.now, self._theirs[path]
            if now is None or theirs is None:
                same = now is theirs
            else:
                same = torch.equal(now.cpu(), theirs)
            if same:
                each.put_back()
        self._own, self._theirs = {}, {}


def _on_host(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value is None else value.cpu() for name, value in values.items()}
