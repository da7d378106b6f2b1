"""All workers are lost at once: the first that is restarted goes on, and tells the others."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from hybridtrain.engine.worlds.process_world import BeginAnew
from hybridtrain.lightning.launcher import HybridLauncher
from tests.lightning.toys import Regression, make_trainer, regression_data

N, SIZE, EPOCHS = 48, 4, 3
PLACES = (
    ("training_step", 5),
    ("on_before_optimizer_step", 5),  # the mean of all is there
    ("on_train_batch_end", 5),
    ("validation_step", 2),
    ("on_train_epoch_end", 1),
    ("on_train_epoch_end", 2),  # the last
)


class Looking(Regression):
    """Needs the mean of all gradients before it pushes."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        pass


class AllKilled(pl.Callback):
    """Every worker is killed in the same place, once, or twice: again as it comes back."""

    def __init__(self, module: Any, where: str, when: int, folder: Path, times: int) -> None:
        self.folder, self.left, self.times = folder, when, times
        inner = getattr(module, where)

        def method(*args: Any) -> Any:
            self.come(module.trainer)
            return inner(*args)

        setattr(module, where, method)

    def come(self, trainer: Any) -> None:
        died = len(list(self.folder.glob(f"{trainer.global_rank}-*")))
        first = 1 if trainer.global_rank == 0 else self.times  # the others, again
        if died < first and (self.left <= 0 or died):
            (self.folder / f"{trainer.global_rank}-{died}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def lose_all(
    folder: Path, n: int, place: tuple[str, int], times: int = 1, kind: Any = Looking
) -> pl.Trainer:
    module = kind()
    killed = AllKilled(module, *place, folder, times)
    strategy = HybridStrategy("hybrid", on_failure="restart", max_restarts=None)
    trainer = make_trainer(strategy, n, max_epochs=EPOCHS, callbacks=[killed])
    data = regression_data(N)
    trainer.fit(module, DataLoader(data, SIZE, shuffle=True), DataLoader(data, SIZE))
    assert trainer.current_epoch == EPOCHS
    assert trainer.strategy.run_stats()["samples"] == N * EPOCHS  # type: ignore[attr-defined]
    return trainer


def test_the_first_restarted_worker_answers_while_it_waits_for_the_mean(tmp_path: Path) -> None:
    lose_all(tmp_path, 2, PLACES[0])
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow  # three seconds each
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("kind", [Regression, Looking])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_goes_on_after_the_loss_of_all_workers_at_any_place(
    tmp_path: Path, n: int, place: tuple[str, int], kind: Any, times: int
) -> None:
    lose_all(tmp_path, n, place, times, kind)
    assert {path.name for path in tmp_path.iterdir()} >= {f"{worker}-0" for worker in range(n)}


class AllKilledAfterFirstUpdate(pl.Callback):
    """All have pushed an epoch's first mini-batch, and none has fetched the next: all are killed.

    The states that workers sent in the epoch before cannot be advanced to here.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        mark = self.folder / str(trainer.global_rank)
        if trainer.current_epoch == 1 and not mark.exists():
            mark.touch()
            time.sleep(1.0)  # the update is made
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.wide
def test_no_first_mini_batch_of_an_epoch_counts_twice(tmp_path: Path) -> None:
    strategy = HybridStrategy("hybrid", on_failure="restart", max_restarts=None)
    killed = AllKilledAfterFirstUpdate(tmp_path)
    trainer = make_trainer(strategy, 3, max_epochs=EPOCHS, callbacks=[killed])
    trainer.fit(Regression(), DataLoader(regression_data(N), SIZE, shuffle=True))
    assert len(list(tmp_path.iterdir())) == 3
    assert strategy.run_stats()["samples"] == N * EPOCHS
    assert strategy.run_stats()["updates"] == N * EPOCHS // (3 * SIZE)


class SlowestFirst(Regression):
    """Near the end of the first epoch all are killed, first worker 0, which has made one step."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.mark = folder / "died"
        self.steps, self.pids = torch.zeros(2, 3, dtype=torch.int64).share_memory_()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        me = self.global_rank
        self.pids[me] = os.getpid()
        while me == 0 and self.steps[me] == 1 and not self.mark.exists():
            time.sleep(0.01)
        if self.steps.sum() >= 2 * N // SIZE - 3 and not self.mark.exists():
            self.mark.touch()
            for each in (0, 3 - me, me):
                os.kill(int(self.pids[each]), signal.SIGKILL)
                time.sleep(0.05)
        self.steps[me] += 1
        time.sleep(0.01 * (me > 0))
        return super().training_step(batch, batch_idx)


