"""How long to train, how often to validate, and everything besides ``fit``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from tests.parity.case import Grade, Theme
from tests.parity.toys import Net, even, loaders, sgd

THEME = Theme("loops", even)
add = partial(THEME.add, expect=Grade.BITWISE)

# ---- how long -----------------------------------------------------------------------------------

add("max_steps", Net, trainer={"max_steps": 7, "max_epochs": -1}, wide=True)
add("max_steps while accumulating", Net, trainer={"max_steps": 3, "accumulate_grad_batches": 4})
add("min_epochs", Net, trainer={"min_epochs": 2, "max_epochs": 3})
add("max_epochs=0", Net, trainer={"max_epochs": 0})
add("max_time that suffices", Net, trainer={"max_time": "00:00:10:00"}, ignore=("*Timer*",))
add("max_time that is over", Net, trainer={"max_time": {"seconds": 0}}, ignore=("*Timer*",))
add("limit_train_batches, a number", Net, trainer={"limit_train_batches": 3})
add("limit_train_batches, a part", Net, trainer={"limit_train_batches": 0.5})
add("limit_val_batches", Net, trainer={"limit_val_batches": 1})
add("limit_val_batches=0", Net, trainer={"limit_val_batches": 0})
add("overfit_batches, a number", Net, trainer={"overfit_batches": 2})
add("overfit_batches, a part", Net, trainer={"overfit_batches": 0.5})
add("fast_dev_run", Net, trainer={"fast_dev_run": True})
add("fast_dev_run, three", Net, trainer={"fast_dev_run": 3})
add(
    "barebones",
    Net,
    trainer={
        "barebones": True,
        "logger": False,
        "log_every_n_steps": 0,
        "enable_checkpointing": None,
        "enable_progress_bar": None,
        "enable_model_summary": None,
        "num_sanity_val_steps": None,
    },
)


class Stops(Net):
    """``should_stop`` in a hook, and an epoch that is skipped by returning -1."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = self.global_step >= 8

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 2 else None


add("a hook stops the training", Stops, trainer={"max_epochs": 5})

# ---- how often to validate ----------------------------------------------------------------------

add("val_check_interval, a number", Net, trainer={"val_check_interval": 2}, wide=True)
add("val_check_interval, a part", Net, trainer={"val_check_interval": 0.5})
add(
    "val_check_interval across epochs",
    Net,
    trainer={"val_check_interval": 4, "check_val_every_n_epoch": None},
)
add("check_val_every_n_epoch", Net, trainer={"check_val_every_n_epoch": 2, "max_epochs": 4})
add("num_sanity_val_steps", Net, trainer={"num_sanity_val_steps": 2})
add("num_sanity_val_steps=-1", Net, trainer={"num_sanity_val_steps": -1})
add("detect_anomaly", Net, trainer={"detect_anomaly": True})
add("inference_mode=False", Net, trainer={"inference_mode": False})
add("deterministic", Net, trainer={"deterministic": True})

# ---- besides fit --------------------------------------------------------------------------------


def validate(trainer: pl.Trainer, module: Any, data: Any) -> Any:
    return trainer.validate(module, data["val_dataloaders"], verbose=False)


def test(trainer: pl.Trainer, module: Any, data: Any) -> Any:
    return trainer.test(module, data["val_dataloaders"], verbose=False)


def predict(trainer: pl.Trainer, module: Any, data: Any) -> Any:
    return trainer.predict(module, data["val_dataloaders"])


def rows(trainer: pl.Trainer, module: Any, data: Any) -> torch.Tensor:
    return torch.cat(predict(trainer, module, data))


def one_after_another(trainer: pl.Trainer, module: Any, data: Any) -> Any:
    trainer.fit(module, **data)
    return [act(trainer, module, data) for act in (validate, test)]


add("validate", Net, act=validate)
add("test", Net, act=test)
add("predict", Net, act=predict, wide=True, ignore=("returned*",))  # nothing, under DDP
add(
    "predict, all rows",
    Net,
    act=rows,
    data=partial(loaders, 48, 23),
    versus="union",
    expect=Grade.ROUNDING,
    facets=("returned*",),
    reason="DDP returns nothing; here all rows come home, in the order of the data set",
)
add(
    "fit, then validate and test",
    Net,
    act=one_after_another,
    # The metrics are of the last call alone, as on one device (tests/lightning/results); the forked
    # reference leaves those of the fit among them.
    facets=("returned*", "module.*", "*.hooks"),
)


def continued(trainer: pl.Trainer, module: Any, data: Any) -> None:
    trainer.fit(module, **data)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, **data)


def resumed(trainer: pl.Trainer, module: Any, data: Any) -> None:
    """A second trainer goes on from the first one's checkpoint."""
    trainer.fit(module, **data)
    options = {"max_epochs": 4, "default_root_dir": trainer.default_root_dir, "logger": False}
    second = pl.Trainer(
        accelerator="cpu",
        devices=trainer.num_devices,
        num_nodes=trainer.num_nodes,
        strategy=again(trainer),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        **options,
    )
    (path,) = Path(trainer.default_root_dir).rglob("*.ckpt")
    second.fit(type(module)(), **data, ckpt_path=str(path))


def again(trainer: pl.Trainer) -> str:
    """The name of the strategy that the trainer has."""
    return getattr(trainer.strategy, "strategy_name", "ddp_fork")


def weights_loaded(trainer: pl.Trainer, module: Any, data: Any) -> None:
    """``load_state_dict`` before ``fit``."""
    start = torch.nn.Linear(4, 16)
    module.net[0].load_state_dict(start.state_dict())
    trainer.fit(module, **data)


class Scheduled(Net):
    def __init__(self) -> None:
        super().__init__(sgd, lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.7))


class LoadsInHook(Net):
    """Weights are loaded when the training begins."""

    def on_train_start(self) -> None:
        state = {k: v * 0.5 for k, v in self.net.state_dict().items()}
        self.net.load_state_dict(state)


add(
    "fit twice on one trainer",
    Net,
    act=continued,
    versus="union",
    trainer={"overfit_batches": 1.0},
    expect=Grade.ROUNDING,
    reason="Lightning refuses it for its own forking launcher",
    facets=("module.*",),
)


def checkpoint(folder: Path) -> dict[str, Any]:
    return {"callbacks": [ModelCheckpoint(folder)], "enable_checkpointing": True}


add("resumed from a checkpoint", Scheduled, act=resumed, trainer=checkpoint, wide=True)
add("weights loaded before fit", Net, act=weights_loaded)
add("weights loaded when training begins", LoadsInHook)
add("profiler, simple", Net, trainer={"profiler": "simple"})
add("profiler, advanced", Net, trainer={"profiler": "advanced"})
