"""What happens at the boundaries between mini-batches and epochs."""

from __future__ import annotations

from typing import Any, Protocol

import pytorch_lightning as pl

from hybridtrain.client import Client
from hybridtrain.lightning.correcting import advise
from hybridtrain.lightning.progress import agree_on_validating


class Aligning(Protocol):
    """The strategy, as far as it is needed here."""

    def align(self) -> None: ...

    def await_turn(self) -> None: ...

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool: ...


class Boundary(pl.Callback):
    """Stops where it is asked to, with whole steps behind it; aligns workers that ran freely.

    Args:
        client: knows of requests to stop.
        strategy: aligns.
    """

    def __init__(self, client: Client, strategy: Aligning) -> None:
        self._client, self._strategy = client, strategy
        self._advises = client.worker == 0

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        agree_on_validating(trainer, self._strategy.reduce_boolean_decision)

    def on_train_batch_start(self, *_: Any) -> None:
        self._client.check_stop()
        self._strategy.await_turn()  # before any other callback, which may look at parameters

    def on_validation_batch_start(self, *_: Any) -> None:
        self._client.check_stop()

    def on_test_batch_start(self, *_: Any) -> None:
        self._client.check_stop()

    def on_predict_batch_start(self, *_: Any) -> None:
        self._client.check_stop()

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._client.check_stop()
        self._strategy.align()
        if self._advises:
            advise(trainer.optimizers, self._client.stats()["staleness"]["mean"])
            self._advises = False

    def on_validation_start(self, *_: Any) -> None:
        """Before any other callback, which may swap parameters for the validation."""
        self._strategy.align()
