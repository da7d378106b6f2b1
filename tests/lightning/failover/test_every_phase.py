"""A worker is lost in any phase: each sample is in as many updates as there are epochs."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from hybridtrain.lightning import launcher
from tests.lightning.failover.counting import (
    STRATEGIES,
    ByHand,
    Counting,
    Looking,
    N,
    Seen,
    counts_are,
)
from tests.lightning.toys import make_trainer
from tests.picking import but_slow, by_value

SIZE, EPOCHS = 2, 2  # six mini-batches of each of two workers in an epoch

# The hook in which the worker is lost, and how often it has come to it before.
PHASES = {
    "first epoch": ("on_train_epoch_start", 0),
    "first mini-batch": ("on_train_batch_start", 0),
    "first forward": ("training_step", 0),
    "forward": ("training_step", 4),
    "before the push": ("on_before_optimizer_step", 4),
    "behind the update": ("on_train_batch_end", 4),
    "validation": ("validation_step", 1),
    "second epoch": ("on_train_epoch_start", 1),
    "behind its first update": ("on_train_batch_end", 6),
    "last validation": ("on_validation_start", 1),
    "last epoch's end": ("on_train_epoch_end", 1),
    "end": ("on_train_end", 0),
    "teardown": ("teardown", 0),
}
STEPS = {"last step": ("training_step", 4), "behind the last step": ("on_train_batch_end", 3)}
BEHIND = ("last validation", "last epoch's end", "end", "teardown", "way home")


pack = launcher.pack


def die_on_the_way(folder: Path, workers: tuple[int, ...], trainer: Any, *rest: Any) -> Any:
    """All others have ended, if they are not to die."""
    worker = int(os.environ["LOCAL_RANK"])
    if worker in workers and not (folder / str(worker)).exists():
        (folder / str(worker)).touch()
        time.sleep(0.3 * (len(workers) == 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return pack(trainer, *rest)


class Lost(pl.Callback):
    """In this hook of the module these workers are lost, each once."""

    def __init__(
        self, module: Any, phase: str, kind: str, folder: Path, workers: tuple[int, ...] = (1,)
    ) -> None:
        (where, self.left), self.kind = (PHASES | STEPS).get(phase, ("teardown", 9)), kind
        self.folder, self.workers = folder, workers
        inner = getattr(module, where)

        def hook(*args: Any, **options: Any) -> Any:
            self.come(module.trainer.global_rank)
            return inner(*args, **options)

        setattr(module, where, hook)

    def come(self, worker: int) -> None:
        mark = self.folder / str(worker)
        if self.left == 0 and worker in self.workers and not mark.exists():
            mark.touch()
            if self.kind == "raise":
                raise KeyError("on purpose")
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def lose(
    folder: Path,
    strategy: Any,
    choice: str,
    phase: str,
    kind: str = "kill",
    module: Any = Counting,
    accumulate: int = 1,
    n: int = N,
    devices: int = 2,
    **rest: Any,
) -> pl.Trainer:
    pl.seed_everything(1, verbose=False)
    trained = module(n)
    lost = Lost(trained, phase, kind, folder, **rest)
    chosen = HybridStrategy(strategy, on_failure=choice)
    files, seen = ModelCheckpoint(folder / "checkpoints", save_top_k=1), Seen(folder)
    options: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": EPOCHS}
    options["accumulate_grad_batches"] = accumulate
    trainer = make_trainer(chosen, devices, callbacks=[lost, files, seen], **options)
    load = partial(DataLoader, torch.arange(n), SIZE)
    trainer.fit(trained, load(shuffle=True), load())
    assert list(folder.glob("[0-9]")), "nobody was lost"
    assert trainer.current_epoch == EPOCHS
    counts_are(trained, chosen, EPOCHS)
    if "validation" not in phase:  # a worker lost in one leaves its samples out
        seen.are(n)
    return trainer


# Faults came with one strategy, choice and phase; how the worker is lost takes turns over these.
CASES = [
    (strategy, choice, phase, ("kill", "raise")[(row + n + turn) % 2])
    for row, strategy in enumerate(STRATEGIES)
    for n, choice in enumerate(("restart", "continue"))
    for turn, phase in enumerate(PHASES)
]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("strategy", "choice", "phase", "kind"), but_slow(CASES, lambda case, n: n % 37 != 0)
)
def test_each_sample_counts_once_an_epoch_whichever_phase_a_worker_is_lost_in(
    tmp_path: Path, strategy: str, choice: str, phase: str, kind: str
) -> None:
    lose(tmp_path, strategy, choice, phase, kind)


LOCK_STEP = (
    "hybrid",
    {"name": "backup", "k": 2},
    {"name": "k_async", "k": 2},
    {"name": "ssp", "lead": 0},
)
LOOKING = [
    (strategy, choice, phase)
    for strategy in LOCK_STEP
    for choice in ("restart", "continue")
    for phase in PHASES
]


@pytest.mark.sampled(25)
@pytest.mark.parametrize(
    ("strategy", "choice", "phase"), but_slow(LOOKING, lambda case, n: n not in (4, 15))
)
def test_each_sample_counts_once_an_epoch_with_a_lost_worker_where_hooks_look_at_the_mean(
    tmp_path: Path, strategy: Any, choice: str, phase: str
) -> None:
    lose(tmp_path, strategy, choice, phase, module=Looking)


ACCUMULATED = [
    (strategy, choice, phase, accumulate)
    for strategy in STRATEGIES
    for choice in ("restart", "continue")
    for phase in ("forward", "behind the update", "behind its first update")
    for accumulate in (2, 4)
]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("strategy", "choice", "phase", "accumulate"), but_slow(ACCUMULATED, lambda case, n: n % 29 > 0)
)
def test_each_sample_counts_once_an_epoch_with_a_lost_worker_where_mini_batches_are_accumulated(
    tmp_path: Path, strategy: str, choice: str, phase: str, accumulate: int
) -> None:
    """Others process what the lost worker leaves, behind a last group that was smaller."""
    lose(tmp_path, strategy, choice, phase, accumulate=accumulate)


UNEVEN = [
    (choice, phase, workers, n)
    for choice in ("continue", "restart")
    for phase in (*PHASES, "last step", "behind the last step")
    for workers in ((0,), (1,), (2,), (0, 1))
    for n in (25, 26, 27)
    # Both may have got the mean of the last step, which no third worker has (docs/failures.md).
    if phase not in BEHIND and (phase, workers) != ("before the push", (0, 1))
]


@pytest.mark.sampled(25)
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("choice", "phase", "workers", "n"),
    but_slow(UNEVEN, lambda case, n: n % 29 > 0),
    ids=by_value,
)
def test_each_sample_counts_once_an_epoch_with_a_lost_worker_where_some_have_no_last_mini_batch(
    tmp_path: Path, choice: str, phase: str, workers: tuple[int, ...], n: int
) -> None:
    """Five steps of an epoch; in the last one, one to three workers have a sample."""
    lose(tmp_path, "hybrid", choice, phase, workers=workers, n=n, devices=3)


BY_HAND = [
    (strategy, choice, phase)
    for strategy in STRATEGIES
    for choice in ("restart", "continue")
    for phase in ("behind the update", "behind its first update", "last step")
    # In lock-step the others may have part of what the lost worker has accumulated.
    if (strategy, choice) != ("hybrid", "continue")
]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("strategy", "choice", "phase"), but_slow(BY_HAND, lambda case, n: n % 31 > 0)
)
def test_each_sample_counts_once_an_epoch_with_a_lost_worker_where_user_code_accumulates(
    tmp_path: Path, strategy: str, choice: str, phase: str
) -> None:
    lose(tmp_path, strategy, choice, phase, module=ByHand)


ALL = [
    (strategy, choice, phase, workers)
    for strategy in (*STRATEGIES, {"name": "ssp", "lead": 0})
    for choice in ("restart", "continue")
    for phase in (*PHASES, "way home")
    for workers in ((0, 1), (0,))
    if phase in BEHIND or (choice == "restart" and workers == (0, 1))
]


@pytest.mark.sampled(25)
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("strategy", "choice", "phase", "workers"),
    but_slow(ALL, lambda case, n: n % 79 != 0),
    ids=by_value,
)
def test_a_run_survives_the_loss_of_all_workers_in_any_phase(
    tmp_path: Path, monkeypatch: Any, strategy: Any, choice: str, phase: str, workers: Any
) -> None:
    """Under ``continue`` only behind the last update: one process does what follows."""
    if phase == "way home":
        monkeypatch.setattr(launcher, "pack", partial(die_on_the_way, tmp_path, workers))
    trainer: Any = lose(tmp_path, strategy, choice, phase, workers=workers)
    seen = trainer.callback_metrics["seen"]
    if workers == (0, 1) or phase != "last validation":  # else the lost worker's are missing
        assert seen == N
    best = trainer.checkpoint_callback.best_model_path
    saved = torch.load(best, weights_only=True)
    assert saved["epoch"] == EPOCHS - 1 and saved["global_step"] == trainer.global_step
    assert torch.equal(saved["state_dict"]["w"], trainer.lightning_module.w)
