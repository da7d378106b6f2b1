"""Evaluation sets smaller than the number of workers, or that they share unevenly."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, Timer
from torch.utils.data import DataLoader, IterableDataset

from tests.lightning.toys import Recorder, Regression, distance, make_trainer, regression_data
from tests.picking import by_default


class Counting(Regression):
    """Counts what evaluation sees, and how torchmetrics sum it up."""

    def __init__(self, make_optimizer: Any = None, schedule: Any = None) -> None:
        super().__init__(make_optimizer, schedule)
        self.count = torchmetrics.SumMetric()
        self.mean = torchmetrics.MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        n, loss = len(batch[0]), torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("seen", float(n), reduce_fx="sum", sync_dist=True)
        self.log("val/loss", loss, sync_dist=True, batch_size=n)
        if dataloader_idx == 0:
            self.count.update(n)
            self.mean.update(batch[0].sum(1))
            self.log("count", self.count)
            self.log("mean", self.mean)

    test_step = validation_step


@pytest.mark.parametrize("strategy", ["hybrid", "async"])
@pytest.mark.parametrize("n", by_default([1, 2, 3, 5, 9], 1))
def test_every_sample_counts_once_however_few_there_are(strategy: str, n: int) -> None:
    data = Recorder(regression_data(n))
    truth = float(data.data.tensors[0].sum(1).mean())
    module = Counting()
    single = make_trainer("auto", 1)
    (expected,) = single.test(module, DataLoader(data.data, batch_size=2), verbose=False)
    trainer = make_trainer(strategy, 4)
    for run in (trainer.validate, trainer.test):
        (result,) = run(module, DataLoader(data, batch_size=2), verbose=False)
        assert result["seen"] == result["count"] == n
        assert result["mean"] == pytest.approx(truth, abs=1e-6)
        assert result["val/loss"] == pytest.approx(expected["val/loss"], rel=1e-5)
    assert data.counts.tolist() == [2] * n


def plateau(optimizer: Any) -> Any:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=0, factor=0.5, threshold=1e9, threshold_mode="abs"
    )
    return {"scheduler": scheduler, "monitor": "val/loss"}


@pytest.mark.parametrize("n", by_default([1, 2, 3], 1))
def test_training_with_a_tiny_validation_set_is_as_with_one_worker(n: int, tmp_path: Path) -> None:
    results = {}
    for workers, batch in ((1, 16), (4, 4)):
        stopping = EarlyStopping("val/loss", patience=2, min_delta=1e9)
        best = ModelCheckpoint(tmp_path / str(workers), monitor="val/loss", save_last=True)
        last = ModelCheckpoint(tmp_path / f"epoch-{workers}", save_on_train_epoch_end=True)
        trainer = make_trainer(
            "hybrid",
            workers,
            max_epochs=9,
            callbacks=[stopping, best, last],
            enable_checkpointing=True,
            num_sanity_val_steps=2,
        )
        pl.seed_everything(7, verbose=False)
        module = Counting(lambda p: torch.optim.SGD(p, lr=0.05), plateau)
        training = DataLoader(regression_data(32), batch_size=batch, shuffle=True)
        trainer.fit(module, training, DataLoader(regression_data(n), batch_size=2))
        assert trainer.current_epoch == 3 and stopping.stopped_epoch == 2
        assert trainer.callback_metrics["seen"] == trainer.callback_metrics["count"] == n
        state = torch.load(best.last_model_path, weights_only=True)
        assert state["optimizer_states"][0]["param_groups"][0]["lr"] == 0.05 / 2
        assert Path(last.best_model_path).is_file()
        results[workers] = (module, float(trainer.callback_metrics["val/loss"]))
    assert distance(results[1][0], results[4][0]) < 1e-6
    assert results[1][1] == pytest.approx(results[4][1], rel=1e-5)


def test_a_worker_that_rests_decides_on_checkpoints_as_the_others(tmp_path: Path) -> None:
    """It does not take it that nothing is validated, as the last validation is not the end."""
    best = ModelCheckpoint(tmp_path, monitor="val/loss", save_top_k=-1)
    trainer = make_trainer(
        "hybrid", 3, val_check_interval=2, callbacks=[best], enable_checkpointing=True
    )
    loaders = DataLoader(regression_data(60), batch_size=4), DataLoader(regression_data(2))
    trainer.fit(Counting(), *loaders)
    assert len(best.best_k_models) == 3 * 2  # of five steps in an epoch


class Timed(Counting):
    """Counts validations; each worker's ``Timer`` must have that worker's own time."""

    validations = 0

    def on_train_start(self) -> None:
        self.began = time.monotonic()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        self.validations += 1

    def on_train_end(self) -> None:
        (timer,) = [each for each in self.trainer.callbacks if isinstance(each, Timer)]
        assert timer.time_elapsed() < time.monotonic() - self.began + 0.1


def test_a_worker_that_rests_keeps_its_time() -> None:
    """That of the next validation, that of a ``Timer``; which has it afterwards, too."""
    timer, module = Timer(), Timed()
    trainer = make_trainer(
        "hybrid", 2, max_epochs=1, val_check_interval="00:00:00:01", callbacks=[timer]
    )
    trainer._val_check_time_interval = 0.2  # type: ignore[assignment]
    loaders = DataLoader(regression_data(60), 1), DataLoader(regression_data(1))
    trainer.fit(module, *loaders)
    elapsed = timer.time_elapsed()
    assert timer.time_remaining() is None and elapsed > 30 * 0.02
    assert elapsed == timer.time_elapsed()  # it has ended
    assert 1 <= module.validations <= elapsed / 0.2


def test_resting_workers_take_over_metrics_and_the_wish_to_stop() -> None:
    class Same(Counting):
        def on_train_epoch_end(self) -> None:
            everybodys = self.all_gather(self.trainer.callback_metrics["val/loss"])
            assert len(everybodys) == 4 and len(set(everybodys.tolist())) == 1
            wishes = self.all_gather(torch.tensor(float(self.trainer.should_stop)))
            assert len(set(wishes.tolist())) == 1

    for strategy in ("hybrid", "async"):
        stopping = EarlyStopping("val/loss", patience=1, min_delta=1e9)
        trainer = make_trainer(strategy, 4, max_epochs=5, callbacks=[stopping])
        trainer.fit(
            Same(), DataLoader(regression_data(32), batch_size=4), DataLoader(regression_data(1))
        )
        assert trainer.current_epoch == 2


def test_a_tiny_and_an_empty_loader_among_several_are_evaluated_once_per_sample() -> None:
    sizes = (17, 2, 0)
    data = [Recorder(regression_data(20)) for _ in sizes]
    loaders = [
        DataLoader(torch.utils.data.Subset(each, range(n)), batch_size=4)
        for each, n in zip(data, sizes, strict=True)
    ]
    results = make_trainer("hybrid", 4).test(Counting(), loaders, verbose=False)
    assert results[0]["seen/dataloader_idx_0"] == 17
    assert results[0]["count/dataloader_idx_0"] == 17
    assert results[1]["seen/dataloader_idx_1"] == 2
    assert [int(each.counts.sum()) for each in data] == list(sizes)


@pytest.mark.few(2)
@pytest.mark.parametrize("limit", [0.5, 1, 1.0, 0])  # each worker keeps one of a share
def test_a_tiny_set_with_a_limit_and_an_empty_set_are_evaluated_by_several_workers(
    limit: int | float,
) -> None:
    trainer = make_trainer("hybrid", 3, limit_test_batches=limit)
    results = trainer.test(Counting(), DataLoader(regression_data(2)), verbose=False)
    assert [result["seen"] for result in results] == ([2] if limit else [])
    empty = torch.utils.data.Subset(regression_data(2), [])
    assert trainer.test(Counting(), DataLoader(empty), verbose=False) == []


def test_a_share_of_uneven_shares_is_one_mini_batch_of_each() -> None:
    """Worker 0 has two mini-batches and worker 1 one, of which the share is less than one."""
    trainer = make_trainer("hybrid", 2, limit_test_batches=0.4)
    (result,) = trainer.test(Counting(), DataLoader(regression_data(9), 4), verbose=False)
    assert result["seen"] == 8  # 4 of worker 0's 5 samples, all 4 of worker 1's


def test_reductions_within_a_step_include_only_workers_that_still_have_a_mini_batch() -> None:
    """Worker 0 has a mini-batch more than the others."""

    class Within(Counting):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("step", float(len(batch[0])), on_step=True, sync_dist=True, reduce_fx="sum")
            present = self.all_gather(torch.tensor(self.global_rank))
            assert present.tolist() == ([0, 1, 2] if batch_idx < 2 else [0])

        test_step = validation_step

    trainer = make_trainer("hybrid", 3)
    trainer.test(Within(), DataLoader(regression_data(13), batch_size=2), verbose=False)


class Uneven(IterableDataset[Any]):
    """Every worker reads as much as it is told."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __iter__(self) -> Any:
        n = self.lengths[int(os.environ["LOCAL_RANK"])]
        yield from zip(*(t[:n] for t in regression_data(16).tensors), strict=True)


