"""The worker's callback: at the boundaries of mini-batches and epochs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Timer

from hybridtrain.engine.monitoring.hang_detector import Doing
from hybridtrain.engine.scheme import Scheme
from hybridtrain.lightning.async_training.agreement import Validations
from hybridtrain.lightning.checkpointing.checkpoint_writing import CheckpointWriting
from hybridtrain.lightning.checkpointing.epoch_position import EpochPosition
from hybridtrain.lightning.checkpointing.epoch_state import EpochEvent
from hybridtrain.lightning.hooks.loop_hooks import validation_seconds
from hybridtrain.lightning.hooks.points import Point, around
from hybridtrain.lightning.hooks.trainer_hooks import forget_times
from hybridtrain.lightning.participation.logged_metrics import warn_of_own_means
from hybridtrain.lightning.participation.metrics_by_name import MetricsByName
from hybridtrain.lightning.preflight.strategy_checks import (
    advise,
    advise_on_interval,
    advise_on_late,
    warn_of_unused,
)
from hybridtrain.lightning.step.session import Session
from hybridtrain.lightning.worker_context import WorkerContext


@dataclass(frozen=True)
class Alignment:
    """Calls between mini-batches that bring workers to where Lightning expects them.

    Args:
        await_turn: before a mini-batch, waits until this worker may begin it.
        end_epoch: meets all workers; its argument says whether no step follows in this epoch.
        behind_last: called before a validation that follows the epoch's last mini-batch.
    """

    await_turn: Callable[[], None]
    end_epoch: Callable[[bool], None]
    behind_last: Callable[[], None]


class WorkerCallback(pl.Callback):
    """Stops the worker between steps on request; aligns free-running workers; sends heartbeats.

    One callback does all three, because another one would cost more than a heartbeat.

    Args:
        worker: this one.
        scheme: policy and exchange, for advice.
        position: of this worker in the epoch.
        metrics: what this worker has logged.
        keeping: how checkpoints are written.
        alignment: what workers do between mini-batches.
    """

    def __init__(
        self,
        worker: WorkerContext,
        scheme: Scheme,
        position: EpochPosition,
        metrics: MetricsByName,
        keeping: CheckpointWriting,
        alignment: Alignment,
    ) -> None:
        self._worker, self._scheme, self._keeping = worker, scheme, keeping
        self._position, self._metrics, self._alignment = position, metrics, alignment
        self._session: Session | None = None  # of the current training
        self._client = client = worker.client
        self._beat = client.heartbeat.beat
        self._advises = client.worker == 0
        self._marks_checkpoints = False
        self._n_batches = 0
        # Whether a worker may come too late again and again, which has not been said.
        self._looks_for_late = self._advises and worker.requirements.drops_late

    def begin(self, session: Session) -> None:
        """Training is about to begin."""
        self._session = session

    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self._beat(Doing.STARTING)
        self._keeping.prepare(trainer)
        if not self._marks_checkpoints:  # the search for a learning rate sets up many times
            around(Point.SAVE, trainer, self.save)
            self._metrics.watch_progress_bar()
            if not self._worker.requirements.whole_rounds:
                at, together = self._alignment, self._worker.collectives
                Validations(trainer, together, at.end_epoch, at.behind_last)
            self._marks_checkpoints = True

    def on_fit_start(self, trainer: Any, *_: Any) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, Timer):
                forget_times(callback)
        if validation_seconds(trainer) is not None:
            around(Point.VALIDATION_DUE, trainer.fit_loop.epoch_loop, self.validate_together)

    def validate_together(self, proceed: Callable[[Any], bool], fetcher: Any) -> bool:
        """With ``val_check_interval`` as a time, the first worker that is due decides for all."""
        return self._worker.collectives.decide(proceed(fetcher), False)

    # ---- mini-batches ---------------------------------------------------------------------------

    def on_train_batch_start(self, *_: Any) -> None:
        self._client.check_stop()
        self._alignment.await_turn()  # before any other callback, which may look at parameters
        self._beat(Doing.STEP)

    def on_train_batch_end(self, *_: Any) -> None:
        self._beat(Doing.BETWEEN)
        self._metrics.end_batch()
        self._n_batches += 1
        if self._n_batches & (self._n_batches - 1) == 0:  # 1, 2, 4, ...
            self._measure()
            self._look_for_late()

    def _measure(self) -> None:
        if self._session is not None:
            self._session.measure_device()

    def _look_for_late(self) -> None:
        if self._looks_for_late:
            found = advise_on_late(self._scheme.policy, self._client.stats())
            self._looks_for_late = not found

    def on_predict_batch_end(self, *_: Any, **__: Any) -> None:
        self._beat(Doing.BETWEEN)

    def _end_batch(self, *_: Any, **__: Any) -> None:
        self._beat(Doing.BETWEEN)
        self._metrics.end_batch()

    on_validation_batch_end = on_test_batch_end = _end_batch

    def _begin_evaluating(self, *_: Any, **__: Any) -> None:
        self._client.check_stop()
        self._beat(Doing.EVALUATION)

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _begin_evaluating

    # ---- epochs ---------------------------------------------------------------------------------

    def on_train_epoch_start(self, *_: Any) -> None:
        self._beat(Doing.EPOCH)

    def on_validation_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._beat(Doing.EPOCH)
        if self._client.worker == 0 and self._client.n_workers > 1:
            warn_of_own_means(trainer)

    def on_test_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.on_validation_epoch_end(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.on_validation_epoch_end(trainer)
        self._measure()
        self._client.check_stop()
        self._alignment.end_epoch(True)
        self._metrics.end_steps()
        self._look_for_late()
        if self._advises:
            if self._worker.requirements.evaluates:
                warn_of_unused(trainer.optimizers)
            if not self._worker.requirements.delay:  # ages by chance, not one that is fixed
                advise(trainer.optimizers, self._client.stats()["staleness"]["mean"])
            if self._session is not None and self._position.resumed is None:
                advise_on_interval(self._scheme.exchange, self._session.steps)
            self._advises = False
        self._position.on(EpochEvent.CLOSES)  # not if an exception ends this hook

    def on_validation_start(self, *_: Any) -> None:
        """Before the other callbacks, which may swap parameters for the validation."""
        self._beat(Doing.EPOCH)
        self._alignment.end_epoch(False)

    # ---- heartbeats -----------------------------------------------------------------------------

    def _end(self, *_: Any, **__: Any) -> None:
        self._beat(Doing.ENDING)

    on_train_end = teardown = on_exception = _end

    def save(self, proceed: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Send a heartbeat around every checkpoint, which may take long."""
        ends = self._client.heartbeat.doing is Doing.ENDING
        self._beat(Doing.CHECKPOINT)
        try:
            proceed(*args, **kwargs)
        finally:
            self._beat(Doing.ENDING if ends else Doing.BETWEEN)
