"""Callbacks that log every so many steps have a row of each multiple, and none has two."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.callbacks import LearningRateMonitor
from pytorch_lightning.loggers.logger import Logger

from tests.lightning.metamorphic import strategies
from tests.lightning.toys import Manual, Regression, fit
from tests.picking import by_default

EVERY, RATE = 3, 0.01


class Rows(Logger):
    """Writes each row to a file, as it comes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    name = version = "rows"

    def log_hyperparams(self, *_: Any) -> None:
        """Nothing."""

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.note({"step": step, **{name: float(value) for name, value in metrics.items()}})

    def note(self, row: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def values(self, name: str) -> list[Any]:
        """The step and the value of each row that has the name."""
        rows = map(json.loads, self.path.read_text().splitlines())
        return [(row["step"], row[name]) for row in rows if name in row]


class Begins(pl.Callback):
    """Notes the number of a row at the beginning of each mini-batch, in worker 0."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            trainer.logger.note({"step": step, "begins": 1})


class Scheduled(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ByHand(Manual, Scheduled):
    """The same, without a step of the schedule."""


CHOSEN = [
    ("async", 3, "automatic"),
    ("hogwild", 2, "manual"),
    ("k_batch_async", 2, "accumulating"),
    ("hybrid", 2, "automatic"),
]


def due(begins: Sequence[int]) -> list[int]:
    """The beginnings that can make a multiple of ``EVERY``, or come after one."""
    before = [-1, *begins[:-1]]
    return [b for a, b in zip(before, begins, strict=True) if (b + 1) // EVERY > (a + 1) // EVERY]


@pytest.mark.few(2)
@pytest.mark.parametrize(("strategy", "workers", "kind"), by_default(strategies.cells(), *CHOSEN))
def test_the_learning_rate_is_logged_at_every_multiple(
    strategy: str, workers: int, kind: str, tmp_path: Path
) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    options: dict[str, Any] = {
        "logger": rows,
        "log_every_n_steps": EVERY,
        "callbacks": [LearningRateMonitor("step"), Begins()],
        "accumulate_grad_batches": 2 if kind == "accumulating" else 1,
    }
    made = strategies.make(strategy, workers)
    _, trainer = fit(made, workers, 2, ByHand if kind == "manual" else Scheduled, **options)
    begins = list(dict.fromkeys(step for step, _ in rows.values("begins")))
    rates = rows.values("lr-SGD")
    steps = [step for step, _ in rates]
    if kind == "accumulating":  # as on one device, each of the mini-batches asks
        steps = list(dict.fromkeys(steps))
    assert steps == due(begins)
    if kind == "automatic" and not trainer.strategy.requirements.schedules_own_steps:
        assert [rate for _, rate in rates] == pytest.approx([RATE / (1 + n) for n in steps])
    logged = [step for step, _ in rows.values("train/loss")]
    assert len(set(logged)) == len(logged)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", by_default(strategies.NAMES, "async", "easgd"))
def test_one_worker_logs_as_one_device(strategy: str, tmp_path: Path) -> None:
    both = [Rows(tmp_path / name) for name in ("one", "device")]
    logged = partial(fit, workers=1, batch_size=4, module=Scheduled, log_every_n_steps=EVERY)
    for rows, name in zip(both, (strategy, "auto"), strict=True):
        callbacks = [LearningRateMonitor("step"), Begins()]
        logged(strategies.make(name, 1), logger=rows, callbacks=callbacks)
    if not strategies.is_lock_step(strategy) or strategy == "hybrid":
        ones = [step for step, _ in both[0].values("lr-SGD")]
        assert ones or strategy in {"easgd", "async_diloco"}
    if strategy in {"async", "hogwild", "synchronous", "hybrid", "backup"}:
        assert both[0].values("lr-SGD") == both[1].values("lr-SGD")
