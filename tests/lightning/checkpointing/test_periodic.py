"""Checkpoints every so many seconds and updates: whole, of one update, written by one worker."""

from __future__ import annotations

import csv
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch.optim.lr_scheduler import ExponentialLR

from hybridtrain import HybridStrategy
from hybridtrain.engine.recording import read_record
from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing import periodic
from hybridtrain.lightning.checkpointing.periodic import PeriodicCheckpoint
from hybridtrain.lightning.replay.replay_fit import replay_fit
from hybridtrain.util.files import fault_of
from tests.lightning.checkpointing.test_resume import regression
from tests.lightning.toys import Regression, fit, make_trainer, regression_data
from tests.picking import by_default


def kept(folder: Path) -> list[int]:
    """The updates behind the files that are there."""
    found = sorted(folder.glob("periodic-*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    steps = []
    for path in found:
        assert fault_of(path) is None
        content = torch.load(path, weights_only=True)
        assert path.name == f"periodic-{content['global_step']}.ckpt"
        steps.append(int(content["global_step"]))
    return steps


def saving(*callbacks: Callback) -> dict[str, Any]:
    return {"callbacks": list(callbacks), "enable_checkpointing": True}


@pytest.mark.parametrize("how", [pytest.param("blocking", marks=pytest.mark.slow), "background"])
def test_the_newest_few_periodic_checkpoints_stay_and_resume_to_the_same_bits(
    how: str, tmp_path: Path
) -> None:
    keep = PeriodicCheckpoint(tmp_path / "p", every_updates=4, keep=3)
    whole, last, _ = regression(
        HybridStrategy(checkpoint=how), 2, folder=tmp_path, callbacks=[keep]
    )
    assert kept(tmp_path / "p") == [8, 12, 16]
    path = tmp_path / "p" / "periodic-8.ckpt"
    again = PeriodicCheckpoint(tmp_path / "p", every_updates=4, keep=3)
    strategy = HybridStrategy(checkpoint=how)
    resumed, end, _ = regression(strategy, 2, path, folder=tmp_path / "b", callbacks=[again])
    assert torch.equal(resumed, whole) and end["global_step"] == last["global_step"]
    assert kept(tmp_path / "p") == [8, 12, 16], "it knows of those that were there"


@pytest.mark.parametrize(
    "policy",
    ["async", *(pytest.param(x, marks=pytest.mark.slow) for x in ("ssp", "hogwild", "backup"))],
)
def test_free_running_workers_pass_no_multiple_by(policy: str, tmp_path: Path) -> None:
    keep = PeriodicCheckpoint(tmp_path, every_updates=5, keep=100)
    _, trainer = fit(HybridStrategy(policy), 3, 4, **saving(keep), max_epochs=4)
    steps = kept(tmp_path)
    assert len(steps) >= trainer.global_step // 5 // 2
    assert len({step // 5 for step in steps}) == len(steps), "once in each stretch"


def test_periodic_checkpoints_may_be_written_by_time_alone(tmp_path: Path) -> None:
    keep = PeriodicCheckpoint(tmp_path, every_s=0.0, keep=100)
    fit("hybrid", 2, 4, **saving(keep), max_epochs=1)
    assert kept(tmp_path) == [1, 2, 3, 4, 5, 6]
    keep = PeriodicCheckpoint(tmp_path / "later", every_s=1000.0)
    fit("hybrid", 2, 4, **saving(keep), max_epochs=1)
    assert kept(tmp_path / "later") == []


class Normed(Regression):
    """Its buffers count the mini-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), self.net)


@pytest.mark.parametrize("by", ["seconds", "Lightning's clock", "updates, resumed"])
def test_no_checkpoint_is_written_between_accumulated_mini_batches(by: str, tmp_path: Path) -> None:
    """A resumed run makes these again, and BatchNorm would count them twice."""
    files = tmp_path / "files"
    callback: Callback = PeriodicCheckpoint(files, every_s=0.0, keep=100)
    if by == "Lightning's clock":
        clock = {"train_time_interval": timedelta(0), "save_top_k": -1}
        callback = ModelCheckpoint(files, "{epoch}-{step}", **clock)
    elif by == "updates, resumed":
        callback = ModelCheckpoint(files, "{step}", every_n_train_steps=1, save_top_k=-1)
    path = None
    for _ in range(2):
        options = saving(callback) | {"max_epochs": 1, "accumulate_grad_batches": 3}
        module, _ = fit("hybrid", 2, 4, Normed, ckpt_path=path, **options)
        assert int(module.net[0].num_batches_tracked) == 6
        path = str(min(files.iterdir(), key=lambda x: x.stat().st_mtime_ns))
        done = [
            torch.load(x, weights_only=True)["state_dict"]["net.0.num_batches_tracked"]
            for x in files.iterdir()
        ]
        assert {int(each) for each in done} <= {3, 6}


class Counting(ModelCheckpoint):
    """Counts mini-batches, and saves where Lightning would."""

    def on_train_batch_end(self, trainer: Any, *about: Any) -> None:
        super().on_train_batch_end(trainer, *about)
        if trainer.is_global_zero:
            with (Path(str(self.dirpath)) / "counted").open("a") as file:
                file.write(".")


def test_a_users_callback_that_saves_sees_accumulated_mini_batches(tmp_path: Path) -> None:
    callback = Counting(tmp_path, every_n_train_steps=1)
    fit("hybrid", 2, 4, **saving(callback), max_epochs=1, accumulate_grad_batches=3)
    assert (tmp_path / "counted").read_text() == 6 * "."


def test_one_device_may_use_the_periodic_checkpoint(tmp_path: Path) -> None:
    keep = PeriodicCheckpoint(tmp_path, every_updates=4, keep=100)
    fit("auto", 1, 8, **saving(keep), max_epochs=2)
    assert kept(tmp_path) == [4, 8, 12]


class Now(Callback):
    """Lets it be time after some of worker 0's mini-batches."""

    def __init__(self, *batches: int) -> None:
        self.batches, self.n = batches, 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.n += 1
        now = 1e9 * self.n if self.n in self.batches else 0.0
        periodic.time = type("Clock", (), {"monotonic": staticmethod(lambda: now)})  # type: ignore


@pytest.mark.parametrize("policy", by_default(["hybrid", "async"], "async"))
def test_a_replay_saves_where_the_clock_had_made_the_run_save(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(periodic, "time", periodic.time)  # put back afterwards
    data = torch.utils.data.DataLoader(regression_data(), 4, shuffle=True)

    def trainer(folder: str, *callbacks: Callback, **options: Any) -> Any:
        keep = PeriodicCheckpoint(tmp_path / folder, every_s=1e6, keep=100)
        strategy = HybridStrategy(policy, **options)
        return make_trainer(strategy, 2, max_epochs=2, **saving(*callbacks, keep))

    torch.manual_seed(1)
    module = Regression()
    start = {name: value.clone() for name, value in module.state_dict().items()}
    trainer("then", Now(2, 5), record=tmp_path / "r").fit(module, data)
    then = kept(tmp_path / "then")
    assert len(then) >= 1
    module.load_state_dict(start)
    record = read_record(tmp_path / "r" / "record.bin")
    report = replay_fit(record, trainer("again"), module, anyway=True, train_dataloaders=data)
    assert report.equal, report.parted
    assert kept(tmp_path / "again") == then


@pytest.mark.parametrize("options", [{"every_s": -1}, {"every_updates": 0}, {"keep": 0}])
def test_periodic_checkpoint_options_that_make_no_sense_are_refused(
    options: dict[str, Any], tmp_path: Path
) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(UserError, match=f"{name}={value} was given; it must be a (whole )?number "):
        PeriodicCheckpoint(tmp_path, **options)


class Together(Callback):
    """Asks all workers while a checkpoint is made."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        checkpoint["all"] = trainer.strategy.all_gather(torch.ones(2))


@pytest.mark.parametrize("policy", ["hybrid", "async"])
def test_a_collective_during_a_periodic_checkpoint_is_refused_by_the_checkpoints_name(
    policy: str, tmp_path: Path
) -> None:
    keep = PeriodicCheckpoint(tmp_path / "p", every_updates=4)
    with pytest.raises(UserError, match=r"'all_gather'.*the periodic checkpoint.*periodic=null"):
        fit(policy, 2, 4, **saving(keep, Together(), ModelCheckpoint(tmp_path)))
    last = torch.load(tmp_path / "p" / "interrupted" / "interrupted.ckpt", weights_only=True)
    assert last["global_step"] >= 4 and last["all"].numel() == 2


def test_a_collective_is_fine_with_the_checkpoints_that_all_make(tmp_path: Path) -> None:
    fit("hybrid", 2, 4, **saving(Together(), ModelCheckpoint(tmp_path)), max_epochs=1)
    (path,) = tmp_path.glob("*.ckpt")
    assert torch.load(path, weights_only=True)["all"].shape == (2, 2)


@pytest.mark.parametrize("strategy", by_default(["hybrid", "async"], "hybrid", "async"))
def test_the_first_row_of_a_resumed_run_has_the_number_of_its_step(
    strategy: str, tmp_path: Path
) -> None:
    """Lightning has not counted the mini-batch in whose hook the checkpoint was written."""

    def rows(name: str, path: Path | None) -> dict[str, str]:
        callbacks = [PeriodicCheckpoint(tmp_path, every_updates=1, keep=9), LearningRateMonitor()]
        module = Regression(
            schedule=lambda x: {"scheduler": ExponentialLR(x, 0.9), "interval": "step"}
        )
        logger = CSVLogger(tmp_path, name, "")
        options = saving(*callbacks) | {"logger": logger, "log_every_n_steps": 3, "max_epochs": 1}
        fit(strategy, 1, 6, module, ckpt_path=None if path is None else str(path), **options)
        with (tmp_path / name / "metrics.csv").open(newline="") as file:
            return {row["step"]: row["lr-SGD"] for row in csv.DictReader(file) if row["lr-SGD"]}

    whole = rows("whole", None)
    assert [*whole] == ["2", "5"]
    assert rows("resumed", tmp_path / "periodic-3.ckpt") == {"5": whole["5"]}
