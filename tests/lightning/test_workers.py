"""Data, evaluation and what comes home from the workers."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, WeightedRandomSampler

from tests.lightning.toys import (
    Recorder,
    Regression,
    distance,
    fit,
    flat,
    make_trainer,
    regression_data,
)
from tests.picking import by_default


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["hybrid", "async"])
@pytest.mark.parametrize(
    ("n", "workers"), by_default([(48, 2), (37, 3), (5, 4), (2, 3), (1, 2)], (37, 3), (2, 3))
)
def test_every_sample_is_used_exactly_once_per_epoch(strategy: str, n: int, workers: int) -> None:
    _, trainer = fit(strategy, workers, 4, data=regression_data(n), max_epochs=3)
    stats = trainer.strategy.run_stats()
    assert stats["samples"] == 3 * n
    assert stats["workers"] == workers


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_the_data_set_is_asked_for_each_sample_once_per_epoch(strategy: str) -> None:
    data = Recorder(regression_data(48))
    fit(strategy, 3, 4, data=data, max_epochs=2)
    assert data.counts.tolist() == [2] * 48


def test_a_filler_sample_has_no_weight() -> None:
    data = Recorder(regression_data(5))
    shared, trainer = fit("hybrid", 4, 2, data=data, max_epochs=1)
    whole, _ = fit("hybrid", 1, 8, data=regression_data(5), max_epochs=1)
    assert trainer.strategy.run_stats()["samples"] == 5
    assert distance(shared, whole) < 1e-6


def test_drop_last_drops_the_incomplete_global_batch() -> None:
    data = Recorder(regression_data(29))
    pl.seed_everything(7, verbose=False)
    trainer = make_trainer("hybrid", 2, max_epochs=1)
    trainer.fit(Regression(), DataLoader(data, batch_size=4, shuffle=True, drop_last=True))
    assert trainer.global_step == 3
    assert int(data.counts.sum()) == 24


@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_a_sampler_of_the_users_own_is_drawn_once_for_all(strategy: str) -> None:
    data = Recorder(regression_data(20))
    sampler = WeightedRandomSampler([1.0] * 10 + [0.0] * 10, 40)
    trainer = make_trainer(strategy, 2, max_epochs=2)
    trainer.fit(Regression(), DataLoader(data, batch_size=5, sampler=sampler))
    assert int(data.counts.sum()) == 80
    assert int(data.counts[10:].sum()) == 0


class Whole(torch.utils.data.Dataset[Any]):
    """A data set whose items are whole mini-batches of different sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.parts = torch.split(regression_data(sum(sizes)).tensors[0], sizes)

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> Any:
        x = self.parts[index]
        return {"name": ["a"] * len(x), "x": (x, x.pow(2).sum(1, keepdim=True))}


class DictRegression(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch["x"], batch_idx)


@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_items_that_are_whole_batches_are_weighted_by_their_samples(strategy: str) -> None:
    trainer = make_trainer(strategy, 2, max_epochs=2)
    loader = DataLoader(Whole([5, 3, 7, 1, 4]), batch_size=None, shuffle=True)
    trainer.fit(DictRegression(), loader)
    assert trainer.strategy.run_stats()["samples"] == 40


class Stream(IterableDataset[Any]):
    """Rank 1 has fewer samples than rank 0."""

    def __iter__(self) -> Any:
        import os

        x, y = regression_data(40).tensors
        shares = (x[:24], y[:24]) if os.environ["LOCAL_RANK"] == "0" else (x[24:], y[24:])
        yield from zip(*shares, strict=True)


def test_a_worker_whose_stream_ends_early_is_not_waited_for() -> None:
    trainer = make_trainer("hybrid", 2, max_epochs=2)
    trainer.fit(Regression(), DataLoader(Stream(), batch_size=4))
    stats = trainer.strategy.run_stats()
    assert stats["samples_per_worker"] == [48, 32]
    assert stats["updates"] == 12


