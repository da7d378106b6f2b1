"""Optimizers and schedulers in the calling process are those that training has left."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch.optim.lr_scheduler import ExponentialLR, SequentialLR, StepLR

from tests.lightning.metamorphic import strategies
from tests.lightning.toys import Regression, fit
from tests.picking import by_default


class Changing(Regression):
    """Changes what is in the trainer when the second epoch begins or ends."""

    def __init__(self, change: str, ends: bool = False) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.01, momentum=0.9))
        self.change, self.ends = change, ends

    def configure_optimizers(self) -> Any:
        layers = [self.net[0], self.net[2]]
        if self.change == "grown":
            layers = layers[1:]
        optimizer = self.make_optimizer([{"params": list(x.parameters())} for x in layers])
        parts = [ExponentialLR(optimizer, 0.9), StepLR(optimizer, 2)]
        schedule = {"scheduler": SequentialLR(optimizer, parts, [3]), "interval": "step"}
        return [optimizer], [schedule]

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and not self.ends:
            self.act()

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1 and self.ends:
            self.act()

    def act(self) -> None:
        strategy: Any = self.trainer.strategy
        (optimizer,) = strategy.optimizers
        if self.change == "grown":
            optimizer.add_param_group({"params": list(self.net[0].parameters()), "lr": 0.02})
        elif self.change == "shrunk":
            del optimizer.param_groups[0]
        elif self.change == "replaced":
            made = torch.optim.RMSprop(self.net.parameters(), lr=0.01)
            strategy.optimizers = [made]
            schedule = StepLR(made, 5, gamma=0.8)
            strategy.lr_scheduler_configs = [LRSchedulerConfig(schedule, interval="step")]
        elif self.change == "bound":
            strategy.optimizers = [torch.optim.Adagrad(self.net.parameters(), lr=0.01)]
            (config,) = strategy.lr_scheduler_configs
            for each in (config.scheduler, *config.scheduler._schedulers):
                each.optimizer = strategy.optimizers[0]


class ByHand(Changing):
    """The same, with manual optimization."""

    def __init__(self, change: str, ends: bool) -> None:
        super().__init__(change, ends)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class End(pl.Callback):
    """A checkpoint of the end, and the forms of what it is of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / "end.ckpt")
        if trainer.is_global_zero:
            torch.save(forms(trainer), self.folder / "forms")


def forms(trainer: Any) -> Any:
    names = {id(p): name for name, p in trainer.lightning_module.named_parameters()}
    optimizers = trainer.optimizers
    bound = []
    for config in trainer.lr_scheduler_configs:
        inside = (config.scheduler, *getattr(config.scheduler, "_schedulers", ()))
        places = [[o is each.optimizer for o in optimizers] for each in inside]
        kinds = [type(each).__name__ for each in inside]
        bound.append((kinds, places, config.interval, config.frequency))
    return [
        (type(o).__name__, [[names[id(p)] for p in g["params"]] for g in o.param_groups])
        for o in optimizers
    ], bound


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


CHANGES = ("grown", "shrunk")
CELLS = [
    (change, ends, name, workers, kind)
    for change in CHANGES
    for ends in (False, True)
    for number, name in enumerate(strategies.ALL)
    for workers in (1 + number % 3,)
    for kind in strategies.kinds(name, workers)
    if kind in ("automatic", "manual") and name not in strategies._LOCAL
    if not (change == "shrunk" and name.startswith("hogwild"))  # torch saves no such state
]
CHOSEN = [
    ("grown", False, "hybrid", 1, "automatic"),
    ("grown", True, "synchronous", 2, "manual"),
    ("shrunk", False, "k_async", 1, "manual"),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("change", "ends", "strategy", "workers", "kind"), by_default(CELLS, *CHOSEN)
)
def test_optimizers_and_schedules_are_those_that_training_has_left(
    change: str, ends: bool, strategy: str, workers: int, kind: str, tmp_path: Path
) -> None:
    module = partial(ByHand if kind == "manual" else Changing, change, ends)
    made = strategies.make(strategy, workers)
    _, trainer = fit(made, workers, 4, module, max_epochs=2, callbacks=[End(tmp_path)])
    assert forms(trainer) == torch.load(tmp_path / "forms", weights_only=False)
    there = torch.load(tmp_path / "end.ckpt", weights_only=False)
    trainer.save_checkpoint(tmp_path / "home.ckpt")
    home = torch.load(tmp_path / "home.ckpt", weights_only=False)
    for saved in (there, home):
        states = [plain(each) for each in saved["optimizer_states"]]
        assert [plain(each.state_dict()) for each in trainer.optimizers] == states
        schedules = [
            plain(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs
        ]
        assert schedules == plain(saved["lr_schedulers"])
    for config in trainer.lr_scheduler_configs:
        config.scheduler.step()


@pytest.mark.parametrize(("change", "kind"), [("replaced", "RMSprop"), ("bound", "Adagrad")])
def test_an_optimizer_that_configure_optimizers_does_not_make_is_named(
    change: str, kind: str
) -> None:
    _, trainer = fit("hybrid", 1, 4, partial(Changing, change), max_epochs=2)
    with pytest.warns(UserWarning, match=f"configure_optimizers makes no .*{kind}"):
        assert trainer.optimizers == []
