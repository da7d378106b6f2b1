"""Loggers: worker 0 writes what rank 0 writes under ddp, and the caller knows where it lies."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateMonitor
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.lightning.toys import Regression, fit, regression_data
from tests.picking import by_default


class Logged(Regression):
    """Logs in every way; its graph can be drawn."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(lambda p: torch.optim.Adam(p, lr=0.01))
        self.save_hyperparameters({"width": width, "nested": {"a": [1, 2]}})
        self.example_input_array = torch.zeros(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("index", float(batch_idx), on_step=True, on_epoch=False)
        self.log("both", loss.detach(), on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epochs", float(self.current_epoch), sync_dist=True)


def run(strategy: str, logger: Any, workers: int = 2, **options: Any) -> pl.Trainer:
    options = {
        "data": regression_data(),
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "logger": logger,
        "callbacks": [LearningRateMonitor("step")],
    } | options
    return fit(strategy, workers, 6, Logged, **options)[1]


def in_a_process(target: Any, *args: Any) -> None:
    """ddp leaves its process group behind; here it ends with its process."""
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def scalars(folder: str | Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_has_the_same_tags_steps_and_values_as_under_ddp(tmp_path: Path) -> None:
    trainer = run("hybrid", TensorBoardLogger(tmp_path / "ours", log_graph=True))
    in_a_process(run, "ddp_fork", TensorBoardLogger(tmp_path / "theirs", log_graph=True))
    ours = scalars(trainer.log_dir)  # type: ignore[arg-type]
    theirs = scalars(tmp_path / "theirs" / "lightning_logs" / "version_0")
    assert ours.keys() == theirs.keys() >= {"index", "both_step", "both_epoch", "lr-Adam", "epochs"}
    for tag, points in theirs.items():
        assert [step for step, _ in ours[tag]] == [step for step, _ in points], tag
        for (_, mine), (_, other) in zip(ours[tag], points, strict=True):
            assert mine == pytest.approx(other, rel=1e-4), tag
    for side in ("ours", "theirs"):
        folder = tmp_path / side / "lightning_logs" / "version_0"
        files = sorted(path.name.split(".")[0] for path in folder.iterdir())
        assert files == ["events", "hparams"]
        assert "nested" in (folder / "hparams.yaml").read_text()
        assert EventAccumulator(str(folder)).Reload().Tags()["graph"]


def test_csv_has_the_same_rows_as_under_ddp(tmp_path: Path) -> None:
    trainer = run("hybrid", CSVLogger(tmp_path / "ours"))
    in_a_process(run, "ddp_fork", CSVLogger(tmp_path / "theirs"))
    tables = []
    for folder in (trainer.log_dir, tmp_path / "theirs" / "lightning_logs" / "version_0"):
        with (Path(folder) / "metrics.csv").open() as file:  # type: ignore[arg-type]
            tables.append(list(csv.DictReader(file)))
    ours, theirs = tables
    assert len(ours) == len(theirs) > 8
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            assert (mine[name] == "") == (value == ""), name
            if value:
                assert float(mine[name]) == pytest.approx(float(value), rel=1e-4), name


@pytest.mark.parametrize("strategy", by_default(["hybrid", "async"], "async"))
def test_several_loggers_have_the_right_versions_and_folders(strategy: str, tmp_path: Path) -> None:
    for version in range(2):
        loggers: list[Logger] = [
            TensorBoardLogger(tmp_path, name="board"),
            CSVLogger(tmp_path, name="table"),
        ]
        trainer = run(strategy, loggers)
        assert [logger.version for logger in trainer.loggers] == [version, version]
        assert trainer.log_dir == str(tmp_path / "board" / f"version_{version}")
        assert Path(trainer.loggers[1].log_dir, "metrics.csv").is_file()  # type: ignore[arg-type]
    assert {path.name for path in tmp_path.iterdir()} == {"board", "table"}
    assert {path.name for path in (tmp_path / "table").iterdir()} == {"version_0", "version_1"}


def test_the_default_logger_and_its_checkpoints_lie_together(tmp_path: Path) -> None:
    trainer = run("hybrid", True, default_root_dir=tmp_path, enable_checkpointing=True)
    assert trainer.log_dir == str(tmp_path / "lightning_logs" / "version_0")
    best = Path(trainer.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
    assert best.parent == Path(trainer.log_dir) / "checkpoints"  # type: ignore[arg-type]


class Diary(Logger):
    """Writes down what is asked of it, and by whom."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def name(self) -> str:
        return "diary"

    @property
    def version(self) -> int:
        return 0

    def _write(self, **entry: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry | {"pid": os.getpid()}) + "\n")

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if pl.utilities.rank_zero_only.rank == 0:
            self._write(kind="metrics", step=step, names=sorted(metrics))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        if pl.utilities.rank_zero_only.rank == 0:
            self._write(kind="hyperparameters", params=dict(params))

    def finalize(self, status: str) -> None:
        if pl.utilities.rank_zero_only.rank == 0:
            self._write(kind="finalize", status=status)


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Failing(Logged):
    def on_train_epoch_end(self) -> None:
        raise LookupError("at the end of the epoch")


def test_a_logger_is_finalized_once_with_success(tmp_path: Path) -> None:
    run("hybrid", Diary(tmp_path / "diary"))
    written = entries(tmp_path / "diary")
    in_worker = [e for e in written if e["pid"] != os.getpid()]
    assert len({e["pid"] for e in in_worker}) == 1, "only worker 0 writes"
    assert [e["status"] for e in in_worker if e["kind"] == "finalize"] == ["success"]
    assert [e for e in written if e["kind"] == "finalize"] == in_worker[-1:]
    hyper = [e["params"] for e in written if e["kind"] == "hyperparameters"]
    assert hyper == [{"width": 16, "nested": {"a": [1, 2]}}]


def test_a_logger_is_finalized_with_failure_where_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(LookupError):
        fit("hybrid", 2, 6, Failing, logger=Diary(tmp_path / "diary"), log_every_n_steps=1)
    written = entries(tmp_path / "diary")
    statuses = [e["status"] for e in written if e["kind"] == "finalize"]
    assert set(statuses) == {"failed"}


@pytest.mark.parametrize("strategy", by_default(["hybrid", "async"], "hybrid"))
def test_a_logger_that_was_used_before_the_fork_goes_on(strategy: str, tmp_path: Path) -> None:
    """Its writer's thread is not in the worker; whoever waits for it waits for ever."""
    logger = TensorBoardLogger(tmp_path)
    for step in range(3):
        logger.experiment.add_scalar("before", float(step), step)
    trainer = run(strategy, logger, max_epochs=6)
    logger.experiment.add_scalar("after", 1.0, 0)
    logger.experiment.flush()
    assert logger.version == 0 and trainer.log_dir == logger.log_dir
    found: dict[str, int] = {}
    for file in Path(logger.log_dir).glob("events*"):
        for tag, points in scalars(file).items():
            found[tag] = found.get(tag, 0) + len(points)
    assert found["before"] == 3 and found["after"] == 1
    assert found["both_step"] == 24 if strategy == "hybrid" else found["both_step"] > 8


# ---- loggers of other packages, offline ---------------------------------------------------------


def test_weights_and_biases_offline_writes_one_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    from pytorch_lightning.loggers import WandbLogger

    trainer = run("hybrid", WandbLogger(save_dir=tmp_path, offline=True, project="ours"))
    wandb.finish()  # the run belongs to this process; the worker has joined it
    assert capfd.readouterr().err.count("Run history") == 1, "and left what it had to say"
    runs = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert [path.stem for path in runs] == [f"run-{trainer.logger.version}"]  # type: ignore[union-attr]


def test_mlflow_with_a_store_in_a_folder_has_the_metrics_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    from pytorch_lightning.loggers import MLFlowLogger

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file:{tmp_path / 'runs'}"
    trainer = run("hybrid", MLFlowLogger("ours", tracking_uri=uri))
    client = mlflow.tracking.MlflowClient(uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "ours"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["width"] == "16"
    assert len(client.get_metric_history(found.info.run_id, "both_step")) == 8
    assert trainer.logger is not None and trainer.logger.version == found.info.run_id
