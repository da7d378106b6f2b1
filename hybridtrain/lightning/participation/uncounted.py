"""What a mini-batch has left behind is taken back when its contribution did not count.

Somebody else will do the same samples. So what ``training_step`` has logged, what it has added to
torchmetrics and to buffers (batch normalisation) is put back to what it was before, and the hooks
that follow a mini-batch are not called. Attributes that user code counts in itself stay as they
are. Looking takes time at every mini-batch, so it is done only where something may not count.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torchmetrics import Metric

from hybridtrain.lightning.hooks.result_hooks import (
    put_back_metric,
    state_of_metric,
    training_results,
)
from hybridtrain.worker.client import Client


class DoesNotCount(Exception):
    """The mini-batch that was just done does not."""


class Uncounted:
    """Of one worker.

    Args:
        trainer: of this worker.
        client: hears whether what was pushed has counted.
    """

    def __init__(self, trainer: pl.Trainer, client: Client) -> None:
        self._trainer: Any = trainer
        self._client = client
        self._results: dict[str, dict[str, Any]] = {}
        self._metrics: list[tuple[Metric, Any]] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def happened(self) -> bool:
        """Whether the last step did not count."""
        return not self._client.counted

    @torch.no_grad()
    def keep(self) -> None:
        """Nothing is under way; a mini-batch begins."""
        self._client.counted = True
        module = self._trainer.lightning_module
        results = training_results(self._trainer)
        # Entries get other tensors, never other values in the same one.
        self._results = {key: dict(vars(each)) for key, each in results.items()}
        metrics = [each for each in module.modules() if isinstance(each, Metric)]
        self._metrics = [(each, state_of_metric(each)) for each in metrics]
        self._buffers = [(each, each.clone()) for each in module.buffers()]

    @torch.no_grad()
    def put_back(self) -> None:
        """All is again as it was then."""
        self._client.counted = True
        results = training_results(self._trainer)
        for key in [key for key in results if key not in self._results]:
            del results[key]
        for key, kept in self._results.items():
            vars(results[key]).update(kept)
        for metric, state in self._metrics:
            put_back_metric(metric, state)
        for buffer, value in self._buffers:
            buffer.copy_(value)
