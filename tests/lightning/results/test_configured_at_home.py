"""Layers that are made in ``configure_model`` come home from the workers."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from hybridtrain.lightning.states.callback_state import give_to_module, of_module
from tests.lightning.toys import Regression, flat, make_trainer, regression_data


class Late(Regression):
    """Its net is made in ``configure_model``, as wide as ``setup`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.width, self.built = None, 0, False

    def setup(self, stage: str) -> None:
        self.width = 3

    def configure_model(self) -> None:
        if self.built:
            return
        width, self.built = self.width, True
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.Linear(width, 4), torch.nn.Linear(4, 1)
        )
        self.tied = torch.nn.Linear(width, 4)
        self.tied.weight = self.net[1].weight


def loader() -> DataLoader[Any]:
    return DataLoader(regression_data(16), batch_size=4)


def validated(trainer: pl.Trainer, module: pl.LightningModule) -> float:
    (found,) = trainer.validate(module, loader(), verbose=False)
    return found["val/loss"]


@pytest.mark.parametrize("strategy", ["hybrid", pytest.param("async", marks=pytest.mark.slow)])
def test_what_configure_model_makes_is_there_after_training(strategy: str) -> None:
    module, trainer = Late(), make_trainer(strategy, 2, max_epochs=2)
    trainer.fit(module, loader(), loader())
    fitted = float(trainer.callback_metrics["val/loss"])
    assert module.net is not None and module.tied.weight is module.net[1].weight
    assert module.trainer is trainer
    assert validated(trainer, module) == pytest.approx(fitted, rel=1e-6)
    trained = flat(module)

    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader())
    assert 0 < float((flat(module) - trained).abs().max()) < 0.5, "it went on from there"


def test_layers_made_in_configure_model_are_there_after_an_evaluation_alone() -> None:
    module, trainer = Late(), make_trainer("hybrid", 1)
    first = validated(trainer, module)
    assert module.net is not None
    assert validated(trainer, module) == pytest.approx(first, rel=1e-6)


class InSetup(Regression):
    """Where Lightning makes none that last."""

    def setup(self, stage: str) -> None:
        self.more = torch.nn.Linear(1, 1)


def test_layers_that_only_workers_have_are_named() -> None:
    trainer = make_trainer("hybrid", 1, max_epochs=1)
    with pytest.warns(UserWarning, match=r"more\.bias, more\.weight.*configure_model"):
        trainer.fit(InSetup(), loader())


class Failing(Late):
    """What it needs is only there in workers."""

    def configure_model(self) -> None:
        assert self.trainer.is_training_here  # type: ignore[attr-defined]

    def setup(self, stage: str) -> None:
        vars(self.trainer)["is_training_here"] = True
        self.net = torch.nn.Linear(4, 1)


def test_a_hook_that_works_in_workers_only_is_told_of() -> None:
    trainer = make_trainer("hybrid", 1, max_epochs=1)
    with pytest.warns(UserWarning, match=r"net\.bias, net\.weight.*AttributeError"):
        trainer.fit(Failing(), loader())


def test_spawned_workers_know_a_scripts_classes_by_another_name() -> None:
    here = type("Own", (Late,), {"__module__": "__main__"})
    there = type("Own", (Late,), {"__module__": "__mp_main__"})
    module, other = here(), there()
    other.width = 5
    give_to_module(module, of_module(other))
    assert module.width == 5
