"""Every module and datamodule of ``pytorch_lightning.demos`` that can train, unmodified."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.demos import boring_classes, transformer
from pytorch_lightning.demos.boring_classes import (
    BoringDataModule,
    BoringDataModuleNoLen,
    BoringModel,
    DemoModel,
    IterableBoringDataModule,
    ManualOptimBoringModel,
    Net,
    RandomDataset,
    RandomDictDataset,
    RandomIterableDatasetWithLen,
)
from pytorch_lightning.demos.lstm import LightningLSTM
from pytorch_lightning.demos.mnist_datamodule import MNISTDataModule
from pytorch_lightning.demos.transformer import LightningTransformer, WikiText2
from torch.utils.data import DataLoader

from tests.foreign.strangers import alone, apart, same_bits, seeded, train, union
from tests.picking import by_default


def test_no_module_of_the_demos_is_forgotten() -> None:
    kinds = {
        name
        for name, kind in vars(boring_classes).items()
        if isinstance(kind, type)
        and issubclass(kind, pl.LightningModule | pl.LightningDataModule)
        and kind.__module__ == boring_classes.__name__
    }
    assert kinds == {
        "BoringModel",
        "ManualOptimBoringModel",
        "DemoModel",
        "BoringDataModule",
        "BoringDataModuleNoLen",
        "IterableBoringDataModule",
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [BoringModel, ManualOptimBoringModel, DemoModel])
def test_the_boring_modules_equal_one_process_on_the_union_of_the_batches(kind: Any) -> None:
    data = seeded(RandomDataset, 32, 64)
    module, reference = seeded(kind), seeded(kind)
    trainer, losses = train(module, train_dataloaders=DataLoader(data, batch_size=4))
    expected, _ = alone(reference, train_dataloaders=union(data, 8))
    assert trainer.global_step == expected.global_step == 24
    if kind is DemoModel:  # its loss is a sum, so the mean over workers is half of the union's;
        assert apart(module, reference) < 1e-3  # Adam takes the scale out again, but for eps
    else:
        assert apart(module, reference) < 1e-5
    assert losses.fell()


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", by_default(["hybrid", "async"], "async"))
@pytest.mark.parametrize("kind", [BoringModel, ManualOptimBoringModel])
def test_the_boring_modules_own_loaders_and_steps_all_run(strategy: str, kind: Any) -> None:
    module = seeded(kind)
    trainer, losses = train(module, strategy, max_epochs=1)
    assert trainer.global_step == (32 if strategy == "hybrid" else 64)
    assert losses.values.isfinite().all()  # at its learning rate one sample at a time diverges
    assert trainer.validate(module, verbose=False) == [{}]
    assert trainer.test(module, verbose=False) == [{}]
    assert trainer.predict(module)


def test_the_boring_datamodule_equals_one_process_on_the_union_of_the_batches() -> None:
    module, reference = seeded(BoringModel), seeded(BoringModel)
    trainer, losses = train(module, datamodule=(data := BoringDataModule()), max_epochs=2)
    subset = data.random_full.data[:64]
    alone(reference, train_dataloaders=union(subset, 2), max_epochs=2)
    assert apart(module, reference) < 1e-5
    assert losses.fell()
    assert trainer.test(module, datamodule=data, verbose=False) == [{}]


def test_the_boring_datamodule_without_a_length_equals_one_process_to_the_bit() -> None:
    """Its data sets draw random numbers: the same in every worker, as under DDP."""
    few: dict[str, Any] = {"limit_train_batches": 40, "max_epochs": 1}
    train(module := seeded(BoringModel), datamodule=BoringDataModuleNoLen(), **few)
    alone(reference := seeded(BoringModel), datamodule=BoringDataModuleNoLen(), **few)
    assert same_bits(module, reference)


class Listed(BoringModel):
    """As the test of the demo has it: a module for batches that are lists of two."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(torch.cat(list(batch)), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().test_step(batch, batch_idx)


def test_the_iterable_boring_datamodule_mixes_loaders_with_and_without_a_length() -> None:
    module, data = seeded(Listed), IterableBoringDataModule()
    trainer, losses = train(module, datamodule=data, max_epochs=2)
    assert losses.fell()
    assert len(trainer.test(module, datamodule=data, verbose=False)) == 2


