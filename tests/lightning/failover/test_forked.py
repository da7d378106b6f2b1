"""User code of a worker forks, and the child raises or returns: the worker goes on, alone."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset

from hybridtrain import HybridStrategy
from hybridtrain.engine.memory.arena import Arena
from hybridtrain.util.anonymous_files import SharedBytes, stop_sharing_maps
from tests.lightning.failover.counting import STRATEGIES, Counting, N, counts_are
from tests.lightning.toys import Regression, make_trainer, regression_data
from tests.picking import but_slow


class Forking(Regression):
    """Forks in a step of one worker, and the child raises."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1 and self.global_rank == 1:
            if (pid := os.fork()) == 0:
                raise ValueError("in the fork")
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            (self.folder / "status").write_text(str(status))
        return super().training_step(batch, batch_idx)


class Witness(pl.Callback):
    """Writes down which processes have heard of an exception."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_exception(self, *_: Any) -> None:
        (self.folder / "told").touch()


def test_a_run_goes_on_though_a_child_of_a_worker_raises(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer("hybrid", 2, max_epochs=1, callbacks=[Witness(tmp_path)])
    trainer.fit(Forking(tmp_path), DataLoader(regression_data(16), 4))
    assert trainer.global_step == 2
    assert (tmp_path / "status").read_text() == "1" and not (tmp_path / "told").exists()
    assert capfd.readouterr().err.count("ValueError: in the fork") == 1


class Forks:
    """Forks once, in worker 1, when it is called for the third time; the child goes on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.left, self.parent = folder, 2, -1

    def __call__(self, worker: int) -> None:
        self.left -= worker == 1
        if self.left < 0 and not (self.folder / "forked").exists():
            (self.folder / "forked").touch()
            self.parent = os.getpid()
            if (pid := os.fork()) != 0:  # the worker waits, so that the child would come first
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                (self.folder / "status").write_text(str(status))

    @property
    def is_child(self) -> bool:
        return self.parent not in (-1, os.getpid())


def hooked(where: str) -> Callable[[Any, Forks], None]:
    """Forks in this hook of the module."""

    def prepare(module: Any, forks: Forks) -> None:
        inner = getattr(module, where)

        def hook(*args: Any, **options: Any) -> Any:
            forks(module.global_rank)
            return inner(*args, **options)

        setattr(module, where, hook)

    return prepare


def stepping(module: Any, forks: Forks) -> None:
    """The child makes a step of its own before it comes back."""
    inner = module.training_step

    def step(batch: Any, batch_idx: int) -> Any:
        forks(module.global_rank)
        if forks.is_child:
            (module.w.sum() * 100).backward()
            with torch.no_grad():
                module.w += 100
            module.optimizers().step()
        return inner(batch, batch_idx)

    module.training_step = step


def in_backward(module: Any, forks: Forks) -> None:
    module.w.register_hook(lambda gradient: forks(module.global_rank))


class ForkingData(Dataset[int]):
    """In the worker's process."""

    def __init__(self, module: Any, forks: Forks | None) -> None:
        self.module, self.forks = module, forks

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        if self.forks is not None:
            self.forks(self.module.global_rank)
        return index


WAYS: dict[str, Callable[[Any, Forks], None] | None] = {
    "a step": hooked("training_step"),
    "a hook": hooked("on_train_batch_end"),
    "before the push": hooked("on_before_optimizer_step"),
    "a validation": hooked("validation_step"),
    "the end": hooked("on_train_epoch_end"),
    "backward": in_backward,
    "its own step": stepping,
    "the data": None,
}
FORKING = [(name, way, record) for name in STRATEGIES for way in WAYS for record in (False, True)]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("strategy", "way", "record"),
    but_slow(FORKING, lambda case, n: n % 79 != 0 and case != ("async", "a step", False)),
)
def test_a_child_that_goes_on_does_not_train(
    tmp_path: Path, strategy: str, way: str, record: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    module: Any = Counting()
    forks, prepare = Forks(tmp_path), WAYS[way]
    forks.left = 0 if way in ("the end", "a validation") else 2
    if prepare is not None:
        prepare(module, forks)
    recorded = {"record": str(tmp_path / "record")} if record and strategy != "hogwild" else {}
    chosen = HybridStrategy(strategy, **recorded)
    logger = CSVLogger(tmp_path / "logs")
    files = ModelCheckpoint(tmp_path / "checkpoints", save_top_k=-1, every_n_epochs=1)
    options = {"enable_checkpointing": True, "logger": logger, "log_every_n_steps": 1}
    trainer = make_trainer(chosen, 2, max_epochs=2, callbacks=[files, Ends(tmp_path)], **options)
    data = ForkingData(module, None if prepare is not None else forks)
    trainer.fit(module, DataLoader(data, 2, shuffle=True), DataLoader(data, 2))
    assert (tmp_path / "status").read_text() == "1", "it has ended by itself"
    assert capfd.readouterr().err.count("was forked from a worker") == 1
    counts_are(module, chosen, 2)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    assert len(list((tmp_path / "logs").rglob("metrics.csv"))) == 1
    assert len(list(tmp_path.glob("ended-*"))) == 2, "a worker each"


class Ends(pl.Callback):
    """Writes down which processes come to the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def teardown(self, *_: Any, **__: Any) -> None:
        (self.folder / f"ended-{os.getpid()}").touch()

    def on_exception(self, *_: Any) -> None:
        (self.folder / f"ended-{os.getpid()}").touch()


class Aside(Counting):
    """A process of multiprocessing's reads parameters, and does as if it trained."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            child = multiprocessing.get_context("fork").Process(target=self.aside)
            child.start()
            child.join()
            assert child.exitcode == 7
        return super().training_step(batch, batch_idx)

    def aside(self) -> None:
        assert sys.gettrace() is None
        self.w.sum().backward()
        with torch.no_grad():
            self.w += 100
        sys.exit(7)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["hybrid", "hogwild"])
def test_a_process_of_multiprocessing_goes_on_and_writes_to_memory_of_its_own(
    strategy: str,
) -> None:
    module, chosen = Aside(), HybridStrategy(strategy)
    trainer = make_trainer(chosen, 2, max_epochs=2)
    trainer.fit(module, DataLoader(torch.arange(N), 2, num_workers=2))
    counts_are(module, chosen, 2)


def test_only_what_is_still_open_is_mapped_again() -> None:
    """The number of a closed descriptor may be another file's by then."""
    arena, shared, closed = Arena.create(4096), SharedBytes(64), SharedBytes(64)
    left = arena.tensor(0, 4, torch.float32)
    kept = Arena.create(4096)
    number = kept.tensor(0, 1, torch.float32)
    closed.close()
    del arena
    gc.collect()
    if (pid := os.fork()) == 0:
        stop_sharing_maps()
        number += 1
        shared.map[0] = left[0] = 1
        os._exit(int(number != 1 or shared.map[0] != 1))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert number == 0 and shared.map[0] == 0
    shared.close()
