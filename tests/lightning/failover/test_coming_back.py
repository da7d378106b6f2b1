"""What a worker finds that comes back, and what the others make of its absence."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint, Timer
from pytorch_lightning.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch.utils.data import DataLoader, Sampler, TensorDataset

from hybridtrain import HybridStrategy
from hybridtrain.cli.telemetry.monitor import RunMonitor
from hybridtrain.engine.worker.worker_group import WorkerGroup
from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.mid_epoch import KEY
from hybridtrain.lightning.collectives import Collectives
from hybridtrain.lightning.failover.rejoin import advance
from hybridtrain.report.history import read_history
from tests.lightning.toys import Manual, Regression, make_trainer, regression_data
from tests.picking import by_default

N, SIZE, EPOCHS = 48, 4, 3


class Killed(pl.Callback):
    """Worker ``who`` is killed once, in its step ``when``."""

    def __init__(self, folder: Path, who: int, when: int) -> None:
        self.mark, self.who, self.left = folder / "died", who, when

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.left -= 1
        if trainer.global_rank == self.who and self.left < 0 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def run(
    policy: str, on_failure: str, *callbacks: pl.Callback, module: Any = None, **options: Any
) -> Any:
    strategy = HybridStrategy(policy, on_failure=on_failure)
    trainer = make_trainer(strategy, 3, max_epochs=EPOCHS, callbacks=list(callbacks), **options)
    data = regression_data(N)
    trainer.fit(module or Regression(), DataLoader(data, SIZE, shuffle=True), DataLoader(data, N))
    return trainer


class OverAlready(pl.Callback):
    """Like a clock that has run out when a process comes back."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_fit_start(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = self.mark.exists()


@pytest.mark.parametrize("policy", by_default(["hybrid", "async"], "async"))
def test_a_worker_that_comes_back_does_not_decide_alone_to_end(tmp_path: Path, policy: str) -> None:
    killed = Killed(tmp_path, 1, 2)
    trainer = run(policy, "restart", killed, OverAlready(killed.mark))
    assert killed.mark.exists() and trainer.current_epoch == EPOCHS
    assert trainer.strategy.run_stats()["samples"] == N * EPOCHS


@pytest.mark.parametrize("on_failure", ["continue", "restart"])
@pytest.mark.parametrize("policy", by_default(["hybrid", "async"], "hybrid"))
def test_a_clock_is_looked_at_though_the_worker_that_has_it_is_away(
    tmp_path: Path, policy: str, on_failure: str
) -> None:
    clock = Timer({"minutes": 5}, interval="epoch")  # worker 0's is everybody's
    trainer = run(policy, on_failure, Killed(tmp_path, 0, 3), clock)
    assert trainer.current_epoch == EPOCHS
    assert trainer.strategy.run_stats()["samples"] == N * EPOCHS


@pytest.mark.parametrize("every", by_default([1, 2], 1))
@pytest.mark.parametrize("policy", by_default(["hybrid", "async", "softsync"], "hybrid"))
def test_a_restarted_worker_makes_loaders_again_when_the_others_do(
    tmp_path: Path, policy: str, every: int
) -> None:
    """All meet there."""
    killed = Killed(tmp_path, 1, 5)
    trainer = run(policy, "restart", killed, reload_dataloaders_every_n_epochs=every)
    assert killed.mark.exists() and trainer.current_epoch == EPOCHS
    assert trainer.strategy.run_stats()["samples"] == N * EPOCHS


