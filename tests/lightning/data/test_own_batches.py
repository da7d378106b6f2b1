"""A batch sampler that no sampler can be put into: its mini-batches are dealt out whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from hybridtrain import HybridStrategy
from hybridtrain.errors import UserError
from tests.lightning.failover.test_coming_back import Killed
from tests.lightning.toys import Recorder, Regression, make_trainer, regression_data
from tests.picking import by_default
from tests.support.ends import wait_until

SIZES = (3, 5, 2, 6, 4, 1, 7)  # of mini-batches
N = sum(SIZES)


class Buckets:
    """Mini-batches of several sizes, in an order that changes by chance."""

    def _made(self) -> list[list[int]]:
        return [part.tolist() for part in torch.arange(N).split(SIZES)]

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._made()
        return (batches[n] for n in torch.randperm(len(batches)).tolist())

    def __len__(self) -> int:
        return len(SIZES)


class Own(BatchSampler):
    """Takes no sampler."""

    def __init__(self) -> None:
        self.buckets = Buckets()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)


class Sorted(BatchSampler):
    """Takes a sampler, and sorts what it draws into mini-batches of three sizes."""

    def __init__(self, sampler: Any, batch_size: int = 4, drop_last: bool = False) -> None:
        super().__init__(sampler, batch_size, drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.tensor(list(self.sampler)).sort().values
        return (part.tolist() for part in order.split(SIZES))

    def __len__(self) -> int:
        return len(SIZES)


class OverData(Sorted):
    """Takes its data set, with ``batch_size`` and ``drop_last``."""

    def __init__(self, dataset: Any, batch_size: int = 4, drop_last: bool = False) -> None:
        super().__init__(RandomSampler(dataset), batch_size, drop_last)

    __iter__, __len__ = BatchSampler.__iter__, BatchSampler.__len__


class Neighbours(Sorted):
    """Sorts each mini-batch of its sampler's."""

    def __iter__(self) -> Iterator[list[int]]:
        return map(sorted, BatchSampler.__iter__(self))

    __len__ = BatchSampler.__len__


class Unsized:
    def __iter__(self) -> Iterator[list[int]]:
        return iter(Buckets())


class Seen(Regression):
    """Every mini-batch must be one of those that were made."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert len(batch[0]) in SIZES
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", float(len(batch[0])), reduce_fx="sum", sync_dist=True, on_epoch=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return batch[0]


@pytest.mark.few(2)
@pytest.mark.parametrize("make", [Buckets, Own])
@pytest.mark.parametrize(
    ("strategy", "workers"),
    by_default([("hybrid", 2), ("async", 2), ("hybrid", 1)], ("hybrid", 2), ("async", 2)),
)
def test_every_sample_is_trained_on_once_in_the_mini_batches_that_were_made(
    strategy: str, workers: int, make: Any
) -> None:
    data = Recorder(regression_data(N))
    trainer = make_trainer(strategy, workers, max_epochs=2)
    trainer.fit(Seen(), DataLoader(data, batch_sampler=make()))  # type: ignore[arg-type]
    stats = trainer.strategy.run_stats()  # type: ignore[attr-defined]
    assert stats["samples"] == 2 * N
    assert stats["updates"] == 2 * -(-len(SIZES) // (workers if strategy == "hybrid" else 1))
    assert (data.counts >= 2).all()


@pytest.mark.parametrize("make", [Buckets, Own])
def test_every_sample_is_evaluated_and_predicted_once(make: Any) -> None:
    loader = DataLoader(regression_data(N), batch_sampler=make())
    trainer = make_trainer("hybrid", 2)
    (found,) = trainer.validate(Seen(), loader, verbose=False)
    assert found["seen"] == N
    pl.seed_everything(3, verbose=False)
    predicted = trainer.predict(Seen(), loader)
    assert sorted(map(len, predicted or ())) == sorted(SIZES)  # type: ignore[arg-type]
    rows = torch.cat(predicted).sort(0).values  # type: ignore[arg-type]
    assert torch.equal(rows, regression_data(N).tensors[0].sort(0).values)


class Waiting(Seen):
    """Worker 1 lets worker 0 come to a checkpoint."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            wait_until(lambda: any(self.folder.glob("*.ckpt")))
        return super().training_step(batch, batch_idx)


def loader_of(make: Any) -> DataLoader[Any]:
    data = regression_data(N)
    given = {Sorted: [SequentialSampler(data)], OverData: [data]}.get(make, [])
    return DataLoader(data, batch_sampler=make(*given))


@pytest.mark.parametrize(
    ("strategy", "make"),
    by_default(
        [("hybrid", Buckets), ("async", Buckets), ("hybrid", OverData), ("async", Sorted)],
        ("hybrid", OverData),
        ("async", Sorted),
    ),
)
def test_a_run_goes_on_in_the_midst_of_an_epoch(strategy: str, make: Any, tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    options: dict[str, Any] = {"max_epochs": 1}
    first = make_trainer(strategy, 2, callbacks=[keep], enable_checkpointing=True, **options)
    first.fit(Waiting(tmp_path), loader_of(make))
    assert first.strategy.run_stats()["samples"] == N  # type: ignore[attr-defined]
    path = min(tmp_path.glob("*.ckpt"), key=lambda p: p.stat().st_mtime_ns)
    begun = torch.load(path, weights_only=True)["hybridtrain"]["loaders"][0]
    left = sum(stop - start for start, stop in begun["spans"])
    if make is not OverData:  # which makes them of its sampler's samples, as torch's own class
        left = len(begun["indices"])
        assert sum(begun["sizes"]) == left
    assert 0 < left < N
    second = make_trainer(strategy, 2, **options)
    second.fit(Seen(), loader_of(make), ckpt_path=path)
    assert second.strategy.run_stats()["samples"] == left  # type: ignore[attr-defined]


def test_a_batch_sampler_over_a_distributed_sampler_makes_batches_of_each_workers_part() -> None:
    data = Recorder(regression_data(48))
    loader = DataLoader(data, batch_sampler=Neighbours(DistributedSampler(data, 2, 0)))
    make_trainer("hybrid", 2, max_epochs=1).fit(Regression(), loader)
    assert data.counts.tolist() == [1] * 48


@pytest.mark.slow
def test_a_restarted_worker_draws_the_mini_batches_of_a_validation_by_itself(
    tmp_path: Path,
) -> None:
    data = Recorder(regression_data(16))
    checked = DataLoader(data, batch_sampler=Neighbours(SequentialSampler(data)))
    strategy = HybridStrategy(on_failure="restart")
    trainer = make_trainer(strategy, 2, max_epochs=2, callbacks=[Killed(tmp_path, 1, 2)])
    trainer.fit(Regression(), DataLoader(regression_data(), batch_size=4), checked)
    assert trainer.strategy.run_stats()["samples"] == 96
    assert data.counts.tolist() == [2] * 16


def test_a_batch_sampler_without_a_length_is_refused_with_a_way_out() -> None:
    with pytest.raises(UserError, match=r"batch sampler \(Unsized\) without a length.*__len__"):
        make_trainer("hybrid", 2).fit(
            Seen(),
            DataLoader(regression_data(N), batch_sampler=Unsized()),  # type: ignore[arg-type]
        )
