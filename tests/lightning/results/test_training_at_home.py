"""Behind a call the trainer of the calling process says what it says on one device."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Timer
from torch.utils.data import DataLoader

from tests.lightning.toys import Regression, fit, make_trainer, regression_data
from tests.picking import by_default

STRATEGIES = ("hybrid", "async", "synchronous", "hogwild", "local_sgd", "downpour")
# What another number of workers, or another folder, makes different.
OTHER = {
    "device_ids",
    "distributed_sampler_kwargs",
    "num_devices",
    "strategy",
    "precision_plugin",
    "world_size",
    "default_root_dir",
    "log_dir",
    "lightning_module",
    "model",
}
TOTAL = "estimated_stepping_batches"


class Data(pl.LightningDataModule):
    """Knows its samples behind ``setup`` only."""

    def setup(self, stage: str) -> None:
        self.samples = regression_data(24)

    def loader(self) -> Any:
        return DataLoader(self.samples, batch_size=4)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader


class Plain(Regression):
    def __init__(self) -> None:
        super().__init__(
            lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
            lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        )

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])


def trained(strategy: str, calls: tuple[str, ...], workers: int, how: str) -> pl.Trainer:
    trainer, module, data = make_trainer(strategy, workers, max_epochs=2), Plain(), Data()
    data.setup("fit")
    for call in calls:
        names = ["train_dataloaders", "val_dataloaders"] if call == "fit" else ["dataloaders"]
        given = {"datamodule": Data()} if how == "module" else {n: data.loader() for n in names}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(trainer, call)(module, **given)
    return trainer


def said(trainer: pl.Trainer) -> dict[str, Any]:
    """Every public attribute that is no method, as something that can be compared."""
    kind = type(trainer)
    names = [n for n in dir(kind) if isinstance(getattr(kind, n), property)]
    names += vars(trainer).keys()
    names.remove(TOTAL)  # it may make loaders
    names += [TOTAL] if trainer.state.fn == "fit" else []
    return {
        name: plain(getattr(trainer, name))
        for name in names
        if not name.startswith("_") and name not in OTHER
    }


def plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, torch.optim.Optimizer):
        return plain(value.state_dict())
    known = isinstance(value, int | float | str | None)
    return value if known else type(value).__name__


CALLS = [("fit",), ("validate",), ("test",), ("predict",), ("fit", "test"), ("fit", "fit")]


@pytest.mark.parametrize("how", by_default(["loaders", "module"], "module"))
@pytest.mark.parametrize("calls", by_default([(calls,) for calls in CALLS], (("fit",),)))
def test_one_worker_leaves_what_one_device_leaves(calls: tuple[str, ...], how: str) -> None:
    pl.seed_everything(3, verbose=False)
    alone = said(trained("auto", calls, 1, how))
    pl.seed_everything(3, verbose=False)
    assert said(trained("hybrid", calls, 1, how)) == alone


# What depends on how many mini-batches each worker takes, and on what it has learned from them.
COUNTED = {"global_step", TOTAL, "optimizers", "predictions"}


@pytest.mark.parametrize("how", by_default(["loaders", "module"], "loaders"))
@pytest.mark.parametrize("strategy", by_default(STRATEGIES, "async"))
@pytest.mark.parametrize("calls", by_default([(calls,) for calls in CALLS], (("fit",),)))
def test_the_callers_trainer_has_every_attribute_that_it_has_on_one_device(
    strategy: str, calls: tuple[str, ...], how: str
) -> None:
    alone = said(trained("auto", calls, 1, how))
    several = said(trained(strategy, calls, 2, how))
    assert several.keys() == alone.keys()
    for name, value in alone.items():
        if isinstance(value, str | list) and name not in COUNTED and not name.startswith("num_"):
            assert several[name] == value, name
    if calls[-1] == "fit":
        steps, total = several["global_step"], several[TOTAL]
        assert steps == total if strategy != "local_sgd" else steps > 0
        (mine,), (theirs,) = several["optimizers"], alone["optimizers"]
        assert mine["param_groups"][0]["lr"] == pytest.approx(theirs["param_groups"][0]["lr"])
        together = 2 if strategy in ("hybrid", "local_sgd") else 1  # mini-batches of a step
        assert several["num_training_batches"] == alone["num_training_batches"] // together


class Refuses(Plain):
    def configure_optimizers(self) -> Any:
        if self.trainer.strategy.__dict__.get("_client") is None:
            raise LookupError("only in a worker")
        return super().configure_optimizers()


def test_optimizers_that_cannot_be_made_here_are_named(tmp_path: Path) -> None:
    trainer = make_trainer("hybrid", 1, max_epochs=1)
    trainer.fit(Refuses(), DataLoader(regression_data(8), batch_size=4))
    with pytest.warns(UserWarning, match="the optimizers of the last run .* only in a worker"):
        assert trainer.optimizers == []
    trainer.save_checkpoint(tmp_path / "home.ckpt")
    saved = torch.load(tmp_path / "home.ckpt", weights_only=False)
    assert saved["optimizer_states"][0]["state"], "a checkpoint has them nevertheless"


class Collects(pl.Callback):
    def __init__(self) -> None:
        self.scores: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.scores += [np.float64(1.5), np.arange(3), np.int32(trainer.global_step)]


class Remembers(Plain):
    def __init__(self) -> None:
        super().__init__()
        self._losses: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self._losses.append(float(self.trainer.callback_metrics["train/loss"]))


@pytest.mark.parametrize("strategy", by_default(STRATEGIES, "hybrid"))
def test_what_user_code_has_collected_is_there(strategy: str) -> None:
    collects, module = Collects(), Remembers()
    trainer = make_trainer(strategy, 1, callbacks=[collects], max_epochs=1)
    trainer.fit(module, datamodule=Data())
    assert len(module._losses) == 6
    assert [type(each) for each in collects.scores[:3]] == [np.float64, np.ndarray, np.int32]
    assert len(collects.scores) == 18 and collects.scores[-1] == 6


@pytest.mark.parametrize("strategy", by_default(["hybrid", "async"], "hybrid"))
def test_a_second_training_begins_as_on_one_device(strategy: str) -> None:
    def rates(name: str) -> list[float]:
        averaging = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2)
        timer = pl.callbacks.Timer()
        trainer, module = make_trainer(name, 1, callbacks=[averaging, timer]), Plain()
        found = []
        for n_epochs in (3, 3):
            trainer.fit_loop.epoch_progress.reset()
            trainer.fit_loop.max_epochs = n_epochs
            pl.seed_everything(3, verbose=False)
            trainer.fit(module, datamodule=Data())
            found += [group["lr"] for group in trainer.optimizers[0].param_groups]
        assert timer._offset == 0
        return found

    assert rates(strategy) == rates("auto")


def test_a_timer_ends_a_second_training_too() -> None:
    """Under ``auto`` Lightning holds it to the end of the first, and never ends it."""
    timer = Timer(duration={"seconds": 0.3})
    trainer = make_trainer("hybrid", 1, max_epochs=1, callbacks=[timer])
    loader = DataLoader(regression_data(8), batch_size=4)
    trainer.fit(Regression(), loader)
    assert 0 < timer.time_elapsed() < 0.3
    trainer.fit_loop.max_epochs = 500
    trainer.fit(Regression(), loader)
    assert timer.time_elapsed() >= 0.3 and trainer.current_epoch < 500


class Spread(Regression):
    """One number in many places, which torch cannot write to."""

    def __init__(self) -> None:
        super().__init__()
        for name, persistent in (("saved", True), ("unsaved", False)):
            self.register_buffer(name, torch.zeros(1).expand(5), persistent=persistent)

    def on_train_epoch_end(self) -> None:
        self.saved, self.unsaved = self.saved + 1, self.unsaved + 2


def test_expanded_buffers_come_home() -> None:
    module, _ = fit("hybrid", 2, 12, Spread, max_epochs=2)
    assert module.saved.tolist() == [2.0] * 5
    assert module.unsaved.tolist() == [4.0] * 5
