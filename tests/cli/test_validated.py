"""Where there is no test set, what was validated counts: of which model, and who gets to know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from hybridtrain.cli.sweep import job_launcher
from hybridtrain.report.runs import read_run
from tests.cli.conftest import Command, summary
from tests.cli.tiny import TinyData, TinyModule
from tests.picking import by_default


class Untested(pl.LightningModule):
    """Brings its own data; its validations bring 1, 0, 1, 2, ... in ``my_val``, and no slash."""

    def __init__(self, offset: float = 0.0, own: bool = False) -> None:
        super().__init__()
        self.inner, self.data, self.offset, self.own = TinyModule(), TinyData(), offset, own

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, _ = batch
        loss = (self.inner.net(x) - 2 * x).square().mean()
        self.log("my_loss", loss, batch_size=len(x))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        found = abs(self.current_epoch - 1.0) + self.offset
        self.log("my_val", found, sync_dist=True, batch_size=len(batch[0]))

    def train_dataloader(self) -> DataLoader[Any]:
        return self.data.train_dataloader()

    def val_dataloader(self) -> DataLoader[Any]:
        return self.data.val_dataloader()

    def configure_optimizers(self) -> Any:
        return self.inner.configure_optimizers()

    def configure_callbacks(self) -> list[Callback]:
        if not self.own:
            return []
        return [ModelCheckpoint("own", "{my_val}", monitor="my_val", mode="min")]


class Tested(Untested):
    __test__ = False
    """Tells in its test how good the weights are that it was given."""

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("my_test", float(self.trainer.ckpt_path is not None), batch_size=len(batch[0]))

    def test_dataloader(self) -> DataLoader[Any]:
        return self.data.test_dataloader()


OWN = ["model._target_=tests.cli.test_validated.Untested", "trainer.accelerator=cpu"]
OWN += ["trainer.max_epochs=4", "hydra.run.dir=here", "task.metric=my_val", "logger=none"]


@pytest.mark.parametrize("strategy", by_default(["hybrid", "async", "ddp"], "hybrid"))
def test_the_metrics_are_those_of_the_checkpoint_that_the_monitor_has_chosen(
    command: Command, strategy: str
) -> None:
    options = [f"strategy={strategy}", "trainer.devices=2", "task.monitor=my_val", "task.mode=min"]
    done = command(*OWN, *options)
    assert done.code == 0, done.err
    assert "epoch=1" in summary("here")["checkpoint"]
    assert summary("here")["metrics"]["my_val"] == 0
    assert "my_loss" in summary("here")["metrics"]
    assert not [x for x in summary("here")["metrics"] if x.startswith("lr-")]
    assert [line.split() for line in done.out.splitlines() if "my_val  " in line][-1][1] == "0"


@pytest.mark.parametrize(
    "more",
    by_default(
        [[], ["callbacks.checkpoint=null", "callbacks.periodic=null"], ["callbacks=none"]],
        ["callbacks=none"],
    ),
)
def test_metrics_without_a_monitor_are_those_of_the_last_validation(
    command: Command, more: list[str]
) -> None:
    assert command(*OWN, *more).code == 0
    assert summary("here")["metrics"]["my_val"] == 2


def test_training_that_ends_before_a_validation_has_no_metric_of_one(command: Command) -> None:
    done = command(*OWN, "trainer.max_steps=1")
    assert done.code == 0
    assert "warning: task.metric=my_val: there was no validation to log it" in done.err
    assert summary("here")["error"] is None
    assert "my_val" not in summary("here")["metrics"]


@pytest.mark.slow
def test_a_run_that_goes_on_knows_the_validation_of_its_best_checkpoint(command: Command) -> None:
    options = [*OWN, "task.monitor=my_val"]
    assert command(*options).code == 0
    more = ["trainer.max_epochs=5", "resume_override=true"]
    assert command("resume=here", *more).code == 0
    assert summary("here")["metrics"]["my_val"] == 0


@pytest.mark.slow
def test_a_sweep_compares_and_returns_the_monitored_validation_metric(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    made = job_launcher._job_return
    monkeypatch.setattr(
        job_launcher, "_job_return", lambda job, x: told.append(x.metric) or made(job, x)
    )
    options = [*OWN[:3], *OWN[4:], "task.monitor=my_val", "hydra.sweep.dir=jobs"]
    done = command("-m", *options, "model.offset=1.5,0.5")
    assert done.code == 0, done.err
    assert told == [1.5, 0.5]
    assert "model.offset=1.5  1.5 " in done.out and "model.offset=0.5  0.5 " in done.out
    assert read_run(Path("jobs/1")).metrics["my_val"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    by_default(
        [
            ["callbacks.checkpoint=null"],
            [],
            ["callbacks.checkpoint=null", "callbacks.periodic=null"],
        ],
        [],
    ),
)
def test_the_best_of_a_users_own_checkpoints_is_tested(command: Command, more: list[str]) -> None:
    options = ["model._target_=tests.cli.test_validated.Tested", *OWN[1:], "model.own=true"]
    assert command(*options, *more).code == 0
    found = summary("here")
    assert found["metrics"] == found["metrics"] | {"my_test": 1.0, "my_val": 0.0}
    assert found["checkpoint"].endswith("own/my_val=0.0.ckpt")
