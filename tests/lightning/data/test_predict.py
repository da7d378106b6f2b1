"""``trainer.predict`` returns what one device returns: all rows, in the order of the data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import BasePredictionWriter
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from hybridtrain.errors import UserError
from tests.lightning.toys import Regression, make_trainer, regression_data
from tests.picking import by_default


class Predicting(Regression):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        rows = torch.cat([batch[0], self.net(batch[0])], dim=1)
        return {"rows": rows, "first": rows[0], "loader": dataloader_idx}


def predicted(strategy: str, workers: int, loaders: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return make_trainer(strategy, workers, **options).predict(Predicting(), loaders)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", by_default(["hybrid", "async"], "async"))
@pytest.mark.parametrize(("n", "workers"), [(37, 3), (16, 2), (5, 4), (1, 3)])
def test_predicted_rows_are_those_of_one_device_in_the_same_order(
    strategy: str, n: int, workers: int
) -> None:
    loader = DataLoader(regression_data(n), batch_size=4)
    assert same(predicted(strategy, workers, loader), predicted("auto", 1, loader))


@pytest.mark.few(2)
@pytest.mark.parametrize("limit", [1, 3, 0.5, 1.0, 0])
def test_a_limit_is_one_for_all_workers_together(limit: int | float) -> None:
    loader = DataLoader(regression_data(37), batch_size=4)
    ours = predicted("hybrid", 3, loader, limit_predict_batches=limit)
    assert same(ours, predicted("auto", 1, loader, limit_predict_batches=limit))


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("limit", [0.5, 0.3, 2])
def test_a_share_limits_loaders_that_all_workers_read_whole(
    limit: int | float, workers: int
) -> None:
    loader = DataLoader(regression_data(37), batch_size=4)
    options: dict[str, Any] = {"limit_predict_batches": limit, "use_distributed_sampler": False}
    ours = predicted("hybrid", workers, loader, **options)
    assert same(ours, predicted("auto", 1, loader, **options))


def test_a_stream_has_no_share() -> None:
    with pytest.raises(MisconfigurationException, match="IterableDataset"):
        predicted("hybrid", 2, DataLoader(Stream(), batch_size=2), limit_predict_batches=0.5)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": None},
        {"batch_size": 4, "drop_last": True},
        {"batch_size": 4, "num_workers": 1},
        {"batch_sampler": BatchSampler(SequentialSampler(range(21)), 5, False)},
    ],
    ids=["items", "drop_last", "loader processes", "batch sampler"],
)
def test_predictions_are_those_of_one_device_however_mini_batches_are_made(
    options: dict[str, Any],
) -> None:
    data = regression_data(21)
    if options.get("batch_size", 1) is None:
        data = torch.utils.data.TensorDataset(*(t.unsqueeze(1) for t in data.tensors))
    loader = DataLoader(data, **options)
    assert same(predicted("hybrid", 2, loader), predicted("auto", 1, loader))


def test_predictions_for_a_loader_with_fewer_mini_batches_than_workers_equal_one_device() -> None:
    sizes = (23, 2, 9)
    loaders = [DataLoader(regression_data(n), batch_size=4) for n in sizes]
    ours, theirs = predicted("hybrid", 3, loaders), predicted("auto", 1, loaders)
    assert [len(outputs) for outputs in ours] == [6, 1, 3]
    assert same(ours, theirs)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from zip(*regression_data(10).tensors, strict=True)


def test_a_stream_that_everybody_reads_is_worker_zeros() -> None:
    loader = DataLoader(Stream(), batch_size=4)
    assert same(predicted("hybrid", 2, loader), predicted("auto", 1, loader))


def test_predict_returns_none_if_predictions_are_unwanted_or_data_is_empty() -> None:
    trainer = make_trainer("hybrid", 2)
    loader = DataLoader(regression_data(9), batch_size=4)
    assert trainer.predict(Predicting(), loader, return_predictions=False) is None
    empty = torch.utils.data.Subset(regression_data(9), [])
    assert trainer.predict(Predicting(), DataLoader(empty)) is None


def test_outputs_that_cannot_travel_are_named() -> None:
    class Opaque(Predicting):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return lambda: batch

    loader = DataLoader(regression_data(9), batch_size=4)
    with pytest.raises(UserError, match=r"predict_step returns cannot.*return_predictions=False"):
        make_trainer("hybrid", 2).predict(Opaque(), loader)
    assert make_trainer("hybrid", 2).predict(Opaque(), loader, return_predictions=False) is None


class Writer(BasePredictionWriter):
    """Writes predictions with the indices that they belong to."""

    def __init__(self, folder: Path, interval: Any) -> None:
        super().__init__(interval)
        self.folder = folder

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *_: Any
    ) -> None:
        path = self.folder / f"batch-{trainer.global_rank}-{batch_indices[0]}.pt"
        torch.save((batch_indices, prediction["rows"]), path)

    def write_on_epoch_end(
        self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any
    ) -> None:
        (indices,) = batch_indices
        for number, (places, prediction) in enumerate(zip(indices, predictions, strict=True)):
            path = self.folder / f"epoch-{trainer.global_rank}-{number}.pt"
            torch.save((places, prediction["rows"]), path)


@pytest.mark.few(2)
@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
@pytest.mark.parametrize("n", [22, 3])
def test_writers_get_the_true_indices(interval: Any, n: int, tmp_path: Path) -> None:
    data = regression_data(n)
    trainer = make_trainer("hybrid", 2, callbacks=[Writer(tmp_path, interval)])
    trainer.predict(Predicting(), DataLoader(data, batch_size=4), return_predictions=False)
    for kind in interval.split("_and_"):
        seen: list[int] = []
        for path in tmp_path.glob(f"{kind}-*.pt"):
            places, rows = torch.load(path)
            assert torch.equal(rows[:, :4], data.tensors[0][places])
            seen += places
        assert sorted(seen) == list(range(n))
