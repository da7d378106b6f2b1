"""task=digits: learns in seconds, shares evenly, tests on what it has not seen."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

import hybridtrain  # noqa: F401  (registers the strategies)
from hybridtrain.errors import UserError
from hybridtrain.tasks.digits import N_TRAIN, DigitsData, DigitsModule

pytest.importorskip("sklearn")


def train(tmp_path: Any, epochs: int, strategy: str = "auto", devices: int = 1) -> pl.Trainer:
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = DigitsModule(optimizer=partial(torch.optim.Adam, lr=0.002))
        trainer.fit(module, datamodule=DigitsData(batch_size=30))
    return trainer


def accuracy(trainer: pl.Trainer) -> float:
    assert trainer.lightning_module is not None
    alone = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    scores = alone.test(trainer.lightning_module, datamodule=DigitsData(), verbose=False)
    return float(scores[0]["test/acc"])


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_net_reads_the_test_digits(tmp_path: Any) -> None:
    assert accuracy(train(tmp_path, epochs=20)) >= 0.95


@pytest.mark.slow
def test_two_workers_reach_the_same_accuracy(tmp_path: Any) -> None:
    assert accuracy(train(tmp_path, epochs=20, strategy="hybrid", devices=2)) >= 0.95


@pytest.mark.slow
def test_two_workers_that_do_not_wait_come_close(tmp_path: Any) -> None:
    """The weights are the last, not the best, and in Adam's first steps old gradients weigh."""
    assert accuracy(train(tmp_path, epochs=20, strategy="async", devices=2)) >= 0.85


@pytest.mark.slow
def test_two_runs_are_bitwise_equal(tmp_path: Any) -> None:
    first, second = (train(tmp_path, epochs=1, strategy="hybrid", devices=2) for _ in range(2))
    assert first.lightning_module is not None and second.lightning_module is not None
    for name, value in first.lightning_module.state_dict().items():
        assert torch.equal(value, second.lightning_module.state_dict()[name])


def test_the_parts_are_disjoint_and_two_three_and_four_workers_share_the_first_evenly() -> None:
    data = DigitsData()
    data.setup()
    images = [part.tensors[0] for part in data.parts.values()]
    assert [len(x) for x in images] == [1440, 180, 177]
    assert N_TRAIN % 12 == 0
    together = torch.cat(images).flatten(1)
    assert len(together.unique(dim=0)) == len(together)
    assert (float(together.min()), float(together.max())) == (0, 1)


def test_the_split_follows_its_seed_and_nothing_else() -> None:
    def first_labels(seed: int) -> torch.Tensor:
        torch.manual_seed(torch.seed())
        data = DigitsData(split_seed=seed)
        data.setup()
        return data.parts["train"].tensors[1]

    assert torch.equal(first_labels(0), first_labels(0))
    assert not torch.equal(first_labels(0), first_labels(1))


@pytest.mark.parametrize(
    ("option", "value"), [("batch_size", 0), ("val_size", 0), ("val_size", 357)]
)
def test_sizes_that_leave_nothing_are_refused(option: str, value: int) -> None:
    with pytest.raises(UserError, match=f"data.{option}={value}"):
        DigitsData(**{option: value})
