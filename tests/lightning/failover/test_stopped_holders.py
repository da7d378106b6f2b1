"""A worker is stopped (SIGSTOP) in the middle of an update that it makes, and the run goes on.

Each update moves all elements by 0.01, so parameters say how many whole updates are behind them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, Timer
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from hybridtrain.engine.memory.counters import MadeSteps
from hybridtrain.engine.updates.flat.lent_state import LentFlatUpdate
from hybridtrain.engine.worker.makers.borrowed_update import BorrowedUpdate
from hybridtrain.engine.worlds import process_world
from hybridtrain.engine.worlds.worker_exit import WorkerDied
from tests.lightning.async_training.test_own_updates import Everywhere
from tests.lightning.async_training.test_untold_steps import Indices
from tests.lightning.toys import make_trainer
from tests.picking import but_slow

N, SIZE, AT = 3, 480, 20


def once_in_an_update(patch: Any, flag: Path, what: Callable[[], object], policy: str) -> None:
    """Worker 1 does ``what`` when masters are moved and the update is not counted yet."""
    step, make = BorrowedUpdate.step, MadeSteps.make

    def due() -> bool:
        return not flag.exists() and os.environ.get("LOCAL_RANK") == "1"

    def stepped(self: BorrowedUpdate, *args: Any) -> None:
        step(self, *args)
        if due() and n_steps(self.lent) >= AT:
            what()

    def counted(made: MadeSteps, worker: int, covered: int) -> None:
        if due() and made.total >= AT:
            what()
        make(made, worker, covered)

    patch.setattr(BorrowedUpdate, "step", stepped)
    if policy == "hogwild":
        patch.setattr(MadeSteps, "make", counted)


def n_steps(lent: LentFlatUpdate) -> int:
    return int(lent.update.count_groups.all[0].figures["step"])


class Does(Everywhere):
    """Once worker 1 has been stopped, worker 0 does something."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(1000, path)
        self.what = what

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        stopped, raised = self.path / "stopped", self.path / "raised"
        due = stopped.exists() and not raised.exists()
        if self.what == "exception" and due and self.global_rank == 0:
            raised.touch()
            raise LookupError("of another worker")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", float(batch_idx), on_epoch=True, sync_dist=True)


def stop(path: Path, what: str) -> None:
    (path / "stopped").touch()
    if what.startswith("SIG"):
        os.kill(os.getppid(), signal.Signals[what])
    os.kill(os.getpid(), signal.SIGSTOP)


@contextmanager
def usual_signals() -> Iterator[None]:
    """Lightning ignores one that has ended a run from then on."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def train(policy: str, what: str, path: Path, patch: Any, on_failure: str = "stop") -> pl.Trainer:
    callbacks: list[Any] = [ModelCheckpoint(path / "checkpoints", every_n_train_steps=50)]
    options: dict[str, Any] = {"max_epochs": 2}
    if what == "max_time":
        callbacks.append(Timer({"seconds": 8}))
        options["max_epochs"] = 10_000
    if what == "early stop":
        callbacks.append(EarlyStopping("loss", patience=0, mode="max"))
    patch.setattr(process_world, "_STOPPED_S", 0.3)
    patch.setattr(process_world, "_POLL_S", 0.2)
    once_in_an_update(patch, path / "stopped", lambda: stop(path, what), policy)
    hang_s = 6.0 if policy == "hogwild" else None  # there is no lock that anybody waits for
    strategy = HybridStrategy(
        policy, on_failure=on_failure, stop_grace_s=8, hang_timeout_s=hang_s, min_workers=1
    )
    trainer = make_trainer(strategy, N, callbacks=callbacks, enable_checkpointing=True, **options)
    data = Indices(SIZE)
    with usual_signals():
        trainer.fit(Does(path, what), DataLoader(data, 2), DataLoader(data, 100))
    return trainer


def n_updates(counts: torch.Tensor) -> float:
    """How many whole updates have made these, if they are such."""
    n = round(float(counts[0]) / 0.01)
    assert torch.allclose(counts, torch.full_like(counts, 0.01 * n), rtol=1e-4)
    return n


CASES = [
    (policy, on_failure, what)
    for what in ("SIGTERM", "exception", "SIGINT", "nothing", "max_time", "early stop")
    for policy in ("hybrid", "async", "hogwild")
    for on_failure in ("stop", "continue", "restart")
]


@pytest.mark.parametrize(
    ("policy", "on_failure", "what"),
    but_slow(CASES, lambda case, _: case[0] == "hogwild" or case[1:] != ("stop", "SIGTERM")),
)
def test_who_is_stopped_in_an_update_does_not_hold_up_the_others(
    policy: str, on_failure: str, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    began_s = time.monotonic()
    try:
        trainer = train(policy, what, tmp_path, monkeypatch, on_failure)
    except (SystemExit, LookupError, WorkerDied):
        assert on_failure == "stop" or what.startswith("SIG")
        assert time.monotonic() - began_s < 30
        (saved,) = tmp_path.rglob("interrupted.ckpt")
    else:
        assert on_failure != "stop" and not what.startswith("SIG")
        trainer.save_checkpoint(saved := tmp_path / "last.ckpt")
        assert trainer.strategy.run_stats()["updates"] == trainer.global_step
        if policy != "hybrid" and what in ("nothing", "exception"):
            assert trainer.global_step == 2 * SIZE // 2
    assert (tmp_path / "stopped").exists()
    checkpoint = torch.load(saved, weights_only=True)
    if policy != "hogwild":  # where, without a lock, an element may lose one of two steps
        assert n_updates(checkpoint["state_dict"]["counts"]) == checkpoint["global_step"]
    (state,) = checkpoint["optimizer_states"][0]["state"].values()
    assert float(state["step"]) == checkpoint["global_step"]
