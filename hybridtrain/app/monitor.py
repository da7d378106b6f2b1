"""What a run does beside learning: samples/s, waiting shares and staleness, to the logger.

A strategy that knows more than Lightning does offers ``run_stats()`` (see ``RunStats``); for any
other the samples are counted here, in rank 0, and multiplied by the number of ranks.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, TypedDict

import pytorch_lightning as pl

from hybridtrain.lightning.batches import samples_in

STATS_FILE = ".run_stats.json"


class RunStats(TypedDict):
    """The numbers of a run so far.

    ``waiting_share`` has one entry for each worker, 0 to 1; none where nobody measures it.
    ``left_out``: contributions that each worker had to leave out, by the kind of fault.
    """

    updates: int
    samples: float
    samples_per_s: float
    waiting_share: list[float]
    staleness: dict[str, float]
    left_out: dict[str, list[int]]
    workers: int
    train_s: float


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
        self._samples = 0.0
        self._steps = 0
        self._began: float | None = None
        self._train_s = 0.0
        self._paused = False
        self._last_log = float("-inf")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell the loggers what this run consists of."""
        if self.hparams is not None and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_hyperparams(self.hparams)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock: validation is no training."""
        self._paused = self._began is not None
        self._stop_clock()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the clock go on, if it was going."""
        if self._paused:
            self._began = time.perf_counter()
        self._paused = False

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the batch, and log now and then."""
        self._samples += samples_in(batch) or 1
        self._steps += 1
        every = max(int(getattr(trainer, "log_every_n_steps", 1)), 1)
        now = time.perf_counter()
        if self._steps % every or now - self._last_log < self.log_every_s:
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

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Leave the numbers so far."""
        self._stop_clock()
        if self._steps:
            self._leave(trainer, self.stats(trainer))

    def stats(self, trainer: pl.Trainer) -> RunStats:
        """The numbers so far, as the strategy knows them or as counted here."""
        train_s = self._train_s
        if self._began is not None:
            train_s += time.perf_counter() - self._began
        counted = RunStats(
            updates=trainer.global_step,
            samples=self._samples * trainer.world_size,
            samples_per_s=0.0,
            waiting_share=[],
            staleness={"mean": 0.0, "max": 0.0},
            left_out={},
            workers=trainer.world_size,
            train_s=train_s,
        )
        known = getattr(trainer.strategy, "run_stats", None)
        if known is not None:
            counted.update({k: v for k, v in known().items() if k in counted})  # type: ignore[typeddict-item]
        counted["samples_per_s"] = counted["samples"] / train_s if train_s > 0 else 0.0
        return counted

    def _stop_clock(self) -> None:
        if self._began is not None:
            self._train_s += time.perf_counter() - self._began
            self._began = None

    def _log(self, trainer: pl.Trainer, stats: RunStats) -> None:
        if not trainer.is_global_zero or not trainer.loggers:
            return
        metrics: dict[str, float] = {
            "samples_per_s": stats["samples_per_s"],
            "staleness/mean": stats["staleness"]["mean"],
            "staleness/max": stats["staleness"]["max"],
        }
        metrics |= {f"waiting/worker_{i}": x for i, x in enumerate(stats["waiting_share"])}
        metrics |= {f"left_out/{fault}": sum(each) for fault, each in stats["left_out"].items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def _leave(self, trainer: pl.Trainer, stats: RunStats) -> None:
        if self.directory is not None and trainer.is_global_zero and self.directory.is_dir():
            unfinished = self.directory / f"{STATS_FILE}.new"
            unfinished.write_text(json.dumps(stats))
            unfinished.replace(self.directory / STATS_FILE)
