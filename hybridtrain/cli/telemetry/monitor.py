"""A callback that logs samples/s, waiting shares and staleness, and writes ``history.csv``.

Our strategies offer ``run_stats()`` (see ``RunStats``); for others this callback counts the samples
of rank 0 and multiplies them by the number of ranks. ``history.csv`` has the curve of the run,
whatever its loggers (see :mod:`hybridtrain.report.history`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from hybridtrain.cli.config_values import placed
from hybridtrain.cli.telemetry.monitored import check_monitored
from hybridtrain.lightning.data.batch_size import samples_in
from hybridtrain.lightning.hooks.loop_hooks import callback_metrics, logged_step
from hybridtrain.lightning.run_context import checkpoints_of, strategy_of
from hybridtrain.report.history import KNOWN, History
from hybridtrain.util.files import write_whole
from hybridtrain.util.option_types import NotNegative, typed

STATS_FILE = ".run_stats.json"
VALIDATED = "validated"  # key in checkpoints: metrics of the last validation before it
TOTAL = "total"  # key in checkpoints: updates and samples since training began

MOST_BINS = 60  # of a histogram; staleness is wide where many workers run freely


@dataclass
class RunStats:
    """Statistics of a run so far. Lists have one entry for each worker; empty: not counted.

    ``waiting_share``: 0 to 1; ``awaited_share``: share of all waiting that is for this worker;
    ``step_s``: seconds of computing for a contribution. ``staleness``: ``mean`` and ``max`` in
    updates, counted per contribution, and ``histogram``, staleness -> contributions. ``left_out``:
    contributions that a worker left out, by the kind of fault. ``dropped``: contributions that were
    too late to count, or of an aborted step. ``lead``: contributions that a worker is (``now``) or
    was at most (``max``) ahead of the slowest. ``effective_batch``: samples per update.
    ``handed_over``: ``sent_bytes`` of all workers, and ``saved_bytes`` by compression. ``hosts``:
    of several, for each: its ``workers`` and their ``waiting_share``, the bytes that it has
    ``sent`` and ``received``, and in how many seconds. ``device_memory``: by worker, the peak
    ``needed_bytes`` (0: not measured) of its device's ``total_bytes``. ``total``: updates and
    samples of a resumed run since training began; empty: of another run, or unknown.
    """

    updates: int = 0
    samples: float = 0.0
    workers: int = 1
    train_s: float = 0.0
    samples_per_s: float = 0.0
    waiting_share: list[float] = field(default_factory=list)
    awaited_share: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    staleness: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, list[int]] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    lead: dict[str, list[int]] = field(default_factory=dict)
    effective_batch: float | None = None
    handed_over: dict[str, int] = field(default_factory=dict)
    hosts: list[dict[str, float]] = field(default_factory=list)
    device_memory: dict[str, list[int]] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ages: dict[Any, int] = self.staleness.get("histogram", {})  # JSON has keys of text
        if ages:
            self.staleness |= {"histogram": {int(age): n for age, n in ages.items()}}
        self.samples_per_s = self.samples / self.train_s if self.train_s > 0 else 0.0

    @classmethod
    def of(cls, known: Mapping[str, Any], **others: Any) -> RunStats:
        """Statistics from a strategy's ``run_stats()``, with ``others`` for missing ones."""
        names = cls.__dataclass_fields__
        return cls(**{k: v for k, v in {**others, **known}.items() if k in names})

    @property
    def waiting(self) -> float | None:
        """Mean over the workers, 0 to 1."""
        shares = self.waiting_share
        return sum(shares) / len(shares) if shares else None

    def in_history(self) -> dict[str, float]:
        """The columns for a row of ``history.csv`` (:mod:`hybridtrain.report.history`)."""
        row = {
            **{name: getattr(self, name) for name in ("train_s", "updates", "samples")},
            "waiting_share": self.waiting,
            **{f"staleness_{k}": self.staleness.get(k) for k in ("mean", "max")},
            "effective_batch": self.effective_batch,
            "dropped": sum(self.dropped) if self.dropped else None,
            "lead_max": max(self.lead.get("max", ()), default=None),
        }
        return {name: value for name, value in row.items() if value is not None}