class Counting(Regression):
    """Counts what evaluation sees, and how a torchmetric sums it up."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        n = float(len(batch[0]))
        self.log("seen", n, reduce_fx="sum", sync_dist=True)
        self.mean.update(batch[0].sum(1))
        self.log("mean", self.mean)
        self.log("average", batch[0].sum(1).mean(), sync_dist=True, batch_size=len(batch[0]))

    test_step = validation_step


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", by_default(["hybrid", "async"], "hybrid"))
@pytest.mark.parametrize("n", [40, 41, 7])
def test_evaluation_counts_every_sample_exactly_once(strategy: str, n: int) -> None:
    data = regression_data(n)
    trainer = make_trainer(strategy, 3)
    (result,) = trainer.test(Counting(), DataLoader(data, batch_size=4), verbose=False)
    truth = float(data.tensors[0].sum(1).mean())
    assert result["seen"] == n
    assert result["mean"] == pytest.approx(truth, abs=1e-5)
    assert result["average"] == pytest.approx(truth, abs=1e-5)


def test_validation_in_async_sees_one_and_the_same_model_in_all_workers() -> None:
    class Same(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            everyone = self.all_gather(self.net[0].weight.detach())
            spread = (everyone - everyone[0]).abs().max()
            self.log("spread", spread, reduce_fx="max", sync_dist=True)

    trainer = make_trainer("async", 3, max_epochs=2)
    loader = DataLoader(regression_data(), batch_size=4)
    trainer.fit(Same(), loader, loader)
    assert float(trainer.callback_metrics["spread"]) == 0.0


def test_collectives_within_the_training_loop_include_all_workers(tmp_path: Path) -> None:
    class Collective(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("rank", float(self.global_rank), sync_dist=True, on_step=True)
            gathered = self.all_gather(torch.tensor([self.global_rank, batch_idx]))
            assert gathered.tolist() == [[0, batch_idx], [1, batch_idx], [2, batch_idx]]
            assert self.trainer.strategy.broadcast(f"from {self.global_rank}", 1) == "from 1"
            assert not self.trainer.strategy.reduce_boolean_decision(self.global_rank == 0)
            assert self.trainer.strategy.reduce_boolean_decision(self.global_rank == 0, all=False)
            x = loss.detach().clone().requires_grad_()
            self.all_gather(x, sync_grads=True).sum().backward()
            assert float(x.grad) == 3.0
            return loss

    _, trainer = fit("hybrid", 3, 4, Collective, max_epochs=1)
    assert float(trainer.callback_metrics["rank"]) == 1.0


def test_after_fit_the_calling_process_is_as_if_it_had_trained(tmp_path: Path) -> None:
    stopping = EarlyStopping("val/loss", patience=0, min_delta=1e9)
    checkpoint = ModelCheckpoint(monitor="val/loss", save_last=True)
    logger = CSVLogger(tmp_path)
    trainer = make_trainer(
        "hybrid",
        2,
        max_epochs=9,
        callbacks=[stopping, checkpoint],
        logger=logger,
        enable_checkpointing=True,
        log_every_n_steps=1,
    )
    module = Regression()
    before = flat(module).clone()
    loader = DataLoader(regression_data(), batch_size=6)
    trainer.fit(module, loader, loader)
    assert trainer.current_epoch == 2 and trainer.global_step == 8
    assert stopping.stopped_epoch == 1
    assert Path(checkpoint.best_model_path).is_file()
    assert Path(checkpoint.last_model_path).is_file()
    assert Path(trainer.log_dir, "metrics.csv").read_text().count("\n") > 3
    assert float(trainer.callback_metrics["val/loss"]) > 0
    assert not torch.equal(flat(module), before)
    (tested,) = trainer.test(module, loader, verbose=False)
    assert tested["val/loss"] == pytest.approx(
        float(trainer.validate(module, loader, verbose=False)[0]["val/loss"])
    )


def test_fit_twice_on_one_trainer_goes_on_where_it_ended() -> None:
    module = Regression()
    trainer = make_trainer("hybrid", 2, max_epochs=1)
    loader = DataLoader(regression_data(), batch_size=6)
    trainer.fit(module, loader)
    assert trainer.global_step == 4
    first = flat(module).clone()
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader)
    assert trainer.global_step == 12
    assert not torch.equal(flat(module), first)


def test_trap_01_no_process_group_and_no_port() -> None:
    class Looking(Regression):
        def on_train_start(self) -> None:
            assert not torch.distributed.is_initialized()

    fit("hybrid", 2, 6, Looking, max_epochs=1)


def test_trap_19_async_global_step_counts_the_updates_of_all_workers() -> None:
    class Steps(Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            assert trainer.global_step == 12 * (trainer.current_epoch + 1), "in every worker"

    _, trainer = fit("async", 3, 4, data=regression_data(48), callbacks=[Steps()], max_epochs=2)
    assert trainer.global_step == 24
    assert trainer.strategy.run_stats()["updates"] == 24


def test_async_schedules_follow_the_number_of_updates() -> None:
    def schedule(optimizer: Any) -> Any:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"scheduler": scheduler, "interval": "step"}

    class Rates(Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            # Lightning steps schedulers after this update and before this hook.
            assert rate == pytest.approx(0.01 / (1 + self.trainer.global_step))

    fit("async", 3, 4, partial(Rates, None, schedule), max_epochs=2)


def test_max_steps_ends_an_async_run() -> None:
    _, trainer = fit("async", 2, 4, max_epochs=-1, max_steps=18)
    assert 18 <= trainer.strategy.run_stats()["updates"] <= 20


def test_async_begins_from_the_modules_own_parameters() -> None:
    class Start(Regression):
        def on_train_start(self) -> None:
            start = flat(self).clone()
            pl.seed_everything(7, verbose=False)
            assert torch.equal(start, flat(Regression()))

    fit("async", 2, 6, Start, max_epochs=1)


def test_async_with_one_worker_is_plain_training() -> None:
    alone, _ = fit("async", 1, 12)
    hybrid, _ = fit("hybrid", 1, 12)
    assert torch.equal(flat(alone), flat(hybrid))


def test_mini_batches_from_loader_processes_give_the_same_bits() -> None:
    data = regression_data(48)
    inline, _ = fit("hybrid", 2, 6, max_epochs=2)
    pl.seed_everything(7, verbose=False)
    module, trainer = Regression(), make_trainer("hybrid", 2, max_epochs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(data, batch_size=6, shuffle=True, num_workers=1))
    assert torch.equal(flat(module), flat(inline))


class Marked(Recorder):
    """Each sample is made by a process whose segments would be found, if it were killed."""

    def __getitem__(self, index: int) -> Any:
        config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
        assert (Path(config["tempdir"]) / f"reader-{os.getpid()}").exists()
        return super().__getitem__(index)


def test_loader_processes_say_whose_segments_are_to_go_with_them() -> None:
    data = Marked(regression_data(8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer("hybrid", 2, max_epochs=1)
        trainer.fit(Regression(), DataLoader(data, batch_size=2, num_workers=1))
    assert data.counts.tolist() == [1] * 8


def test_a_batch_sampler_of_the_users_own_is_kept() -> None:
    class Pairs(BatchSampler):
        """Lightning re-creates it around the worker's sampler."""

    data = Recorder(regression_data(24))
    loader = DataLoader(
        data, batch_sampler=Pairs(torch.utils.data.SequentialSampler(data), 4, False)
    )
    trainer = make_trainer("hybrid", 2, max_epochs=1)
    trainer.fit(Regression(), loader)
    assert data.counts.tolist() == [1] * 24
    assert trainer.strategy.run_stats()["samples"] == 24
