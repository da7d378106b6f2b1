"""Sparse gradients of embeddings stay sparse from the worker's backward to the optimizer's step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import TensorDataset

from tests.lightning.checkpointing.test_checkpoints import saved
from tests.lightning.step.test_optimizers import compare, fresh
from tests.lightning.toys import distance, fit, flat
from tests.picking import by_default

OPTIM = torch.optim
SGD = partial(torch.optim.SGD, lr=0.5)
WORDS = 200


def sentences(n: int = 48) -> TensorDataset:
    """``n`` samples of three words each, of which only every second word occurs, and a number."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, WORDS // 2, (n, 3), generator=generator) * 2
    return TensorDataset(words, torch.randn(n, 1, generator=generator))


class Bag(pl.LightningModule):
    """An embedding with sparse gradients alone."""

    def __init__(self, make: Any = SGD) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, 4, sparse=True)
        self.make = make

    def loss(self, batch: Any) -> Any:
        return (self.words(batch[0]).mean(dim=(1, 2)) - batch[1][:, 0]).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Mixed(Bag):
    """An embedding and a layer behind it, under one optimizer that takes both."""

    def __init__(self, make: Any = SGD) -> None:
        super().__init__(make)
        self.last = torch.nn.Linear(4, 1)

    def loss(self, batch: Any) -> Any:
        return (self.last(self.words(batch[0]).mean(dim=1)) - batch[1]).pow(2).mean()


class Padded(Bag):
    """Bags of words of which one means that there is none: its row has no gradient."""

    def __init__(self, make: Any = SGD) -> None:
        super().__init__(make)
        self.words = torch.nn.EmbeddingBag(WORDS, 4, sparse=True, mode="sum", padding_idx=0)

    def loss(self, batch: Any) -> Any:
        # Whole mini-batches of some worker are nothing but padding: no row is touched.
        words = torch.where(batch[1] > 0, batch[0], 0)
        return (self.words(words).mean(dim=1) - batch[1][:, 0]).pow(2).mean()


class Both(Mixed):
    """SparseAdam for the embedding, Adam for the rest, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        assert self.words.weight.grad.is_sparse
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return (
            OPTIM.SparseAdam(self.words.parameters(), lr=0.05),
            OPTIM.Adam(self.last.parameters(), lr=0.05),
        )


class Looking(Mixed):
    """Hooks see the averaged gradient, as sparse as under all-reduce."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.words.weight.grad.is_sparse
        self.words.weight.grad.mul_(0.5)


KINDS: dict[str, Any] = {
    "SparseAdam": partial(Bag, partial(OPTIM.SparseAdam, lr=0.05)),
    "SGD": Mixed,
    "momentum": partial(Mixed, partial(OPTIM.SGD, lr=0.5, momentum=0.9)),
    "Adagrad": partial(Mixed, partial(OPTIM.Adagrad, lr=0.1)),
    "nesterov": partial(Mixed, partial(OPTIM.SGD, lr=0.2, momentum=0.9, nesterov=True)),
    "padding": partial(Padded, partial(OPTIM.SparseAdam, lr=0.05)),
    "two optimizers": Both,
    "hooks": Looking,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", by_default([2, 3], 3))
@pytest.mark.parametrize("name", by_default(KINDS, "SparseAdam", "hooks", "two optimizers"))
def test_sparse_gradients_equal_one_process(name: str, workers: int, tmp_path: Path) -> None:
    compare(KINDS[name], tmp_path, 1e-5, workers, data=sentences())


class Watched(Mixed):
    """Says what happens to gradients on the worker, and which rows have moved."""

    def on_train_start(self) -> None:
        self.made: list[str] = []
        to_dense = torch.Tensor.to_dense

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.made.append("dense")
            return to_dense(*args, **kwargs)

        torch.Tensor.to_dense = noted  # type: ignore[method-assign]
        self.restore = lambda: setattr(torch.Tensor, "to_dense", to_dense)

    def on_train_end(self) -> None:
        self.restore()
        assert self.made == []


@pytest.mark.parametrize("strategy", by_default(["hybrid", "async"], "async"))
@pytest.mark.parametrize("module", [Watched, partial(Watched, partial(OPTIM.Adagrad, lr=0.1))])
def test_only_touched_rows_move_and_nothing_is_made_dense(module: Any, strategy: str) -> None:
    trained, _ = fit(strategy, 2, 6, module, sentences())
    moved = (trained.words.weight != fresh(module).words.weight).any(dim=1)
    seen = torch.zeros(WORDS, dtype=torch.bool)
    seen[sentences().tensors[0].flatten()] = True
    assert torch.equal(moved, seen)


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [partial(OPTIM.Adam, lr=0.01), partial(OPTIM.RMSprop, lr=0.01)])
def test_optimizers_that_want_dense_gradients_still_get_them(make: Any) -> None:
    whole, _ = fit("hybrid", 1, 12, partial(Mixed, make), sentences())
    shared, _ = fit("hybrid", 2, 6, partial(Mixed, make), sentences())
    assert distance(shared, whole) < 1e-6
    assert distance(shared, fresh(Mixed)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", by_default(["norm", "value"], "norm"))
def test_clipping_acts_on_the_mean(algorithm: str) -> None:
    clip = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    whole, _ = fit("hybrid", 1, 12, Mixed, sentences(), **clip)
    shared, _ = fit("hybrid", 2, 6, Mixed, sentences(), **clip)
    free, _ = fit("hybrid", 2, 6, Mixed, sentences())
    assert distance(shared, whole) < 1e-6
    assert distance(shared, free) > 1e-4


def test_accumulated_and_uneven_sparse_mini_batches_equal_one_process(tmp_path: Path) -> None:
    compare(Mixed, tmp_path, data=sentences(), accumulate_grad_batches=2)
    compare(Mixed, tmp_path, data=sentences(29))


@pytest.mark.few(1)
@pytest.mark.parametrize("second", ["hybrid", "auto"])
def test_a_run_with_sparse_gradients_resumes(second: str, tmp_path: Path) -> None:
    module = KINDS["SparseAdam"]
    options: dict[str, Any] = {"overfit_batches": 1.0}
    path = saved("hybrid", 2, 6, module, tmp_path, data=sentences(), **options)
    workers = 2 if second == "hybrid" else 1
    resumed, _ = fit(
        second, workers, 12 // workers, module, sentences(), str(path), max_epochs=4, **options
    )
    whole, _ = fit("hybrid", 2, 6, module, sentences(), max_epochs=4, **options)
    assert distance(resumed, whole) < (1e-6 if second == "auto" else 1e-30)
    assert flat(whole).isfinite().all()
