"""Loggers keep what they have, whatever is called after what: as on one device without strategy."""

from __future__ import annotations

import csv
import itertools
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain.lightning.states.logger_state import give_to_logger, logs_open, of_logger
from tests.lightning.toys import Regression, make_trainer

SAMPLES, BATCH = 24, 12  # of all workers together
CALLS = ("fit", "validate", "test", "predict")
Row = dict[str, float]


class Logged(Regression):
    """Other columns in each kind of run."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("both", loss.detach(), on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/one", 1.0, sync_dist=True, batch_size=len(batch[0]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])


class Kept(Logger):
    """Keeps its rows in memory, as a user's own may."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []

    @property
    def name(self) -> str:
        return "kept"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if pl.utilities.rank_zero_only.rank == 0:
            self.rows.append({k: float(v) for k, v in metrics.items()} | {"step": float(step or 0)})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def loader(batch_size: int) -> DataLoader[Any]:
    """All samples are the same, so that it does not matter who has which."""
    x = torch.full((SAMPLES, 4), 0.5)
    return DataLoader(TensorDataset(x, torch.ones(SAMPLES, 1)), batch_size)


class Script:
    """A trainer of which one method after another is called."""

    def __init__(self, strategy: str, workers: int, folder: Path) -> None:
        pl.seed_everything(7, verbose=False)
        self.kept = Kept()
        self.loggers = [CSVLogger(folder), TensorBoardLogger(folder), self.kept]
        self.module, self.loader = Logged(), loader(BATCH // workers)
        self.trainer = make_trainer(
            strategy, workers, max_epochs=0, logger=self.loggers, log_every_n_steps=1
        )

    def call(self, name: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if name == "fit":
                self.trainer.fit_loop.max_epochs += 1  # type: ignore[operator]
                self.trainer.fit(self.module, self.loader, self.loader)
            else:
                options = {} if name == "predict" else {"verbose": False}
                getattr(self.trainer, name)(self.module, self.loader, **options)

    def table(self) -> list[Row]:
        path = Path(self.loggers[0].log_dir) / "metrics.csv"  # type: ignore[arg-type]
        if not path.is_file():
            return []
        with path.open(newline="") as file:
            return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]

    def board(self) -> dict[str, list[tuple[int, float]]]:
        found: dict[str, list[tuple[int, float]]] = {}
        for file in Path(self.loggers[1].log_dir).glob("events*"):  # type: ignore[arg-type]
            events = EventAccumulator(str(file)).Reload()
            for tag in events.Tags()["scalars"]:
                found.setdefault(tag, []).extend((e.step, e.value) for e in events.Scalars(tag))
        return {tag: sorted(points) for tag, points in found.items()}


def flat(rows: Sequence[Row]) -> list[tuple[str, float]]:
    return [(f"{number} {k}", v) for number, row in enumerate(rows) for k, v in sorted(row.items())]


def same(ours: Sequence[tuple[Any, float]], theirs: Sequence[tuple[Any, float]]) -> None:
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    assert [x for _, x in ours] == pytest.approx([x for _, x in theirs], rel=1e-4)


def check_lockstep(calls: Sequence[str], strategy: str, workers: int, folder: Path) -> None:
    """Row by row what one device without a strategy of ours has, after every call."""
    ours = Script(strategy, workers, folder / "ours")
    theirs = Script("auto", 1, folder / "theirs")
    for name in calls:
        ours.call(name)
        theirs.call(name)
        same(flat(ours.table()), flat(theirs.table()))
        same(flat(ours.kept.rows), flat(theirs.kept.rows))
        assert ours.board().keys() == theirs.board().keys()
        for tag, points in theirs.board().items():
            same(ours.board()[tag], points)
    assert [x.version for x in ours.loggers] == [x.version for x in theirs.loggers]


def check_free(calls: Sequence[str], workers: int, folder: Path) -> None:
    """What was there is there, and every call adds to it."""
    run, rows = Script("async", workers, folder), []
    n_points, evaluations = 0, 0
    for name in calls:
        run.call(name)
        now = run.table()
        assert now[: len(rows)] == rows and run.kept.rows[: len(rows)] == rows
        assert (len(now) > len(rows)) == (name != "predict")
        evaluations += name != "predict"
        assert sum("val/loss" in row or "test/one" in row for row in now) == evaluations
        former, n_points = n_points, sum(map(len, run.board().values()))
        assert n_points >= former
        rows = now


def test_all_loggers_keep_their_rows_through_every_call(tmp_path: Path) -> None:
    check_lockstep(("validate", "fit", "test", "predict", "fit"), "hybrid", 2, tmp_path)


def test_loggers_of_workers_that_run_freely_keep_their_rows(tmp_path: Path) -> None:
    check_free(("fit", "test", "predict", "fit"), 2, tmp_path)


ORDERS = [c for c in itertools.product(CALLS, repeat=3) if max(map(c.count, CALLS[1:])) == 1]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("calls", ORDERS, ids="-".join)
def test_loggers_keep_their_rows_in_every_order_of_calls_in_lock_step(
    calls: tuple[str, ...], workers: int, tmp_path: Path
) -> None:
    check_lockstep(calls, "hybrid", workers, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("calls", ORDERS, ids="-".join)
def test_loggers_keep_their_rows_in_every_order_of_calls_where_workers_run_freely(
    calls: tuple[str, ...], workers: int, tmp_path: Path
) -> None:
    check_free(calls, workers, tmp_path)
    if workers == 1:
        check_lockstep(calls, "async", 1, tmp_path / "again")


class Failing(Logged):
    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            raise LookupError("in the second epoch")


def test_a_test_after_a_run_that_has_failed_adds_to_its_rows(tmp_path: Path) -> None:
    run = Script("hybrid", 1, tmp_path)
    run.module = Failing()
    run.call("fit")
    with pytest.raises(LookupError):
        run.call("fit")
    before = run.table()
    run.call("test")
    assert len(before) > 4 and run.table()[:-1] == before
    assert {path.name for path in (tmp_path / "lightning_logs").iterdir()} == {
        f"version_{logger.version}" for logger in run.loggers[:2]
    }


def test_what_was_logged_by_hand_before_a_run_is_written_once(tmp_path: Path) -> None:
    run = Script("hybrid", 1, tmp_path)
    run.loggers[0].log_metrics({"by hand": 1.0}, 0)
    run.call("test")
    run.loggers[0].log_metrics({"by hand": 2.0}, 0)
    run.call("test")
    assert [row.get("by hand") for row in run.table()] == [1.0, None, 2.0, None]


def test_a_spawned_workers_logger_comes_home(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, 0)
    with logs_open(SimpleNamespace(loggers=[logger])):
        theirs = pickle.loads(pickle.dumps(logger))
        theirs.log_metrics({"b": 2.0}, 1)
        theirs.finalize("success")
        brought = of_logger(theirs)
    give_to_logger(logger, pickle.loads(pickle.dumps(brought)))
    logger.log_metrics({"a": 3.0}, 2)
    logger.finalize("success")
    lines = Path(logger.log_dir, "metrics.csv").read_text().split()
    assert lines == ["a,b,step", "1.0,,0", ",2.0,1", "3.0,,2"]