@pytest.mark.parametrize(("left", "every", "steps"), [(40, 1, 5), (40, 3, 2), (1, 1, 1)])
def test_a_state_is_not_advanced_beyond_its_epoch(left: int, every: int, steps: int) -> None:
    """Or samples of the next one would count twice; mini-batches are of 8 samples."""
    loader = {"spans": [[60 - left, 60]], "whole": 8, "batches": 2}
    logged = {"epoch_loop.state_dict": {"_batches_that_stepped": 2}}
    state: Any = {KEY: {"loaders": [loader], "batches": 2}, "loops": {"fit_loop": logged}}
    with pytest.raises(UserError, match=f"known state of training is {steps + 1} updates old"):
        advance(state, steps + 1, every)
    assert advance(state, steps, every)  # to its end
    assert loader == {"spans": [], "whole": 8, "batches": 2 + -(-left // 8)}


class Meetings:
    """A client whose meetings are prescribed: who was there, and what they had brought."""

    def __init__(self, worker: int, script: list[tuple[tuple[int, ...], dict[int, Any]]]) -> None:
        self.worker, self.script, self.group = worker, script, WorkerGroup(worker, 3)

    def gather(self, tag: str, item: Any) -> list[Any]:
        met, brought = self.script.pop(0)
        self.group.meet(met, remaining=False)
        return [item if each == self.worker else brought[each] for each in met]


def test_a_broadcast_whose_source_is_lost_on_the_way_comes_from_another_worker() -> None:
    for worker, other in ((1, 2), (2, 1)):
        second = {1: (1, "of 1"), 2: (1, None)}
        client = Meetings(worker, [((1, 2), {other: (0, None)}), ((1, 2), {other: second[other]})])
        assert Collectives(client).broadcast(f"of {worker}", 0) == "of 1"  # type: ignore[arg-type]
        assert not client.script


def test_all_workers_take_the_same_broadcast_though_only_some_know_of_a_lost_worker() -> None:
    client = Meetings(2, [((1, 2), {1: (1, "of 1")}), ((1, 2), {1: (1, "of 1")})])
    assert Collectives(client).broadcast("of 2", 0) == "of 1"  # type: ignore[arg-type]


@pytest.mark.parametrize("on_failure", by_default(["continue", "restart"], "restart"))
def test_the_history_of_a_run_goes_on_though_worker_0_is_lost(
    tmp_path: Path, on_failure: str
) -> None:
    monitor = RunMonitor(tmp_path)
    run("hybrid", on_failure, monitor, Killed(tmp_path, 0, 5))  # in the second epoch
    rows = read_history(tmp_path).columns
    assert set(rows["epoch"]) == {0, 1, 2, 3}
    for n in (N, 2 * N, 3 * N):  # after each validation, when others may be a mini-batch ahead
        assert any(n <= samples <= n + 2 * SIZE for samples in rows["samples"])
    for name in ("epoch", "samples", "train_s", "wall_s"):
        assert rows[name] == sorted(rows[name])
    assert rows["train_s"][0] > 0


class Slow(pl.Callback):
    """All but worker 0, and worker 0 before it dies."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        late = trainer.global_rank == 0 and not self.mark.exists()
        time.sleep(0.1 if late else 0.02 * (trainer.global_rank > 0))


def test_in_lock_step_nobody_is_ahead_of_a_worker_that_comes_back(tmp_path: Path) -> None:
    killed = Killed(tmp_path, 0, 1)
    trainer = run("hybrid", "restart", Slow(killed.mark), killed)
    assert trainer.strategy.run_stats()["lead"]["max"] == [1, 1, 1]


class Cached(Regression):
    """With state that is no parameter: a mask that no checkpoint has, a count, something extra."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1).expand(4), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
        self.folder, self.extra = folder, 0

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state

    def on_train_start(self) -> None:
        if (self.folder / "died").exists():
            (self.folder / "found").write_text(f"{int(self.steps)} {self.extra}")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        self.extra += 1
        return super().training_step((batch[0] * self.mask, batch[1]), batch_idx)


def test_buffers_that_no_checkpoint_has_and_extra_state_come_back_too(tmp_path: Path) -> None:
    trainer = run("hybrid", "restart", Killed(tmp_path, 1, 2), module=Cached(tmp_path))
    assert trainer.current_epoch == EPOCHS
    steps, extra = map(int, (tmp_path / "found").read_text().split())
    assert steps > 0 and extra > 0


class ByHand(Manual, Regression):
    pass


@pytest.mark.parametrize(("kind", "expected"), [(Regression, EPOCHS), (ByHand, 0)])
def test_the_position_of_training_is_told_at_most_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, expected: int
) -> None:
    dump = _CheckpointConnector.dump_checkpoint

    def dumping(self: Any, *args: Any, **kwargs: Any) -> Any:
        with (tmp_path / "dumps").open("a") as file:
            file.write("x")
        return dump(self, *args, **kwargs)

    monkeypatch.setattr(_CheckpointConnector, "dump_checkpoint", dumping)
    (tmp_path / "dumps").touch()
    run("hybrid", "restart", module=kind())
    assert len((tmp_path / "dumps").read_text()) == expected


class Own(Sampler[int]):
    """An order that only the user knows."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Any:
        return iter([(5 * n) % N for n in range(N)])


class Counting(pl.LightningModule):
    """Its parameters are how often each sample was in an update."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.w, self.folder = torch.nn.Parameter(torch.zeros(N)), folder

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        began = (self.folder / "began").exists()
        if self.global_rank == 0 and not began:
            time.sleep(0.3 if (self.folder / "died").exists() else 0.02)
        elif (self.folder / "died").exists():
            (self.folder / "began").touch()  # the other process
        elif self.global_rank == 1:
            until = time.monotonic() + 30
            while not any(self.folder.glob("*.ckpt")) and time.monotonic() < until:
                time.sleep(0.01)
            (self.folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return -self.w[batch[0]].sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.w], lr=1.0)


