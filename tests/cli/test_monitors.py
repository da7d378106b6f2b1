"""A monitored metric that the run does not log is one line, which names the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.cli.conftest import Command, Replay
from tests.cli.tiny import TINY, TinyModule
from tests.picking import by_default

QUIET = ["logger=none", "test=false", "trainer.enable_progress_bar=false", "hydra.run.dir=run"]
EARLY = "callbacks.early._target_=pytorch_lightning.callbacks.EarlyStopping"
LINE = "monitor=val/siz: the run logged no such metric (did you mean val/size?); it logged "


class Plateau(TinyModule):
    """Its scheduler waits for a metric that nobody logs."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        schedule = {"scheduler": scheduler, "monitor": "val/siz"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


CASES = [
    (["callbacks.checkpoint.monitor=val/siz"], "callbacks.checkpoint."),
    (["task.monitor=val/siz"], "task."),
    ([f"+{EARLY}", "+callbacks.early.monitor=val/siz"], "callbacks.early."),
    (["model._target_=tests.cli.test_monitors.Plateau"], "ReduceLROnPlateau: "),
]
WAYS = ["strategy=hybrid", "strategy=async", "strategy=local_sgd", "strategy=ddp"]


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", by_default([1, 2, 3], 2))
@pytest.mark.parametrize("way", by_default(WAYS, "strategy=hybrid"))
@pytest.mark.parametrize(("given", "key"), CASES)
def test_a_monitored_metric_that_is_not_logged_names_its_key_and_the_logged_ones(
    command: Command, given: list[str], key: str, way: str, workers: int
) -> None:
    result = command(*TINY, *QUIET, way, f"trainer.devices={workers}", *given)
    assert result.code == 2 and f"hybridtrain: {key}{LINE}" in result.err
    assert "val/size" in result.err.partition("it logged ")[2] and "Traceback" not in result.err


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", by_default([1, 2], 2))
@pytest.mark.parametrize("way", by_default(WAYS, "strategy=hybrid"))
@pytest.mark.parametrize(("given", "key"), CASES)
def test_a_misspelt_metric_of_the_validation_is_known_before_training(
    command: Command, given: list[str], key: str, way: str, workers: int
) -> None:
    sanity = ["trainer.num_sanity_val_steps=2", "trainer.check_val_every_n_epoch=2"]
    result = command(*TINY, *QUIET, *sanity, way, f"trainer.devices={workers}", *given)
    assert result.code == 2 and f"hybridtrain: {key}{LINE}val/size" in result.err
    history = Path("run/history.csv")
    assert not history.exists() or len(history.read_text().splitlines()) <= 1


class LogsLater(TinyModule):
    """Logs a metric in the validations of training alone."""

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.log("val/siz", 1.0, sync_dist=True)


@pytest.mark.parametrize(
    "given",
    [["task.monitor=val/siz", "model._target_=tests.cli.test_monitors.LogsLater"],
     ["task.monitor=train/loss"], ["task.monitor=null"]],
    ids=["logged later", "of training", "none"],
)  # fmt: skip
def test_a_metric_that_the_sanity_validation_need_not_log_is_monitored(
    command: Command, given: list[str]
) -> None:
    sanity = "trainer.num_sanity_val_steps=2"
    assert command(*TINY, *QUIET, sanity, "trainer.devices=2", *given).code == 0


def test_an_interval_longer_than_an_epoch_is_one_line(command: Command) -> None:
    result = command(*TINY, *QUIET, "trainer.devices=2", "trainer.val_check_interval=100")
    assert result.code == 2 and "Traceback" not in result.err
    assert "val_check_interval=100 was given, and an epoch has 6 mini-batches" in result.err


@pytest.mark.few(1)
@pytest.mark.parametrize(("given", "key"), [CASES[0], CASES[2]])
def test_a_replay_under_another_policy_names_the_key_of_a_metric_that_is_not_logged(
    command: Command, replay: Replay, given: list[str], key: str
) -> None:
    assert command(*TINY, *QUIET, "trainer.devices=2", *given).code == 2
    assert "raised   " in replay("run=run").out
    result = replay("run=run", "policy=async")
    assert result.code == 2 and f"{key}{LINE}" in result.complaint


def test_a_replay_of_an_edited_configuration_names_the_key_of_a_metric_not_logged(
    command: Command, replay: Replay
) -> None:
    """At the end of an epoch the run has sent more, unless it leaves out that checkpoint."""
    kept = "callbacks.checkpoint.save_on_exception=false"
    assert command(*TINY, *QUIET, "trainer.devices=2", kept).code == 0
    path = Path("run/.hydra/config.yaml")
    edited = OmegaConf.load(path)
    edited.callbacks.checkpoint.monitor = "val/siz"
    OmegaConf.save(edited, path)
    result = replay("run=run", "anyway=true")
    assert result.code == 2 and f"callbacks.checkpoint.{LINE}" in result.complaint