@pytest.mark.slow  # four seconds each
@pytest.mark.parametrize("policy", ["async", "backup"])
def test_a_slow_worker_that_is_restarted_first_does_not_leave_the_rest_to_faster_ones(
    tmp_path: Path, policy: str
) -> None:
    strategy = HybridStrategy(policy, on_failure="restart", max_restarts=None)
    trainer = make_trainer(strategy, 3, max_epochs=2)
    data = regression_data(2 * N)
    trainer.fit(SlowestFirst(tmp_path), DataLoader(data, SIZE, shuffle=True))
    assert (tmp_path / "died").exists()
    assert strategy.run_stats()["samples"] == 2 * N * 2


MEETINGS = (
    "decision",
    "who is there",
    "broadcast",
    "who has had a mini-batch",
    "what is logged",
    "reduce",
    "steps of an evaluation",
)


class AllKilledInMeeting(pl.Callback):
    """Some wait for all in ``tag``; the next to come kills them and itself, ``times`` in a row."""

    def __init__(self, folder: Path, tag: str, times: int) -> None:
        self.folder, self.tag, self.times = folder, tag, times
        self.pids = torch.zeros(3, dtype=torch.int64).share_memory_()

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        client = trainer.strategy.client
        gather, self.pids[client.worker] = client.gather, os.getpid()

        def gathering(tag: str, *args: Any, **rest: Any) -> Any:
            if tag == self.tag and trainer.current_epoch > 0:
                self.strike(client.worker)
            return gather(tag, *args, **rest)

        client.gather = gathering

    def strike(self, me: int) -> None:
        n = len(list(self.folder.iterdir()))
        if n < self.times and (me == 1 or n):
            time.sleep(0.1)  # others come, too
            (self.folder / f"{n}").touch()
            there = self.pids[self.pids > 0].tolist()
            self.pids.zero_()
            for pid in sorted(there, key=os.getpid().__eq__):  # itself last
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow  # four seconds each
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("policy", ["async", "backup", "ssp"])
@pytest.mark.parametrize("tag", MEETINGS)
def test_all_are_lost_in_a_meeting_of_workers_that_run_freely(
    tmp_path: Path, tag: str, policy: str, times: int
) -> None:
    killed = AllKilledInMeeting(tmp_path, tag, times)
    strategy = HybridStrategy(policy, on_failure="restart", max_restarts=None)
    trainer = make_trainer(strategy, 3, max_epochs=EPOCHS, callbacks=[killed])
    data = regression_data(N)
    trainer.fit(Regression(), DataLoader(data, SIZE, shuffle=True), DataLoader(data, SIZE))
    assert strategy.run_stats()["samples"] == N * EPOCHS
    assert tag == "what is logged" or len(list(tmp_path.iterdir())) == times


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_all_begin_anew_ends_the_run(
    signum: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), signum)).start()
        raise BeginAnew(60.0)

    monkeypatch.setattr(HybridLauncher, "_run", lost)
    strategy, before = HybridStrategy("hybrid", on_failure="restart"), signal.getsignal(signum)
    with pytest.raises(SystemExit):
        make_trainer(strategy, 2).fit(Regression(), DataLoader(regression_data(N), SIZE))
    assert strategy.interrupted_by == signum
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores it from now on
    assert signum == signal.SIGINT or signal.getsignal(signum) is before
