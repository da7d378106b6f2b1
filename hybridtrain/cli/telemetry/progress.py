"""Progress of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ProgressBar, RichProgressBar

from hybridtrain.cli.telemetry.monitor import RunMonitor, RunStats, whole_loss
from hybridtrain.util.option_types import NotNegative, typed
from hybridtrain.util.streams import say


@typed("callbacks.progress.")
def progress_bar(line_every_s: NotNegative = 10.0) -> ProgressBar:
    """The live bar on a terminal, else a line at most every ``line_every_s`` seconds."""
    return LiveProgress() if sys.stdout.isatty() else PlainProgress(line_every_s)


class Rate:
    """Loss, samples/s and other figures of the running training."""

    def __init__(self) -> None:
        self._asked = float("-inf")
        self._numbers: dict[str, str] = {}
        self._loss: torch.Tensor | None = None

    def see(self, outputs: Any, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Keep the loss of a training step, as a tensor until it is shown."""
        if (loss := whole_loss(outputs, trainer, module)) is not None:
            self._loss = loss

    def numbers(self, trainer: pl.Trainer) -> dict[str, str]:
        """The figures to show, by name; at most a second old."""
        now = time.monotonic()
        if now - self._asked >= 1.0 or "loss" not in self._numbers:
            self._asked = now
            self._numbers = self.ask(trainer)
        return dict(self._numbers)

    def ask(self, trainer: pl.Trainer) -> dict[str, str]:
        """The figures of now, by name."""
        numbers: dict[str, str] = {}
        if self._loss is not None:
            numbers["loss"] = f"{float(self._loss):.4g}"
        monitor = next((x for x in trainer.callbacks if isinstance(x, RunMonitor)), None)  # type: ignore[attr-defined]
        if monitor is not None:
            numbers |= _brief(monitor.stats(trainer))
        return numbers


def _brief(stats: RunStats) -> dict[str, str]:
    """The most important statistics, without zeros."""
    numbers = {"samples/s": f"{stats.samples_per_s:.4g}", "workers": str(stats.workers)}
    if stats.waiting is not None:
        numbers["waiting"] = f"{100 * stats.waiting:.0f} %"
    if stats.staleness.get("max"):
        numbers["stale"] = f"{stats.staleness['mean']:.1f}"
    if sum(stats.dropped):
        numbers["dropped"] = str(sum(stats.dropped))
    return numbers


class LiveProgress(RichProgressBar):
    """Lightning's rich bar, with loss, samples/s and the number of workers."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=2)
        self._rate = Rate()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Remember the loss, then draw."""
        self._rate.see(outputs, trainer, pl_module)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Lightning's metrics without the version number, and ours."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return {**metrics, **self._rate.numbers(trainer)}


class PlainProgress(ProgressBar):
    """Prints a line at intervals, for logs and pipes.

    Args:
        line_every_s: the least time between two lines; the last epoch always has one.
    """

    def __init__(self, line_every_s: float = 10.0) -> None:
        super().__init__()
        self.line_every_s = line_every_s
        self._rate = Rate()
        self._enabled = True
        self._last_line = time.monotonic()

    def disable(self) -> None:
        """Print nothing (Lightning calls this on every rank but 0)."""
        self._enabled = False

    def enable(self) -> None:
        """Print again."""
        self._enabled = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print a line when it is time."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._rate.see(outputs, trainer, pl_module)
        if time.monotonic() - self._last_line >= self.line_every_s:
            self._line(trainer, f"batch {batch_idx + 1}/{self.total_train_batches}")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print a line when it is time, and after the last epoch."""
        last = trainer.max_epochs is not None and trainer.current_epoch + 1 == trainer.max_epochs
        if last or time.monotonic() - self._last_line >= self.line_every_s:
            self._line(trainer, "done")

    def _line(self, trainer: pl.Trainer, what: str) -> None:
        self._last_line = time.monotonic()
        if not self._enabled or not trainer.is_global_zero:
            return
        total = trainer.max_epochs if trainer.max_epochs not in (None, -1) else "?"
        parts = [f"epoch {trainer.current_epoch + 1}/{total}", what]
        parts += [f"{k} {v}" for k, v in self._rate.ask(trainer).items()]
        parts += [
            f"{name} {float(value):.4g}"
            for name, value in trainer.progress_bar_metrics.items()
            if isinstance(value, int | float)
        ]
        say("  ".join(parts))