@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_streams_of_different_lengths_train_and_validate(strategy: str) -> None:
    trainer = make_trainer(strategy, 3, max_epochs=2)
    training = DataLoader(Uneven(12, 4, 7), batch_size=4)
    trainer.fit(Counting(), training, DataLoader(Uneven(5, 16, 0), batch_size=4))
    assert trainer.callback_metrics["seen"] == 21
    assert trainer.strategy.run_stats()["samples_per_worker"] == [24, 8, 14]


def test_hooks_run_in_the_ordinary_order_in_workers_that_take_part(tmp_path: Path) -> None:
    class Hooks(Counting):
        def note(self, name: str) -> None:
            with (tmp_path / str(self.global_rank)).open("a") as file:
                file.write(name + "\n")

        def on_validation_start(self) -> None:
            self.note("start")

        def on_validation_epoch_end(self) -> None:
            self.note("epoch end")

        def on_validation_end(self) -> None:
            self.note("end")

        def on_train_epoch_end(self) -> None:
            self.note("train epoch end")

    trainer = make_trainer("hybrid", 3, max_epochs=1)
    training = DataLoader(regression_data(12), batch_size=2)
    trainer.fit(Hooks(), training, DataLoader(regression_data(2)))
    notes = {path.name: path.read_text().splitlines() for path in tmp_path.iterdir()}
    evaluated = ["start", "epoch end", "end", "train epoch end"]
    assert notes == {"0": evaluated, "1": evaluated, "2": ["train epoch end"]}