@pytest.mark.parametrize("policy", by_default(["async", "synchronous"], "async"))
def test_who_comes_back_after_a_checkpoint_in_the_epoch_knows_the_users_order(
    tmp_path: Path, policy: str
) -> None:
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    strategy = HybridStrategy(policy, on_failure="restart")
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saving]}
    trainer = make_trainer(strategy, 2, max_epochs=1, **options)
    module = Counting(tmp_path)
    trainer.fit(module, DataLoader(TensorDataset(torch.arange(N)), SIZE, sampler=Own()))
    assert (tmp_path / "began").exists()
    assert module.w.tolist() == [1.0] * N


class Shown(pl.LightningModule):
    """Its parameter moves by the learning rate in each update."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.weight.sum()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def steps_of(module: Shown, killed: Killed, on_failure: str = "restart") -> int:
    """Train it, while a worker is killed; returns the number of updates."""
    strategy = HybridStrategy(on_failure=on_failure)
    trainer = make_trainer(strategy, 2, max_epochs=1, callbacks=[killed])
    trainer.fit(module, DataLoader(regression_data(N), SIZE))
    assert killed.mark.exists()
    return int(trainer.global_step)


@pytest.mark.parametrize("on_failure", by_default(["continue", "restart"], "restart"))
@pytest.mark.parametrize("who", by_default([0, 1], 0))
def test_a_rate_that_was_changed_behind_the_last_push_of_a_lost_worker_counts(
    tmp_path: Path, who: int, on_failure: str
) -> None:
    module = Shown()
    steps = steps_of(module, Killed(tmp_path, who, 2), on_failure)
    assert steps >= 6
    assert module.weight.item() == -sum(0.5**step for step in range(steps))


class ShownTwice(Shown):
    """Two parameters, each with an optimizer and a schedule, which are stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.other = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.weight.sum() + self.other.sum())
        for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    def configure_optimizers(self) -> Any:
        made = [torch.optim.SGD([each], lr=1.0) for each in (self.weight, self.other)]
        return made, [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in made]


def test_a_rate_changed_before_a_worker_is_lost_counts_in_each_of_several_optimizers(
    tmp_path: Path,
) -> None:
    module = ShownTwice()
    assert steps_of(module, Killed(tmp_path, 0, 2)) == 12
    assert module.weight.item() == module.other.item() == -sum(0.5**step for step in range(6))


class LoweredByHand(Shown):
    """Worker 0 alone lowers the rate, which no schedule moves."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0 and batch_idx == 1:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.25

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_a_rate_that_worker_0_alone_has_set_stays(tmp_path: Path) -> None:
    module = LoweredByHand()
    assert steps_of(module, Killed(tmp_path, 0, 3)) == 6
    assert module.weight.item() == -1 - 5 * 0.25


@pytest.mark.wide
def test_a_restarted_worker_has_no_second_share_of_limit_train_batches(tmp_path: Path) -> None:
    killed, strategy = Killed(tmp_path, 1, 6), HybridStrategy("async", on_failure="restart")
    trainer = make_trainer(strategy, 2, max_epochs=1, callbacks=[killed], limit_train_batches=20)

    class Slow(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.15)
            return super().training_step(batch, batch_idx)

    trainer.fit(Slow(), DataLoader(regression_data(200), SIZE))
    assert killed.mark.exists() and 30 < trainer.global_step <= 40
