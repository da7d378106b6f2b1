"""What workers inherit of the calling process, under Lightning; and what a run leaves there."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from hybridtrain import HybridStrategy, Server, Worker
from hybridtrain.engine.monitoring import watchdog
from hybridtrain.engine.options.schemes import parts_of
from hybridtrain.engine.recording import find_record, read_record
from hybridtrain.lightning.replay.replay_fit import replay_fit
from tests.lightning.spawnable import SpawnRegression
from tests.lightning.toys import Regression, fit, make_trainer, regression_data
from tests.picking import by_default

N = 36
FUNCTIONS = ("fit", "validate", "test", "predict")


class Opened(Dataset[torch.Tensor]):
    """Samples are numbers in a file that was opened once, and read by a pool that was used."""

    def __init__(self, path: Path) -> None:
        path.write_text("".join(f"{number:07}\n" for number in range(N)))
        self.file = path.open("rb")
        self.pool = ThreadPoolExecutor(1)
        self.read(0)

    def __len__(self) -> int:
        return N

    def read(self, index: int) -> int:
        self.file.seek(8 * index)
        return self.pool.submit(lambda: int(self.file.read(8))).result()

    def __getitem__(self, index: int) -> torch.Tensor:
        found = self.read(index)
        time.sleep(0.001)  # meanwhile others read
        again = self.read(index)
        return torch.tensor([index, found, again], dtype=torch.float64)


class Checking(Regression):
    """Each step checks that samples are those that were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def check(self, batch: torch.Tensor) -> torch.Tensor:
        assert batch[:, 0].equal(batch[:, 1]) and batch[:, 0].equal(batch[:, 2]), batch
        return batch[:, 0]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.weight * self.check(batch)).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("sum", self.check(batch).sum(), reduce_fx="sum", sync_dist=True, on_epoch=True)

    test_step = validation_step

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.check(batch)


def call(function: str, trainer: pl.Trainer, module: pl.LightningModule, loader: Any) -> Any:
    if function == "fit":
        return trainer.fit(module, loader, loader)
    return getattr(trainer, function)(module, loader)


STRATEGIES = ("hybrid", "async", "synchronous", "hogwild", "local_sgd", "easgd", "backup", "diloco")


@pytest.mark.few(6)
@pytest.mark.parametrize("workers", [2, 1, 3])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_files_and_pools_of_the_data_give_each_worker_its_own_samples(
    tmp_path: Path, strategy: str, function: str, workers: int
) -> None:
    loader = DataLoader(Opened(tmp_path / "numbers"), batch_size=2)
    trainer = make_trainer(strategy, workers, max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        returned = call(function, trainer, Checking(), loader)
    assert not [
        each for each in caught if "workers" in str(each.message) and "dataset" in str(each)
    ]
    if function == "predict":
        assert torch.cat(returned).tolist() == list(range(N))
    else:
        assert trainer.callback_metrics["sum"] == sum(range(N))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_processes_of_a_loader_read_from_their_workers_file(tmp_path: Path, strategy: str) -> None:
    data = Opened(tmp_path / "numbers")
    data.pool.shutdown()
    data.read = lambda index: (data.file.seek(8 * index), int(data.file.read(8)))[1]  # type: ignore[method-assign]
    trainer = make_trainer(strategy, 2, max_epochs=1)
    trainer.fit(Checking(), DataLoader(data, batch_size=2, num_workers=1))
    assert trainer.global_step == {"hybrid": N // 4, "async": N // 2}[strategy]


def test_bodies_of_a_server_have_their_own_positions_and_pools(tmp_path: Path) -> None:
    data = Opened(tmp_path / "numbers")

    def body(worker: Worker) -> bool:
        fine = True
        for samples in worker.batches():
            batch = torch.stack(list(samples))
            fine &= batch[:, 0].equal(batch[:, 1]) and batch[:, 0].equal(batch[:, 2])
            worker.push({"w": torch.ones(1)})
        return fine

    server = Server({"w": torch.zeros(1)}, "async", update={"name": "sgd", "lr": 0.1})
    assert server.run(body, workers=2, data=data, batch_size=2) == [True, True]
    rng = random.Random(0)
    with pytest.warns(UserWarning, match=r"^rng of .*<lambda> is a random generator"):
        server.run(lambda worker: rng.random(), workers=2)


# ---- lines --------------------------------------------------------------------------------------


class Held(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.lock.acquire()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(regression_data(8), batch_size=2)


class Holding(pl.Callback):
    def __init__(self) -> None:
        self.rlock = threading.RLock()
        self.rlock.acquire()


class Drawing(Dataset[Any]):
    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.data = regression_data(8)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def test_each_fault_is_one_warning_that_names_the_attribute_before_workers_start() -> None:
    module = SpawnRegression()
    trainer = make_trainer("hybrid", 2, max_epochs=1, callbacks=[Holding()])
    with pytest.warns(UserWarning) as caught:
        trainer.fit(module, datamodule=Held())
    said = [str(each.message) for each in caught if "setup hook" in str(each.message)]
    (line,) = said
    assert line.startswith("datamodule.lock is a lock that is held while training starts")
    assert line.endswith("the same holds for callbacks[0].rlock")


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_generator_of_the_data_is_one_warning_under_each_start_method(method: str) -> None:
    trainer = make_trainer(HybridStrategy(start_method=method), 2, max_epochs=1)
    loader = DataLoader(Drawing(), batch_size=2)
    with pytest.warns(UserWarning, match=r"^train_dataloaders\.dataset\.rng is a random generator"):
        trainer.fit(SpawnRegression(), loader)


# ---- files that callbacks write -----------------------------------------------------------------


class Pruning(pl.Callback):
    """As Optuna's own: reports to a trial, and asks it."""

    def __init__(self, trial: Any) -> None:
        self.trial = trial

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            self.trial.report(float(self.trial.number), trainer.current_epoch)
        if self.trial.should_prune():
            raise pytest.importorskip("optuna").TrialPruned


@pytest.mark.parametrize("method", by_default(["fork", "spawn"], "fork"))
def test_a_study_in_memory_is_named_before_workers_start(method: str) -> None:
    optuna = pytest.importorskip("optuna", reason="studies need the extra `sweep`")
    study = optuna.create_study()
    job, line = (
        optuna.trial.Trial(study, study.ask()._trial_id),
        r"callbacks\[0\]\.trial\.\S+ is an ",
    )
    trainer = make_trainer(
        HybridStrategy(start_method=method), 1, max_epochs=1, callbacks=[Pruning(job)]
    )
    with pytest.warns(UserWarning, match=line + "Optuna study in this process' memory"):
        trainer.fit(SpawnRegression(), DataLoader(regression_data(8), 4))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_study_in_a_storage_that_processes_share_prunes(tmp_path: Path, workers: int) -> None:
    optuna = pytest.importorskip("optuna", reason="studies need the extra `sweep`")
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    def objective(trial: Any) -> float:
        trainer = make_trainer("hybrid", workers, max_epochs=2, callbacks=[Pruning(trial)])
        trainer.fit(Regression(), DataLoader(regression_data(16), 4))
        return 1.0

    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(tmp_path / "study.log"))),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0),
    )
    study.optimize(objective, n_trials=2)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]


