"""What a run does beside learning: samples/s, waiting shares and staleness, to the logger.

A strategy that knows more than Lightning does offers ``run_stats()`` (see ``RunStats``); for any
other the samples are counted here, in rank 0, and multiplied by the number of ranks. Whatever the
loggers, the curve of the run is left in ``history.csv`` (see :mod:`hybridtrain.report.history`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from hybridtrain.cli.telemetry.run_stats import RunStats
from hybridtrain.lightning.data.batch_size import samples_in
from hybridtrain.lightning.hooks.loop_hooks import logged_step
from hybridtrain.lightning.hooks.result_hooks import callback_metrics
from hybridtrain.lightning.run_context import strategy_of
from hybridtrain.report.history import History

STATS_FILE = ".run_stats.json"
VALIDATED = "validated"  # in checkpoints: the metrics of the validation before it


MOST_BINS = 60  # of a histogram; staleness is wide where many workers run freely


def scalars(stats: RunStats) -> dict[str, float]:
    """One number for each name. What nobody has counted is left out."""
    staleness = stats.staleness
    found: dict[str, float] = {"samples_per_s": stats.samples_per_s}
    found |= {f"staleness/{k}": staleness[k] for k in ("mean", "max") if k in staleness}
    found |= {f"waiting/worker_{i}": x for i, x in enumerate(stats.waiting_share)}
    found |= {f"lead/worker_{i}": x for i, x in enumerate(stats.lead.get("now", []))}
    found |= {f"left_out/{fault}": sum(each) for fault, each in stats.left_out.items()}
    if stats.dropped:
        found["dropped"] = sum(stats.dropped)
    if stats.effective_batch is not None:
        found["effective_batch"] = stats.effective_batch
    return found


def log_histogram(logger: Any, name: str, ages: Mapping[int, int], step: int) -> None:
    """A histogram of whole numbers, exactly, where the logger's writer can take one.

    TensorBoard's writers can (``add_histogram_raw``); for any other logger nothing happens.

    Args:
        ages: how often each number came.
    """
    writer = getattr(logger, "experiment", None)
    add = getattr(writer, "add_histogram_raw", None)
    if add is None or not ages:
        return
    width = -(-(max(ages) + 1) // MOST_BINS)  # numbers in a bin
    counts = [0] * (max(ages) // width + 1)
    for age, count in ages.items():
        counts[age // width] += count
    add(
        name,
        min=float(min(ages)),
        max=float(max(ages)),
        num=sum(ages.values()),
        sum=float(sum(age * n for age, n in ages.items())),
        sum_squares=float(sum(age * age * n for age, n in ages.items())),
        bucket_limits=[(i + 1) * width - 0.5 for i in range(len(counts))],
        bucket_counts=counts,
        global_step=step,
    )


class RunMonitor(pl.Callback):
    """Counts, times and logs; leaves the last numbers in ``directory`` for the summary.

    Args:
        directory: the run directory; None writes no file.
        log_every_s: at most this often, besides ``trainer.log_every_n_steps``.
    """

    def __init__(self, directory: str | None = None, log_every_s: float = 1.0) -> None:
        self.directory = Path(directory) if directory is not None else None
        self.log_every_s = log_every_s
        self.hparams: dict[str, Any] | None = None  # given by the command line, logged at the start
        self.goes_on_at: int | None = None  # updates behind the checkpoint of a run that goes on
        self._samples = 0.0
        self._first = 0  # updates behind the checkpoint that training goes on from
        self._counts = True  # nobody knows better
        self._steps, self._every = 0, 1
        self._began: float | None = None
        self._train_s = 0.0
        self._paused = False
        self._last_log = float("-inf")
        self._made = time.monotonic()  # one clock for all processes of a host
        self._history: History | None = None
        self._refused = False  # by the disk
        self._follows = False  # another process, and does not know its time yet
        self._loss_sum: torch.Tensor | None = None  # since the last row
        self._n_losses = 0
        self._ages: dict[int, int] = {}  # at the last log
        self._metrics: dict[str, torch.Tensor] = {}  # at the last validation
        self._before: dict[str, torch.Tensor] = {}  # a validation: what was known then
        self._validated: dict[str, float] = {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell the loggers what this run consists of, and begin its history."""
        if self.directory is not None and trainer.is_global_zero and self.directory.is_dir():
            self._history = History(self.directory)
        if self.hparams is not None and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_hyperparams(self.hparams)

    def succeed(self, trainer: pl.Trainer) -> None:
        """Another process has written so far; this one goes on with the history."""
        if self.directory is not None and self.directory.is_dir():
            self._history = History(self.directory)
            with self._disk():
                self._history.take_over()
        self._follows = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._counts = getattr(strategy_of(trainer), "run_stats", None) is None
        self._first = trainer.global_step
        self._every = max(int(getattr(trainer, "log_every_n_steps", 1)), 1)
        if self._history is not None and self.goes_on_at is not None:
            with self._disk():
                self._history.go_on(self.goes_on_at, self.stats(trainer).updates)
        self._began = time.perf_counter()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock: validation is no training."""
        self._paused = self._began is not None
        self._stop_clock()
        self._before = dict(callback_metrics(trainer))  # and collect nothing

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the clock go on, if it was going."""
        if self._paused:
            self._began = time.perf_counter()
        self._paused = False
        metrics = self._fresh_metrics(trainer)  # on every rank: to read one may be a collective
        if not trainer.sanity_checking:
            known = self._metrics.items()
            self._validated = {k: float(v) for k, v in known if v is not self._before.get(k)}
        if self._history is not None and not trainer.sanity_checking:
            self._record(trainer, self.stats(trainer), metrics)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and log now and then."""
        if self._counts:
            self._samples += samples_in(batch) or 1
        self._steps += 1
        if self._history is not None:
            self._keep_loss(outputs, trainer, pl_module)
            if self._history.due(self._elapsed_s()):
                self._record(trainer, self.stats(trainer), {})
        if self._steps % self._every:
            return
        now = time.perf_counter()
        if now - self._last_log < self.log_every_s:
            return
        self._last_log = now
        stats = self.stats(trainer)
        self._log(trainer, stats)
        self._leave(trainer, stats)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log and leave the final numbers."""
        self._stop_clock()
        stats = self.stats(trainer)
        self._log(trainer, stats)
        self._leave(trainer, stats)
        self._record(trainer, stats, self._fresh_metrics(trainer))

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Leave the numbers so far."""
        self._stop_clock()
        if self._steps:
            stats = self.stats(trainer)
            self._leave(trainer, stats)
            self._record(trainer, stats, {})

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints: what the last validation has said of these weights."""
        return {VALIDATED: dict(self._validated)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of the checkpoint to go on from."""
        self._validated = dict(state_dict.get(VALIDATED, {}))

    def stats(self, trainer: pl.Trainer) -> RunStats:
        """The numbers so far, as the strategy knows them or as counted here."""
        known: Any = getattr(strategy_of(trainer), "run_stats", dict)()
        if self._follows:
            self._train_s += max(0.0, known["training_s"] - self._elapsed_s())
            self._follows = False
        train_s = self._elapsed_s()
        workers = trainer.world_size
        updates, samples = trainer.global_step - self._first, self._samples * workers
        counted = {"updates": updates, "samples": samples}
        return RunStats.of(known, **counted, workers=workers, train_s=train_s)

    def _elapsed_s(self) -> float:
        now = 0.0 if self._began is None else time.perf_counter() - self._began
        return self._train_s + now

    def _stop_clock(self) -> None:
        if self._began is not None:
            self._train_s += time.perf_counter() - self._began
            self._began = None

    def _log(self, trainer: pl.Trainer, stats: RunStats) -> None:
        if not trainer.is_global_zero or not trainer.loggers:
            return
        # As the rows of training that belong to it.
        metrics, step = scalars(stats), logged_step(trainer)
        ages = stats.staleness.get("histogram", {})
        fresh = {age: n - self._ages.get(age, 0) for age, n in ages.items()}
        self._ages = dict(ages)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
            with self._disk():
                log_histogram(logger, "staleness", {k: n for k, n in fresh.items() if n > 0}, step)

    def _leave(self, trainer: pl.Trainer, stats: RunStats) -> None:
        if self.directory is not None and trainer.is_global_zero and self.directory.is_dir():
            with self._disk():
                unfinished = self.directory / f"{STATS_FILE}.new"
                unfinished.write_text(json.dumps(vars(stats)))
                unfinished.replace(self.directory / STATS_FILE)

    @contextmanager
    def _disk(self) -> Iterator[None]:
        """A disk that is full ends no run, and that is said once."""
        try:
            yield
        except OSError as error:
            if not self._refused:
                rank_zero_warn(f"{self.directory}: the curve of the run is lost ({error.strerror})")
            self._refused = True

    # ---- history --------------------------------------------------------------------------------

    def _keep_loss(self, outputs: Any, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add to the mean until the next row; no number is read from the device."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return
        loss = loss.detach()
        if pl_module.automatic_optimization and trainer.accumulate_grad_batches != 1:
            loss = loss * trainer.accumulate_grad_batches  # Lightning has divided it
        if self._loss_sum is None:
            self._loss_sum = loss.clone()
        else:
            self._loss_sum += loss
        self._n_losses += 1

    def _fresh_metrics(self, trainer: pl.Trainer) -> dict[str, float]:
        """What has been logged since the last call."""
        now = dict(trainer.callback_metrics)
        fresh = {k: float(v) for k, v in now.items() if v is not self._metrics.get(k)}
        self._metrics = now
        return fresh

    def _record(self, trainer: pl.Trainer, stats: RunStats, metrics: dict[str, float]) -> None:
        if self._history is None or not self._history.folder.is_dir():
            return
        if not trainer.is_global_zero:  # it was, while another was away
            return
        row = {"wall_s": time.monotonic() - self._made, "epoch": trainer.current_epoch}
        row |= stats.in_history()
        if self._loss_sum is not None:
            row["train_loss"] = float(self._loss_sum) / self._n_losses
        self._loss_sum, self._n_losses = None, 0
        with self._disk():
            self._history.add({**row, **{k: v for k, v in metrics.items() if k not in row}})
