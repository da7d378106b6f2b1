"""Every callback that ships with Lightning, and users' own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks as plc

from tests.parity.case import Grade, Theme
from tests.parity.cases.modules import normalised
from tests.parity.toys import Net, even, sgd

THEME = Theme("callbacks", even)


def add(name: str, *make: Callable[[], pl.Callback], module: Any = Net, **options: Any) -> None:
    """A case with these callbacks, made anew for each run."""
    more = options.pop("trainer", {})
    options.setdefault("expect", Grade.BITWISE)
    THEME.add(
        name,
        module,
        trainer=lambda folder: {"callbacks": [each() for each in make], **more},
        **options,
    )


def saves(name: str, wide: bool = False, **options: Any) -> None:
    """A case of ``ModelCheckpoint``: the files and all that is in them are compared."""
    trainer = {"enable_checkpointing": True, "max_epochs": 4}
    add(name, lambda: plc.ModelCheckpoint(**options), trainer=trainer, wide=wide)


checkpointing = {"enable_checkpointing": True}

# ---- checkpoints --------------------------------------------------------------------------------

saves("ModelCheckpoint")
saves("ModelCheckpoint, the best two", monitor="val/loss", save_top_k=2, wide=True)
saves("ModelCheckpoint, all, and the last", save_top_k=-1, save_last=True)
saves("ModelCheckpoint, a link to the last", save_last="link", monitor="val/loss")
saves("ModelCheckpoint, every four steps", every_n_train_steps=4, save_top_k=-1)
saves("ModelCheckpoint, every second epoch", every_n_epochs=2, save_top_k=-1)
saves("ModelCheckpoint, weights only", save_weights_only=True, monitor="train/loss")
saves("ModelCheckpoint, after training epochs", save_on_train_epoch_end=True, monitor="val/loss")
saves("ModelCheckpoint, largest is best", monitor="val/loss", mode="max")
saves(
    "ModelCheckpoint, names",
    filename="{epoch}-{step}-{val/loss:.2f}",
    auto_insert_metric_name=False,
    monitor="val/loss",
)
add(
    "ModelCheckpoint, two of them",
    lambda: plc.ModelCheckpoint(monitor="val/loss"),
    lambda: plc.ModelCheckpoint(filename="steps-{step}", every_n_train_steps=5, save_top_k=-1),
    trainer=checkpointing,
)
add("OnExceptionCheckpoint", lambda: plc.OnExceptionCheckpoint("."), trainer=checkpointing)

# ---- when to stop -------------------------------------------------------------------------------


def stops(name: str, wide: bool = False, **options: Any) -> None:
    options = {"monitor": "val/loss"} | options
    add(name, lambda: plc.EarlyStopping(**options), trainer={"max_epochs": 6}, wide=wide)


stops("EarlyStopping", patience=1, min_delta=10.0, wide=True)
stops("EarlyStopping, a threshold", stopping_threshold=8.0)
stops("EarlyStopping, divergence", divergence_threshold=1.0)
stops("EarlyStopping on training", monitor="train/loss", patience=0, check_on_train_epoch_end=True)
stops("EarlyStopping that never stops", patience=10)
clock = ("*time_elapsed*", "*Timer*")
add("Timer that does not ring", lambda: plc.Timer({"minutes": 10}), ignore=clock)
add(
    "Timer that rings",
    lambda: plc.Timer({"seconds": 0}),
    trainer={"max_epochs": 50},
    ignore=clock,
)
add("Timer per epoch", lambda: plc.Timer({"seconds": 0}, interval="epoch"), ignore=clock)

# ---- what to look at ----------------------------------------------------------------------------

add(
    "LearningRateMonitor",
    lambda: plc.LearningRateMonitor(log_momentum=True, log_weight_decay=True),
    module=lambda: Net(sgd, lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)),
)
add("DeviceStatsMonitor", lambda: plc.DeviceStatsMonitor(cpu_stats=False))
add("ModelSummary", lambda: plc.ModelSummary(max_depth=2), trainer={"enable_model_summary": True})
add("RichModelSummary", plc.RichModelSummary, trainer={"enable_model_summary": True})
add("RichProgressBar", plc.RichProgressBar, trainer={"enable_progress_bar": True})
add("TQDMProgressBar", plc.TQDMProgressBar, trainer={"enable_progress_bar": True})
add(
    "ThroughputMonitor",
    lambda: plc.ThroughputMonitor(lambda batch: len(batch[0]), window_size=3),
    ignore=("rank-0.logged.*", "*.logged_metrics.*"),  # times
)

# ---- weights of another kind --------------------------------------------------------------------


class OwnAverage(pl.Callback):
    """Averaged weights, swapped in for the validation and out again."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = {k: v.clone() for k, v in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, value in pl_module.state_dict().items():
            if value.is_floating_point():
                self.average[name].lerp_(value, 0.3)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.average:
            self.kept = {k: v.clone() for k, v in pl_module.state_dict().items()}
            pl_module.load_state_dict(self.average)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.average:
            pl_module.load_state_dict(self.kept)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.load_state_dict(self.average)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}