class Writing(pl.Callback):
    """A log that is opened before training, or in a hook, and never closed."""

    def __init__(self, folder: Path, early: bool) -> None:
        self.folder, self.early = folder, early
        if early:
            self.open("log")
            self.file.write("head\n")

    def open(self, name: str) -> None:
        self.file = (self.folder / name).open("w")

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self.early:
            self.open(f"log{trainer.global_rank}")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.file.write(f"worker {trainer.global_rank}\n")


@pytest.mark.few(2)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("workers", [2, 1])
def test_what_callbacks_have_written_is_in_the_file_once(
    tmp_path: Path, workers: int, early: bool
) -> None:
    callback = Writing(tmp_path, early)
    fit("hybrid", workers, 12 // workers, max_epochs=1, callbacks=[callback])
    if early:
        callback.file.write("tail\n")
        callback.file.close()
        head, *middle, tail = (tmp_path / "log").read_text().splitlines()
        assert (head, tail) == ("head", "tail")
        assert sorted(middle) == sorted(f"worker {n}" for n in range(workers) for _ in range(4))
    else:
        for worker in range(workers):
            text = (tmp_path / f"log{worker}").read_text()
            assert text.splitlines() == [f"worker {worker}"] * 4


class Temporary(pl.Callback):
    """Has a temporary directory of the calling process, and makes one in each worker."""

    def __init__(self) -> None:
        self.before = tempfile.TemporaryDirectory()

    def on_fit_start(self, *_: Any) -> None:
        self.own = tempfile.TemporaryDirectory()


def test_temporary_directories_end_with_the_process_that_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    callback = Temporary()
    fit("hybrid", 2, 12, max_epochs=1, callbacks=[callback])
    assert [str(each) for each in tmp_path.iterdir()] == [callback.before.name]


# ---- no mini-batch after a minute ---------------------------------------------------------------


class Slow(Dataset[Any]):
    """The first sample of a worker takes long."""

    def __init__(self) -> None:
        self.data, self.waits = regression_data(16), True

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if self.waits:
            self.waits = False
            time.sleep(1.5)
        return self.data[index]


class Predicting(Regression):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


@pytest.mark.few(3)
@pytest.mark.parametrize("workers", [2, 1])
@pytest.mark.parametrize("function", [*FUNCTIONS, "sanity"])
@pytest.mark.parametrize("strategy", ["hybrid", "async", "local_sgd", "hogwild"])
def test_a_run_without_a_first_mini_batch_says_once_where_workers_are_and_goes_on(
    strategy: str,
    function: str,
    workers: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "_LATE_S", 0.5)
    sanity = 2 if function == "sanity" else 0
    trainer = make_trainer(strategy, workers, max_epochs=1, num_sanity_val_steps=sanity)
    loader = DataLoader(Slow(), batch_size=4)
    if function == "sanity":
        trainer.fit(Predicting(), DataLoader(regression_data(8), batch_size=4), loader)
    else:
        call(function, trainer, Predicting(), loader)
    said = [each for each in capfd.readouterr().err.splitlines() if "no worker has" in each]
    (line,) = said
    assert "no worker has finished its first mini-batch after " in line
    assert "__getitem__ (test_inherited.py:" in line
    assert ("workers 0, 1 " in line) == (workers == 2)


# ---- what a run leaves in the calling process ---------------------------------------------------


def state_of_this_process() -> dict[str, Any]:
    signals = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    config: Any = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    return {
        "environment": dict(os.environ),
        "handlers": {each: signal.getsignal(each) for each in signals},
        "wakeup": wakeup,
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "threads": {each.name for each in threading.enumerate()},
        "children": multiprocessing.active_children(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "multiprocessing": {key: value for key, value in config.items() if key != "authkey"},
        "path": list(sys.path),
        "arguments": list(sys.argv),
        "hooks": (sys.excepthook, threading.excepthook, sys.gettrace(), sys.getprofile()),
        "faulthandler": faulthandler.is_enabled(),
        "filters": list(warnings.filters),
        "streams": (sys.stdout, sys.stderr),
        "torch threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "denormal": float(torch.tensor([1e-40]).mul(1.0)),
        "cores": os.sched_getaffinity(0),
        "directory": (Path.cwd(), tempfile.tempdir),
    }


def run_once(method: str, strategy: str, function: str) -> None:
    parts = parts_of(strategy)
    trainer = make_trainer(HybridStrategy(start_method=method, **parts), 2, max_epochs=1)
    loader = DataLoader(regression_data(8), batch_size=2)
    call(function, trainer, SpawnRegression(), loader)


@pytest.mark.few(3)
@pytest.mark.parametrize("function", ["fit", "validate"])
@pytest.mark.parametrize("strategy", ["hybrid", "async", "local_sgd"])
@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(each, marks=pytest.mark.slow) for each in ("spawn",))]
)
def test_a_run_leaves_the_calling_process_as_it_was(
    method: str, strategy: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiprocessing.set_start_method(None, force=True)
    monkeypatch.delenv("KMP_DUPLICATE_LIB_OK", raising=False)
    monkeypatch.delitem(sys.modules, "threadpoolctl", raising=False)
    before = state_of_this_process()
    run_once(method, strategy, function)
    after = state_of_this_process()
    assert {key: (before[key], after[key]) for key in before if before[key] != after[key]} == {}


def test_a_replay_leaves_the_environment_as_it_was(tmp_path: Path) -> None:
    loader = DataLoader(regression_data(8), batch_size=2)

    def trained(record: Any, run: Callable[..., Any]) -> Any:
        pl.seed_everything(3, verbose=False)
        trainer = make_trainer(HybridStrategy(record=record), 2, max_epochs=1)
        return run(trainer, Regression(), train_dataloaders=loader)

    trained(str(tmp_path / "run.bin"), pl.Trainer.fit)
    record = read_record(find_record(tmp_path / "run.bin"))
    before = dict(os.environ)
    assert trained(None, lambda *a, **k: replay_fit(record, *a, **k)).equal
    assert dict(os.environ) == before


def test_a_training_whose_program_ignores_the_end_of_children_has_its_results() -> None:
    former = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        module, trainer = fit("hybrid", 2, 12, max_epochs=1)
    finally:
        signal.signal(signal.SIGCHLD, former)
    assert trainer.global_step == 2
    assert module.net[0].weight.isfinite().all()  # type: ignore[index, operator]


# ---- who writes a checkpoint --------------------------------------------------------------------


class Watching(pl.Callback):
    """Counts calls of ``torch.save`` in each worker, as Lightning's own tests do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        real, calls = torch.save, self.folder / f"calls{trainer.global_rank}"
        calls.touch()

        def save(*args: Any, **kwargs: Any) -> None:
            with calls.open("a") as file:
                file.write("call\n")
            real(*args, **kwargs)

        torch.save = save  # type: ignore[assignment]

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        calls = self.folder / f"calls{trainer.global_rank}"
        calls.rename(self.folder / f"counted{trainer.global_rank}")


@pytest.mark.few(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_the_worker_that_writes_a_checkpoint_calls_torch_save(
    tmp_path: Path, strategy: str
) -> None:
    saving = ModelCheckpoint(tmp_path / "saved", save_top_k=-1)
    options: dict[str, Any] = {"callbacks": [Watching(tmp_path), saving], "max_epochs": 2}
    fit(strategy, 2, 6, enable_checkpointing=True, **options)
    written = len(list((tmp_path / "saved").iterdir()))
    counted = [(tmp_path / f"counted{each}").read_text().count("call") for each in (0, 1)]
    assert (written, counted) == (2, [2, 0])