def up_to_date(stats: RunStats | None, trainer: Any) -> RunStats | None:
    """The statistics that the monitor wrote, or newer ones of the strategy's.

    The monitor's are out of date if the disk was full.
    """
    known: Any = getattr(strategy_of(trainer), "run_stats", dict)()
    if not known.get("updates") or (stats is not None and stats.updates == known["updates"]):
        return stats
    then = {} if stats is None else stats.total
    now = {name: n + round(known[name] - getattr(stats, name)) for name, n in then.items()}
    return RunStats.of(known, workers=trainer.world_size, train_s=known["training_s"], total=now)


def whole_loss(outputs: Any, trainer: pl.Trainer, module: Any) -> torch.Tensor | None:
    """:func:`loss_of`, times the accumulated mini-batches by which Lightning has divided it."""
    loss, n = loss_of(outputs), trainer.accumulate_grad_batches
    return loss * n if loss is not None and module.automatic_optimization and n != 1 else loss


def loss_of(outputs: Any) -> torch.Tensor | None:
    """The detached loss of a training step; None: it has none."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return loss.detach() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def scalars(stats: RunStats) -> dict[str, float]:
    """The statistics to log, by name; those not counted are left out."""
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
    """Log an exact histogram of whole numbers to TensorBoard; do nothing for other loggers.

    Args:
        ages: number -> how often it occurs.
    """
    add = getattr(getattr(logger, "experiment", None), "add_histogram", None)
    if add is None or not ages:
        return
    width = -(-(max(ages) + 1) // MOST_BINS)  # numbers in a bin
    limits = np.arange(0, max(ages) + 1 + width, width) - 0.5
    add(name, np.repeat(list(ages), list(ages.values())), global_step=step, bins=limits)


class RunMonitor(pl.Callback):
    """Counts, times and logs; writes the last statistics to ``directory`` for the summary.

    Args:
        directory: the run directory; None writes no file.
        log_every_s: least time between logs, besides ``trainer.log_every_n_steps``.
    """

    @typed("callbacks.monitor.")
    def __init__(self, directory: str | Path | None = None, log_every_s: NotNegative = 1.0) -> None:
        self.directory = Path(directory) if directory is not None else None
        self.log_every_s = log_every_s
        self.hparams: dict[str, Any] | None = None
        self.resumes = False
        self._total: dict[str, int] = {}  # in the checkpoint it resumed from; empty: unknown
        self._samples = 0.0
        self._first = 0  # updates before the checkpoint
        self._counts = True  # the strategy does not count samples
        self._trains = False  # has begun to
        self._steps, self._every = 0, 1
        self._began: float | None = None
        self._train_s = 0.0
        self._paused = False
        self._last_log = float("-inf")
        self._made = time.monotonic()  # the same clock in all processes of a host
        self._history: History | None = None
        self._refused = False  # a write has failed
        self._follows = False  # has succeeded another process, whose training time it lacks
        self._loss_sum: torch.Tensor | None = None  # since the last row
        self._n_losses = 0
        self._ages: dict[int, int] = {}  # at the last log
        self._metrics: dict[str, torch.Tensor] = {}  # at the last validation
        self._before: dict[str, torch.Tensor] = {}  # metrics before the current validation
        self._validated: dict[str, float] = {}
        self._over: dict[str, Any] = {}  # where an epoch has ended whose row is not written yet
        self._means: dict[str, float] = {}  # of that epoch

    def describe(self, hparams: dict[str, Any]) -> None:
        """Log these at the start."""
        self.hparams = hparams

    def resume(self) -> None:
        """Continue the history in the directory."""
        self.resumes = True

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the hyper-parameters, and begin the history."""
        if self.directory is not None and trainer.is_global_zero and self.directory.is_dir():
            self._history = History(self.directory)
        if self.hparams is not None and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_hyperparams(self.hparams)

    def succeed(self, trainer: pl.Trainer) -> None:
        """Continue the history that another process of this run has written."""
        if self.directory is not None and self.directory.is_dir():
            self._history = History(self.directory)
            with self._disk():
                self._history.take_over()
        self._follows = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._trains = True
        self._counts = getattr(strategy_of(trainer), "run_stats", None) is None
        self._first = trainer.global_step
        self._every = max(int(getattr(trainer, "log_every_n_steps", 1)), 1)
        if not self._total and self._first == 0:
            self._total = {"updates": 0, "samples": 0}
        if self._history is not None and self.resumes and self._total:
            with self._disk():
                self._history.resume_at(**self._total)
        self._metrics = dict(callback_metrics(trainer))  # of a checkpoint: they are not fresh
        self._began = time.perf_counter()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock of training."""
        self._paused = self._began is not None
        self._stop_clock()
        self._before = dict(callback_metrics(trainer))  # without a collective

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restart the clock, if it was running, and write the metrics to the history."""
        if self._paused:
            self._began = time.perf_counter()
        self._paused = False
        self._metrics = dict(trainer.callback_metrics)  # on every rank: perhaps a collective
        if trainer.sanity_checking:
            check_monitored(trainer, pl_module)
            return
        known = self._metrics.items()
        self._validated = {k: float(v) for k, v in known if v is not self._before.get(k)}
        if self._history is not None:
            self._record(trainer, self.stats(trainer), self._validated)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note where the epoch has ended: the module's hook, which may log, comes later.

        Means of the epoch are collected now: a checkpoint of its end has them.
        """
        self._means = self._fresh_metrics(trainer)
        self._over = {} if self._history is None else self._place(trainer, self.stats(trainer))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the row of the epoch before."""
        self._close_epoch(trainer)

    def _close_epoch(self, trainer: pl.Trainer) -> None:
        """Write what training has logged, means of the epoch among it, to the history."""
        metrics, place = self._means | self._fresh_metrics(trainer), self._over
        self._means, self._over = {}, {}
        if place and metrics:
            self._add(trainer, place, metrics)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; log and write at intervals."""
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
        """Log and write the final statistics."""
        self._close_epoch(trainer)
        self._stop_clock()
        stats = self.stats(trainer)
        self._log(trainer, stats)
        self._leave(trainer, stats)
        self._record(trainer, stats, {})

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Where a resumed run had trained to its end: the total of its checkpoint."""
        if not self._trains and self._total:
            self._first = trainer.global_step
            self._leave(trainer, self.stats(trainer))

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write the statistics so far."""
        self._stop_clock()
        if self._steps:
            stats = self.stats(trainer)
            self._leave(trainer, stats)
            self._record(trainer, stats, {})

    def state_dict(self) -> dict[str, Any]:
        """The metrics of the last validation, for checkpoints."""
        return {VALIDATED: dict(self._validated), TOTAL: dict(self._total)}

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add what this run has counted to the total; not for a worker that will join this run."""
        strategy: Any = strategy_of(trainer)
        leaves = getattr(strategy, "reports_progress", False)
        if not self._total or not trainer.is_global_zero or leaves:
            return
        counts = getattr(strategy, "saved_counts", None)
        counted = self._counted(trainer) if counts is None else counts()
        checkpoint["callbacks"][self.state_key][TOTAL] = self._since_beginning(counted)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Let callbacks find their files in a run's directory that has moved."""
        states = checkpoint.get("callbacks") or {}
        if self.directory is None or not self.resumes:
            return
        now = str(self.directory.absolute())
        for callback in checkpoints_of(trainer):
            here, then = str(callback.dirpath), states.get(callback.state_key, {}).get("dirpath")
            inner = here.removeprefix(now)
            if here != inner and then not in (None, here) and str(then).endswith(inner):
                former = str(then).removesuffix(inner)
                checkpoint["callbacks"] = placed(states, self.directory.absolute(), former)
                return

    def _since_beginning(self, counted: Mapping[str, float]) -> dict[str, int]:
        return {name: n + round(counted[name]) for name, n in self._total.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the metrics from the checkpoint to resume from."""
        self._validated = dict(state_dict.get(VALIDATED, {}))
        found = state_dict.get(TOTAL, {})
        self._total = {name: int(found[name]) for name in ("updates", "samples") if found}

    def stats(self, trainer: pl.Trainer) -> RunStats:
        """The statistics so far, of the strategy or counted here."""
        known: Any = getattr(strategy_of(trainer), "run_stats", dict)()
        if self._follows:
            self._train_s += max(0.0, known["training_s"] - self._elapsed_s())
            self._follows = False
        train_s = known.get("training_s", self._elapsed_s())  # until the last update
        counted = {**self._counted(trainer), **known}
        total = self._since_beginning(counted) if any(self._total.values()) else {}
        return RunStats.of(counted, workers=trainer.world_size, train_s=train_s, total=total)

    def _counted(self, trainer: pl.Trainer) -> dict[str, float]:
        """Updates and samples, where the strategy counts none."""
        updates = trainer.global_step - self._first
        return {"updates": updates, "samples": self._samples * trainer.world_size}

    def _elapsed_s(self) -> float:
        now = 0.0 if self._began is None else time.perf_counter() - self._began
        return self._train_s + now

    def _stop_clock(self) -> None:
        self._train_s, self._began = self._elapsed_s(), None

    def _log(self, trainer: pl.Trainer, stats: RunStats) -> None:
        if not trainer.is_global_zero or not trainer.loggers:
            return
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
                write_whole(self.directory / STATS_FILE, json.dumps(vars(stats)).encode())

    @contextmanager
    def _disk(self) -> Iterator[None]:
        """Warn once of a write that fails (a full disk), and continue the run."""
        try:
            yield
        except OSError as error:
            if not self._refused:
                rank_zero_warn(f"{self.directory}: the curve of the run is lost ({error.strerror})")
            self._refused = True

    # ---- history --------------------------------------------------------------------------------

    def _keep_loss(self, outputs: Any, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the loss to the mean of the next row, without a synchronisation with the device."""
        if (loss := whole_loss(outputs, trainer, pl_module)) is None:
            return
        loss = loss.to(torch.promote_types(loss.dtype, torch.float32))  # 16 bits stop at 1024
        self._loss_sum = loss.clone() if self._loss_sum is None else self._loss_sum + loss
        self._n_losses += 1

    def _fresh_metrics(self, trainer: pl.Trainer) -> dict[str, float]:
        """The metrics logged since the last call."""
        now = dict(trainer.callback_metrics)
        fresh = {k: float(v) for k, v in now.items() if v is not self._metrics.get(k)}
        self._metrics = now
        return fresh

    def _record(self, trainer: pl.Trainer, stats: RunStats, metrics: dict[str, float]) -> None:
        self._add(trainer, self._place(trainer, stats), metrics)

    def _place(self, trainer: pl.Trainer, stats: RunStats) -> dict[str, Any]:
        """Where training is."""
        place = {"wall_s": time.monotonic() - self._made, "epoch": trainer.current_epoch}
        return place | stats.in_history()

    def _add(self, trainer: pl.Trainer, place: dict[str, Any], metrics: dict[str, float]) -> None:
        """Write a row; metrics that are called as a column of ours get a prefix."""
        if self._history is None or not self._history.folder.is_dir():
            return
        if not trainer.is_global_zero:  # it was, while worker 0 restarted
            return
        row = dict(place)
        if self._loss_sum is not None:
            row["train_loss"] = float(self._loss_sum) / self._n_losses
        self._loss_sum, self._n_losses = None, 0
        with self._disk():
            named = {f"logged/{k}" if k in KNOWN else k: v for k, v in metrics.items()}
            self._history.add(row | named)
