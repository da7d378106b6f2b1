"""Rows of ``history.csv`` have what was logged for their epoch, and losses as they are."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain.cli.straggler import AtTarget
from hybridtrain.cli.telemetry.monitor import RunMonitor
from hybridtrain.cli.telemetry.progress import PlainProgress, Rate
from hybridtrain.report.history import HISTORY_FILE
from tests.lightning.toys import make_trainer
from tests.picking import by_default


class Logs(pl.LightningModule):
    """Its loss is 8 throughout; it logs means of its own at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.p = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("train_loss", torch.tensor(100.0 + self.current_epoch), on_epoch=True)
        return self.p.sum() * 0 + 8.0

    def on_train_epoch_end(self) -> None:
        self.log("train/acc", 10.0 + self.current_epoch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/acc", 20.0 + self.current_epoch, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows_of(folder: Path, strategy: str, validates: bool, **options: Any) -> list[dict[str, str]]:
    def loader() -> Any:
        return DataLoader(TensorDataset(torch.zeros(8)), batch_size=1)

    workers = 1 if strategy == "auto" else 2
    callbacks = [RunMonitor(folder)]
    trainer = make_trainer(strategy, workers, callbacks=callbacks, max_epochs=3, **options)
    trainer.fit(Logs(), loader(), loader() if validates else None)
    with (folder / HISTORY_FILE).open() as file:
        return list(csv.DictReader(file))


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("strategy", by_default(["auto", "hybrid", "async", "local_sgd"], "hybrid"))
def test_what_a_module_logs_at_the_end_of_an_epoch_is_in_its_row(
    strategy: str, validates: bool, tmp_path: Path
) -> None:
    rows = rows_of(tmp_path, strategy, validates)
    told = [(int(row["epoch"]), float(row["train/acc"])) for row in rows if row["train/acc"]]
    assert [value for _, value in told] == [10, 11, 12]
    samples = [float(row["samples"]) for row in rows if row["train/acc"]]
    assert samples == [8, 16, 24]
    if validates:
        assert [float(row["val/acc"]) for row in rows if row["val/acc"]] == [20, 21, 22]


@pytest.mark.parametrize("strategy", by_default(["auto", "hybrid", "async"], "hybrid"))
def test_metrics_of_the_checkpoint_are_not_those_of_the_resumed_epoch(
    strategy: str, tmp_path: Path
) -> None:
    """Its second epoch was validated; its third, which resumes, is not."""
    data, last = DataLoader(TensorDataset(torch.zeros(8)), batch_size=1), None
    workers = 1 if strategy == "auto" else 2
    for epochs in (2, 3):
        callbacks = [RunMonitor(tmp_path), ModelCheckpoint(tmp_path / "files", save_last=True)]
        options = {"check_val_every_n_epoch": 2, "enable_checkpointing": True}
        trainer = make_trainer(strategy, workers, callbacks=callbacks, max_epochs=epochs, **options)
        trainer.fit(Logs(), data, data, ckpt_path=last, weights_only=False)
        last = tmp_path / "files/last.ckpt"
    with (tmp_path / HISTORY_FILE).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["train/acc"] for row in rows if row["train/acc"]][-1] == "12"
    assert not any(row.get("val/acc") for row in rows)


@pytest.mark.parametrize("strategy", by_default(["auto", "hybrid", "async"], "hybrid"))
def test_a_checkpoint_behind_a_training_has_what_it_counted(strategy: str, tmp_path: Path) -> None:
    trainer = make_trainer(strategy, 1, callbacks=[RunMonitor(None)], max_epochs=2)
    trainer.fit(Logs(), DataLoader(TensorDataset(torch.zeros(8)), batch_size=2))
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    content = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert content["callbacks"]["RunMonitor"]["total"] == {"updates": 8, "samples": 16}


@pytest.mark.parametrize("strategy", by_default(["auto", "hybrid", "async"], "hybrid"))
def test_the_loss_in_training_is_no_metric_of_the_same_name(strategy: str, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, strategy, True, accumulate_grad_batches=2)
    assert {float(row["train_loss"]) for row in rows if row["train_loss"]} == {8.0}
    assert [float(row["logged/train_loss"]) for row in rows if row["logged/train_loss"]]


def test_the_loss_on_the_terminal_is_not_divided() -> None:
    rate, trainer, module = Rate(), make_trainer("auto", 1, accumulate_grad_batches=4), Logs()
    rate.see({"loss": torch.tensor(2.0)}, trainer, module)
    assert rate.numbers(trainer)["loss"] == "8"
    module.automatic_optimization, by_hand = False, Rate()
    by_hand.see({"loss": torch.tensor(2.0)}, trainer, module)
    assert by_hand.numbers(trainer)["loss"] == "2", "Lightning has not divided it"


@pytest.mark.parametrize(
    ("mode", "target", "reached", "short"),
    [("max", 0.95, 171 / 180, 170 / 180), ("min", 0.1, 3 / 30, 4 / 30), ("min", 0.0, 0.0, 1e-6)],
)
def test_training_ends_with_a_value_that_is_the_target(
    mode: str, target: float, reached: float, short: float
) -> None:
    ends = AtTarget("val", mode, target)
    assert isinstance(ends, EarlyStopping)
    for value, stops in ((short, False), (reached, True)):
        now = torch.tensor(value, dtype=torch.float32)
        assert bool(ends.monitor_op(now, ends.stopping_threshold)) == stops
    assert AtTarget("val", mode, None).stopping_threshold is None


def test_a_mean_of_many_losses_of_16_bits_does_not_stop_at_1024() -> None:
    monitor, plain = RunMonitor(None), pl.Trainer(logger=False, enable_checkpointing=False)
    for _ in range(3000):
        monitor._keep_loss(torch.tensor(2.0, dtype=torch.bfloat16), plain, Logs())
    assert float(monitor._loss_sum) / monitor._n_losses == 2.0


def test_the_line_that_ends_an_epoch_has_the_figures_of_now(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Falls(Logs):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.p.sum() * 0 + 8.0 - batch_idx

    data = DataLoader(TensorDataset(torch.zeros(4)), batch_size=1)
    options = {"max_epochs": 1, "enable_progress_bar": True}
    make_trainer("auto", 1, callbacks=[PlainProgress(0.0)], **options).fit(Falls(), data)
    lines = [line for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert "batch 1/4  loss 8" in lines[0] and "done  loss 5" in lines[-1]