class Summing(DemoModel):
    def training_step(self, batch: Any, batch_nb: int) -> Any:
        x = batch["a"] * batch["b"] if isinstance(batch, dict) else batch
        return self(x).pow(2).mean()


@pytest.mark.parametrize(
    "data", [RandomDictDataset(32, 32), RandomIterableDatasetWithLen(32, 32)], ids=["dict", "len"]
)
def test_dict_and_sized_iterable_data_sets_of_the_demos_are_trained_on(data: Any) -> None:
    _, losses = train(seeded(Summing), train_dataloaders=DataLoader(data, batch_size=4))
    assert losses.fell()


class Convolutional(pl.LightningModule):
    """Around the demos' ``Net``, as their MNIST example has it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.nll_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        right = self.net(batch[0]).argmax(1) == batch[1]
        self.log("accuracy", right.float().mean(), sync_dist=True, batch_size=len(right))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@pytest.mark.slow
def test_the_mnist_datamodule_and_the_demo_net_equal_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files it would download are there already: bars whose place is the digit."""
    monkeypatch.setenv("PL_USE_MOCKED_MNIST", "1")
    folder = tmp_path / "data" / "MNIST" / "complete"
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for name, n in (("training.pt", 160), ("test.pt", 32)):
        digits = torch.arange(n) % 10
        images = torch.randint(0, 40, (n, 28, 28), generator=generator, dtype=torch.uint8)
        for image, digit in zip(images, digits.tolist(), strict=True):
            image[2 * digit : 2 * digit + 4] = 250
        torch.save((images, digits), folder / name)

    def data() -> Any:
        return MNISTDataModule(str(tmp_path / "data"), 32, num_workers=0, batch_size=16)

    pl.seed_everything(11, verbose=False)
    # The net has dropout, so every worker gets the same batches.
    options: dict[str, Any] = {"use_distributed_sampler": False, "precision": "64-true"}
    trainer, losses = train(module := Convolutional(), datamodule=data(), **options)
    (tested,) = trainer.test(module, datamodule=data(), verbose=False)
    pl.seed_everything(11, verbose=False)
    alone(reference := Convolutional(), datamodule=data(), **options)
    assert apart(module, reference) < 1e-9
    assert losses.fell() and tested["accuracy"] > 0.5


@pytest.fixture
def wikitext(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A small text where the demos look for theirs, so nothing is downloaded; its vocabulary."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformer, "_REQUESTS_AVAILABLE", True)  # asked for, and never used
    monkeypatch.setitem(sys.modules, "requests", ModuleType("requests"))
    (tmp_path / "data").mkdir()
    words = " ".join(f"w{(i * i) % 13}" for i in range(30))
    (tmp_path / "data" / "wikitext-2.txt").write_text(f"{words}\n" * 40)
    return WikiText2(download=False).vocab_size


@pytest.mark.parametrize(
    ("kind", "steps"),
    [(LightningTransformer, 3), pytest.param(LightningLSTM, 2, marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_the_language_models_with_dropout_equal_one_process(
    kind: Any, steps: int, wikitext: int
) -> None:
    """The LSTM keeps its hidden state from batch to batch, in each worker."""
    options: dict[str, Any] = {"use_distributed_sampler": False, "precision": "64-true"}
    options |= {"max_epochs": 1, "limit_train_batches": steps}
    train(module := seeded(kind, wikitext), **options)
    alone(reference := seeded(kind, wikitext), **options)
    assert apart(module, reference) < 1e-7  # their learning rates let rounding grow fast


@pytest.mark.slow
def test_the_transformer_equals_one_process_on_the_union_of_the_batches(wikitext: int) -> None:
    def made() -> LightningTransformer:
        module = seeded(LightningTransformer, wikitext)
        for part in module.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
            if isinstance(part, torch.nn.MultiheadAttention):
                part.dropout = 0.0
        return module

    module, reference = made(), made()
    options: dict[str, Any] = {"max_epochs": 1, "precision": "64-true"}
    _, losses = train(module, train_dataloaders=DataLoader(WikiText2(), batch_size=2), **options)
    alone(reference, train_dataloaders=union(WikiText2(), 4), **options)
    assert apart(module, reference) < 1e-8
    assert losses.fell()
