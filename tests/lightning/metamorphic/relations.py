"""Observers: each is added to a run and must not change what is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    ThroughputMonitor,
    Timer,
)
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

from hybridtrain import StepProfiler
from hybridtrain.lightning.checkpointing.periodic import PeriodicCheckpoint
from tests.lightning.metamorphic import strategies
from tests.lightning.metamorphic.subjects import KINDS

Make = Callable[[Path], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """What is added.

    Args:
        trainer: arguments of the trainer; lists are added to those that are there.
        strategy: options of the strategy.
        validation: how many samples each loader of a validation has.
        note: what the module does in each training step.
        before: what is done with the trainer before ``fit``, ``after``: what behind it.
        as_datamodule: the loaders come in one.
        lock_step: it is refused where workers run freely.
        replaces: workers may be lost, which is refused where they wait for one another's own steps.
        ours: it is nothing that Lightning knows.
        kinds: how optimizers may be stepped.
    """

    trainer: Make = lambda folder: {}
    strategy: Make = lambda folder: {}
    validation: tuple[int, ...] = ()
    note: Callable[[Any, torch.Tensor], None] | None = None
    before: Callable[[pl.Trainer, pl.LightningModule, Any], object] | None = None
    after: Callable[[pl.Trainer, pl.LightningModule, Any], object] | None = None
    as_datamodule: bool = False
    lock_step: bool = False
    replaces: bool = False
    ours: bool = False
    kinds: tuple[str, ...] = tuple(KINDS)

    def suits(self, strategy: str, kind: str) -> bool:
        """Whether a run with it is not refused."""
        if kind not in self.kinds or (self.ours and strategy == "auto"):
            return False
        if self.replaces and not strategies.may_lose(strategy):
            return False
        return strategies.is_lock_step(strategy) or not self.lock_step


RELATIONS: dict[str, Relation] = {}


def _add(name: str, trainer: Any = None, **options: Any) -> None:
    make = trainer if callable(trainer) else lambda folder: dict(trainer or {})
    RELATIONS[name] = Relation(trainer=make, **options)


def _with(*callbacks: Callable[[Path], pl.Callback], **options: Any) -> Make:
    return lambda folder: {"callbacks": [make(folder) for make in callbacks], **options}


# ---- validations --------------------------------------------------------------------------------

_add("validation", validation=(10,))
_add("validation, several loaders", validation=(11, 2))
_add("validation, two samples", validation=(2,))
_add("validation, one sample", validation=(1,))
_add("validation, a small loader beside a large one", validation=(24, 1))
_add("val_check_interval=2", {"val_check_interval": 2}, validation=(10,), lock_step=True)
_add("val_check_interval=0.5", {"val_check_interval": 0.5}, validation=(10,), lock_step=True)
_add("val_check_interval=2, one sample", {"val_check_interval": 2}, validation=(1,), lock_step=True)
_add("check_val_every_n_epoch=2", {"check_val_every_n_epoch": 2}, validation=(10,))
_add("limit_val_batches=1", {"limit_val_batches": 1}, validation=(10,))
_add("limit_val_batches=0.5", {"limit_val_batches": 0.5}, validation=(24, 18))
_add("num_sanity_val_steps=2", {"num_sanity_val_steps": 2}, validation=(10,))
_add("num_sanity_val_steps=-1, one sample", {"num_sanity_val_steps": -1}, validation=(1,))
_add("a datamodule", validation=(10,), as_datamodule=True)


def _validate(trainer: pl.Trainer, module: pl.LightningModule, loaders: Any) -> None:
    trainer.validate(module, loaders, verbose=False)


# A metric of the module keeps tensors from there, which no mode of inference may have made.
_add("validate before fit", {"inference_mode": False}, validation=(10,), before=_validate)
_add("validate behind fit", validation=(5,), after=_validate)

# ---- checkpoints --------------------------------------------------------------------------------

_add(
    "ModelCheckpoint, every 2 steps",
    _with(
        lambda folder: ModelCheckpoint(
            folder / "every", every_n_train_steps=2, save_top_k=-1, save_last=True
        )
    ),
)
_add(
    "ModelCheckpoint, by a metric of the validation",
    _with(lambda folder: ModelCheckpoint(folder / "best", monitor="val/loss", save_last="link")),
    validation=(10,),
)
_add(
    "ModelCheckpoint, at the end of an epoch",
    _with(lambda folder: ModelCheckpoint(folder / "ends", save_on_train_epoch_end=True)),
)
_add(
    "ModelCheckpoint, by the clock",
    _with(
        lambda folder: ModelCheckpoint(
            folder / "clock", train_time_interval=timedelta(milliseconds=20)
        )
    ),
)
_add(
    "checkpoint=background",
    _with(lambda folder: ModelCheckpoint(folder / "later", every_n_train_steps=3)),
    strategy=lambda folder: {"checkpoint": "background"},
    ours=True,
)
_add(
    "PeriodicCheckpoint",
    _with(lambda folder: PeriodicCheckpoint(folder / "periodic", every_updates=2)),
    ours=True,
)


class SavesItself(pl.Callback):
    """Calls ``trainer.save_checkpoint``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 0 and trainer.fit_loop.epoch_loop.batch_idx == 1:
            trainer.save_checkpoint(self.folder / "by hand.ckpt")


