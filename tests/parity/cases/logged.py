"""What is logged, by ``self.log`` and to loggers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torchmetrics
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only

from tests.parity.case import Grade, Theme
from tests.parity.toys import Net, even, loaders

THEME = Theme("logged", even)
add = partial(THEME.add, expect=Grade.BITWISE)

# ---- self.log -----------------------------------------------------------------------------------


class Variants(Net):
    """Every combination that people use."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        rank = float(self.global_rank)
        self.log("a/step", loss)
        self.log("a/epoch", loss, on_step=False, on_epoch=True)
        self.log("a/both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("a/synced", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("a/sum", rank, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.log("a/max", rank, on_step=True, sync_dist=True, reduce_fx="max")
        self.log("a/min", loss, on_epoch=True, sync_dist=True, reduce_fx=torch.min)
        self.log("a/weighted", loss, on_epoch=True, sync_dist=True, batch_size=1 + batch_idx)
        self.log("a/quiet", loss, logger=False, prog_bar=True)
        self.log("a/count", batch_idx)
        self.log("a/rank zero", rank, rank_zero_only=True)
        self.log_dict({"b/one": loss, "b/two": loss * 2}, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("val/loss", loss, sync_dist=True)
        self.log("val/step", loss, on_step=True, on_epoch=True)
        self.log("val/seen", float(len(batch[0])), reduce_fx="sum", sync_dist=True)

    def on_train_epoch_start(self) -> None:
        self.log("c/start", float(self.current_epoch))

    def on_train_epoch_end(self) -> None:
        self.log("c/end", float(self.global_step), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("c/validation", self.trainer.callback_metrics["a/step"], sync_dist=True)


class Metrics(Net):
    """Metrics of torchmetrics, logged as objects, as values, and in a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.error = torchmetrics.MeanSquaredError()
        both = {"mae": torchmetrics.MeanAbsoluteError(), "r2": torchmetrics.R2Score()}
        self.collection = torchmetrics.MetricCollection(both, prefix="val/")
        self.cat = torchmetrics.CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.error(self(batch[0]), batch[1])
        self.log("error", self.error, on_step=True, on_epoch=True)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        self.mean.update(out)
        self.collection.update(out, batch[1])
        self.cat.update(out)
        self.log("val/mean", self.mean)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.collection.compute())
        self.collection.reset()
        self.log("val/spread", self.cat.compute().std())
        self.cat.reset()


class Gathers(Net):
    """``all_gather``, with and without gradients, and the strategy's collectives."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        everyone = self.all_gather(out, sync_grads=True)
        self.notes.append(everyone)
        self.notes.append(self.all_gather({"rank": self.global_rank, "x": batch[0][0]}))
        self.notes.append(self.trainer.strategy.broadcast(f"from {self.global_rank}", 1))
        self.notes.append(self.trainer.strategy.reduce(out.detach().clone(), reduce_op="sum"))
        any_one = self.trainer.strategy.reduce_boolean_decision(self.global_rank == 0, all=False)
        self.notes.append(any_one)
        self.trainer.strategy.barrier("here")
        return self.loss(batch) + 0.1 * everyone.pow(2).mean()


class Hyper(Net):
    """``save_hyperparameters``, an example input, and the loggers used directly."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(2, 4)

    @rank_zero_only
    def on_train_start(self) -> None:
        for logger in self.loggers:
            logger.log_metrics({"by hand": 1.5}, step=0)
            logger.log_hyperparams({"more": 4})


add("variants of self.log", Variants, wide=True)
add("variants of self.log, every third step", Variants, trainer={"log_every_n_steps": 3})
add("torchmetrics", Metrics, wide=True)
add("collectives", Gathers, wide=True)


def to_csv(folder: Any) -> dict[str, Any]:
    return {"logger": CSVLogger(folder, version=1)}


def to_tensorboard(folder: Any) -> dict[str, Any]:
    return {"logger": TensorBoardLogger(folder, version=1), "enable_checkpointing": True}


def to_both(folder: Any) -> dict[str, Any]:
    return {"logger": [CSVLogger(folder), TensorBoardLogger(folder, name="board")]}


add("CSVLogger", Variants, trainer=to_csv)
add("TensorBoardLogger", Variants, trainer=to_tensorboard)
add("two loggers, hyper-parameters", Hyper, trainer=to_both)
add("the default logger", Hyper, trainer={"logger": True, "enable_checkpointing": True})

# ---- evaluation counts every sample once --------------------------------------------------------


class Counts(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("seen", float(len(batch[0])), reduce_fx="sum", sync_dist=True)
        self.log("loss", self.loss(batch), sync_dist=True, batch_size=len(batch[0]))


for n in (23, 7, 1):
    THEME.add(
        f"validation of {n} samples",
        Counts,
        data=partial(loaders, 48, n),
        trainer={"overfit_batches": 0},
        versus="union",
        act=lambda trainer, module, data: trainer.validate(
            module, data["val_dataloaders"], verbose=False
        ),
        facets=("returned*", "callback_metrics*"),
        reason="DDP counts padded samples twice",
        wide=n == 23,
    )