class EveryEpoch(plc.WeightAveraging):
    """The mean of the weights at the ends of epochs."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


four = {"max_epochs": 4}
saving = {"enable_checkpointing": True, "max_epochs": 3}
add(
    "StochasticWeightAveraging",
    lambda: plc.StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=2),
    trainer=four,
)
add(
    "StochasticWeightAveraging with BatchNorm",
    lambda: plc.StochasticWeightAveraging(0.01, swa_epoch_start=1),
    trainer=four,
    module=partial(Net, net=partial(normalised, torch.nn.BatchNorm1d)),
)
add("EMAWeightAveraging", lambda: plc.EMAWeightAveraging(decay=0.7), trainer=four, wide=True)
add("EMAWeightAveraging, saved", lambda: plc.EMAWeightAveraging(decay=0.7), trainer=saving)
add("WeightAveraging per epoch", EveryEpoch, trainer=four)
add("averaged weights by hand", OwnAverage, trainer=four)
add("averaged weights by hand, saved", OwnAverage, trainer=saving)


class Backbone(Net):
    """What ``BackboneFinetuning`` expects: a backbone of its own, trained later."""

    def __init__(self) -> None:
        super().__init__(net=torch.nn.Identity)
        self.backbone = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh())
        self.head = torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return sgd(p for p in self.parameters() if p.requires_grad)


class Schedule(plc.BaseFinetuning):
    """One layer more in every epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[0], optimizer, lr=0.005)


unfrozen: dict[str, Any] = {
    "versus": "union",
    "expect": Grade.ROUNDING,
    "reason": "DDP never averages what was frozen when it was wrapped, so its ranks drift apart",
    "trainer": {"max_epochs": 4, "overfit_batches": 1.0},
    "ddp": "ddp_fork_find_unused_parameters_true",
}
add(
    "BackboneFinetuning",
    lambda: plc.BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.001),
    module=Backbone,
    wide=True,
    **unfrozen,
)
add("a finetuning schedule by hand", Schedule, module=Backbone, **unfrozen)
add(
    "GradientAccumulationScheduler",
    lambda: plc.GradientAccumulationScheduler({0: 4, 1: 2, 2: 1}),
    trainer=four,
)
add(
    "ModelPruning",
    lambda: plc.ModelPruning(
        "l1_unstructured",
        amount=0.3,
        use_global_unstructured=False,
        use_lottery_ticket_hypothesis=False,
    ),
    trainer=four,
)

# ---- other ------------------------------------------------------------------------------------


class Memory(pl.Callback):
    """A state of its own, which comes home and into checkpoints."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["loss"]))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}


class Writer(plc.BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, indices: Any, *_: Any
    ) -> None:
        pl_module.notes.append((prediction, list(indices)))

    def write_on_epoch_end(
        self, trainer: Any, pl_module: Any, predictions: Any, indices: Any
    ) -> None:
        pl_module.notes.append((predictions, indices))


def predict(trainer: Any, module: Any, data: Any) -> Any:
    return trainer.predict(module, data["val_dataloaders"])


def lambdas() -> pl.Callback:
    def note(trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.notes.append(trainer.global_step)

    return plc.LambdaCallback(on_train_batch_end=note, on_train_epoch_end=note)


class Brings(Net):
    """``configure_callbacks``: the module brings its own."""

    def configure_callbacks(self) -> Any:
        return [Memory(), plc.EarlyStopping("val/loss", patience=0, min_delta=100.0)]


class Tuned(Net):
    """Has the rate as an attribute, where a finder puts it."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


add("LambdaCallback", lambdas)
add("a callback's own state", Memory, trainer=saving)
add("configure_callbacks", module=Brings)
add(
    "BasePredictionWriter",
    Writer,
    act=predict,
    facets=("*.hooks", "callback_metrics*"),
    reason="equal are hooks; workers predict whole mini-batches in turn, DDP every W-th sample",
)
add(
    "LearningRateFinder",
    lambda: plc.LearningRateFinder(num_training_steps=8),
    module=Tuned,
)