_add("trainer.save_checkpoint in a hook", _with(SavesItself), lock_step=True)

# ---- loggers, bars, profiles --------------------------------------------------------------------


def _log(module: Any, loss: torch.Tensor) -> None:
    module.log("train/loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)


def _log_metric(module: Any, loss: torch.Tensor) -> None:
    module.metric.update(loss.detach())
    module.log("train/metric", module.metric, on_step=True, on_epoch=True)


_add("self.log, reduced", note=_log)
_add("a metric", note=_log_metric)
_add(
    "CSVLogger",
    lambda folder: {"logger": CSVLogger(folder, flush_logs_every_n_steps=1)},
    note=_log,
)
_add("TensorBoardLogger", lambda folder: {"logger": TensorBoardLogger(folder)}, note=_log)
_add(
    "log_every_n_steps=1",
    lambda folder: {"logger": CSVLogger(folder), "log_every_n_steps": 1},
    note=_log,
)
_add(
    "LearningRateMonitor",
    lambda folder: {
        "logger": CSVLogger(folder),
        "log_every_n_steps": 1,
        "callbacks": [LearningRateMonitor("step", log_momentum=True)],
    },
)
_add("a progress bar", {"enable_progress_bar": True}, note=_log, validation=(10,))
_add("a model summary", _with(lambda folder: ModelSummary(max_depth=-1), enable_model_summary=True))
_add("Lightning's profiler", {"profiler": "simple"}, validation=(10,))
_add("StepProfiler", lambda folder: {"profiler": StepProfiler(str(folder / "profile"))}, ours=True)
_add("record", strategy=lambda folder: {"record": folder / "record"}, ours=True)
_add("detect_anomaly", {"detect_anomaly": True})
_add(
    "Timer, ThroughputMonitor",
    lambda folder: {
        "logger": CSVLogger(folder),
        "callbacks": [Timer(), ThroughputMonitor(lambda batch: len(batch[0]), window_size=2)],
        "log_every_n_steps": 1,
    },
    kinds=("automatic", "accumulating"),
)
_add(
    "EarlyStopping that never stops",
    _with(
        lambda folder: EarlyStopping("val/loss", patience=99),
        lambda folder: EarlyStopping(
            "train/loss_epoch", patience=99, check_on_train_epoch_end=True
        ),
    ),
    note=_log,
    validation=(10,),
)

# ---- code that reads ----------------------------------------------------------------------------


class ReadsParameters(pl.Callback):
    """Behind each mini-batch."""

    total = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.total += sum(float(p.detach().sum()) for p in pl_module.parameters())

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.total += len(pl_module.state_dict())


class ReadsGradients(pl.Callback):
    """Wherever there are some."""

    total = 0.0

    def _look(self, module: Any) -> None:
        self.total += sum(float(p.grad.norm()) for p in module.parameters() if p.grad is not None)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._look(pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._look(pl_module)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._look(pl_module)


class ReadsOptimizers(pl.Callback):
    """Their state, as it is and as it would be saved, behind each mini-batch."""

    total = 0.0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        for optimizer in trainer.optimizers:
            self.total += len(optimizer.state_dict()["state"])
            for state in optimizer.state.values():
                self.total += sum(float(torch.as_tensor(each).sum()) for each in state.values())

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.total += len(optimizer.state_dict()["param_groups"])


class ReadsFigures(pl.Callback):
    """What strategy and trainer say of the run."""

    total = 0.0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy):
            self.total += trainer.strategy.run_stats()["updates"]
        self.total += trainer.estimated_stepping_batches + trainer.global_step


def _watch_steps(trainer: Any, module: Any) -> None:
    for optimizer in trainer.optimizers:
        optimizer.register_step_post_hook(lambda each, *_: float(each.param_groups[0]["lr"]))


class Copies(pl.Callback):
    """Keeps copies of all parameters, as code that compares epochs does."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.kept = {n: p.detach().clone() for n, p in pl_module.state_dict().items()}


_add("a callback that reads parameters", _with(lambda folder: ReadsParameters()))
_add("a callback that reads gradients", _with(lambda folder: ReadsGradients()))
_add("a callback that reads optimizers", _with(lambda folder: ReadsOptimizers()))
_add("a callback that reads figures", _with(lambda folder: ReadsFigures()))
_add("a callback that copies parameters", _with(lambda folder: Copies()), validation=(10,))
_add(
    "a LambdaCallback",
    _with(lambda folder: LambdaCallback(on_train_batch_end=lambda *_: None)),
)
_add(
    "a hook of the optimizer",
    _with(lambda folder: LambdaCallback(on_train_start=_watch_steps)),
)
_add(
    "ready to restart",
    strategy=lambda folder: {"on_failure": "restart"},
    replaces=True,
    ours=True,
)
_add(
    "ready to continue",
    strategy=lambda folder: {"on_failure": "continue", "hang_timeout_s": 60},
    replaces=True,
    ours=True,
)


# ---- several at once ----------------------------------------------------------------------------


_FLAGS = ("as_datamodule", "lock_step", "replaces", "ours")


def together(*parts: Relation) -> Relation:
    """All of them; of what only one can have, the last one's."""

    def trainer(folder: Path) -> dict[str, Any]:
        found = [dict(part.trainer(folder)) for part in parts]
        callbacks = [callback for each in found for callback in each.pop("callbacks", ())]
        return {name: value for each in found for name, value in each.items()} | {
            "callbacks": callbacks
        }

    def note(module: Any, loss: torch.Tensor) -> None:
        for each in {part.note for part in parts if part.note is not None}:
            each(module, loss)

    options = [part.strategy for part in parts]
    return Relation(
        trainer=trainer,
        strategy=lambda folder: {k: v for make in options for k, v in make(folder).items()},
        validation=max(part.validation for part in parts),
        note=note,
        **{name: any(getattr(part, name) for part in parts) for name in _FLAGS},
        kinds=tuple(k for k in KINDS if all(k in part.kinds for part in parts)),
    )


def _named(*names: str) -> Relation:
    return together(*(RELATIONS[name] for name in names))


_READERS = [name for name in RELATIONS if name.startswith("a callback that reads")]
GROUPS = {
    "all that reads": _named(*_READERS, "a LambdaCallback", "a hook of the optimizer"),
    "all that writes": _named(
        *("self.log, reduced", "a metric", "a progress bar", "a model summary"),
        *("LearningRateMonitor", "StepProfiler", "record", "validation, one sample"),
    ),
    "all that meets at ends of epochs": _named(
        *("num_sanity_val_steps=2", "a callback that copies parameters"),
        *("ModelCheckpoint, by a metric of the validation", "EarlyStopping that never stops"),
        *("ModelCheckpoint, at the end of an epoch", "a datamodule", "TensorBoardLogger"),
    ),
    "all that saves in mid-epoch": _named(
        "ModelCheckpoint, every 2 steps", "PeriodicCheckpoint", "ModelCheckpoint, by the clock"
    ),
    "all that validates in mid-epoch": _named(
        *("val_check_interval=2", "num_sanity_val_steps=2", "self.log, reduced"),
        *("ModelCheckpoint, by a metric of the validation", "trainer.save_checkpoint in a hook"),
    ),
}
_LARGEST = ("all that reads", "all that writes", "all that meets at ends of epochs")
_LARGEST += ("all that saves in mid-epoch",)
GROUPS["all"] = together(*(GROUPS[name] for name in _LARGEST))
BY_NAME = RELATIONS | GROUPS
