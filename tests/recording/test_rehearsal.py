"""Another policy on a recorded run: real workers in virtual time, as fast as they were."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrain.engine.recording import Record
from hybridtrain.errors import UserError
from hybridtrain.lightning.replay.replay_fit import rehearse_fit
from tests.lightning.toys import Regression, regression_data
from tests.recording.test_replay import Run

EPOCHS, BATCHES = 2, 12  # mini-batches of 4 in an epoch, all workers together


@dataclass(frozen=True)
class Rehearsed:
    """What has come of it."""

    stats: dict[str, Any]
    module: torch.nn.Module


def as_fast_as(record: Record, seconds: list[float]) -> Record:
    """The same run, had each worker always taken so long."""
    cells = record.cells.copy()
    for worker, own_s in enumerate(seconds):
        cells["own_s"][cells["worker"] == worker] = own_s
    return replace(record, cells=cells)


def rehearse(run: Run, record: Record, policy: Any) -> Rehearsed:
    trainer, module, options = replace(run, policy=policy).made_anew()
    return Rehearsed(rehearse_fit(record, trainer, module, **options), module)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    return Run(folder, "hybrid", 3, Regression, trainer={"max_epochs": EPOCHS})


@pytest.fixture(scope="module")
def record(run: Run) -> Record:
    return run.record()


@pytest.mark.wide
def test_in_lock_step_every_update_takes_as_long_as_the_slowest(run: Run, record: Record) -> None:
    stats = rehearse(run, as_fast_as(record, [1.0, 1.0, 4.0]), "hybrid").stats
    assert stats["updates"] == EPOCHS * BATCHES // 3
    assert stats["training_s"] == 4.0 * stats["updates"]
    assert stats["waiting_share"] == [0.75, 0.75, 0.0]


def test_without_waiting_everybody_works_at_its_own_speed(run: Run, record: Record) -> None:
    stats = rehearse(run, as_fast_as(record, [1.0, 1.0, 4.0]), "async").stats
    assert stats["updates"] == EPOCHS * BATCHES
    assert stats["samples_per_worker"][0] > 2 * stats["samples_per_worker"][2]
    assert stats["waiting_share"] == [0.0, 0.0, 0.0]
    assert stats["training_s"] <= EPOCHS * BATCHES / (1 + 1 + 1 / 4) + EPOCHS * 4.0


def test_backup_workers_drop_the_slow_one_and_nothing_is_lost(run: Run, record: Record) -> None:
    times = as_fast_as(record, [1.0, 1.0, 4.0])
    stats = rehearse(run, times, {"name": "backup", "k": 2}).stats
    assert stats["dropped"][2] > 0 == stats["dropped"][0]
    assert stats["samples"] >= EPOCHS * len(regression_data())
    assert stats["updates"] / stats["training_s"] > 1 / 4.0, "faster than the slowest worker"


def test_one_worker_at_a_time_takes_the_sum_of_all_times(run: Run, record: Record) -> None:
    stats = rehearse(run, as_fast_as(record, [1.0, 2.0, 3.0]), "synchronous").stats
    assert stats["updates"] == EPOCHS * BATCHES
    assert stats["training_s"] == EPOCHS * BATCHES / 3 * (1.0 + 2.0 + 3.0)


@pytest.mark.wide
@pytest.mark.parametrize("policy", ["async", {"name": "backup", "k": "auto"}])
def test_the_same_times_give_the_same_bits(run: Run, record: Record, policy: Any) -> None:
    one, other = rehearse(run, record, policy), rehearse(run, record, policy)
    assert one.stats == other.stats
    for name, value in one.module.state_dict().items():
        assert torch.equal(value, other.module.state_dict()[name])


def test_in_virtual_time_hybrid_has_the_bits_of_the_run_itself(run: Run, record: Record) -> None:
    again = rehearse(run, record, "hybrid")
    assert run.first is not None
    for name, value in run.first.state_dict().items():
        assert torch.equal(value, again.module.state_dict()[name])


def test_a_policy_that_does_not_fit_is_refused(run: Run, record: Record) -> None:
    with pytest.raises(UserError, match="k=7 was given for 3 workers"):
        rehearse(run, record, {"name": "backup", "k": 7})


class Fails(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.global_rank == 1:
            raise RuntimeError("on purpose")


class ByHand(Regression):
    """Optimizer and schedule are stepped in each mini-batch; the latter is told to all workers."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()  # type: ignore[union-attr]
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5)]


class Stops(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0 and batch_idx == 1:
            self.trainer.should_stop = True


@pytest.mark.wide
@pytest.mark.parametrize("policy", ["hybrid", "async"])
@pytest.mark.parametrize("module", [ByHand, Stops])
def test_news_that_workers_do_not_wait_for_do_not_let_them_go_on(
    run: Run, record: Record, module: Any, policy: str
) -> None:
    stats = rehearse(replace(run, module=module), record, policy).stats
    whole = EPOCHS * BATCHES // (3 if policy == "hybrid" else 1)
    assert stats["updates"] == whole if module is ByHand else 0 < stats["updates"] < whole


def test_what_a_run_refuses_is_refused(run: Run, record: Record) -> None:
    shares = replace(run, trainer={"max_epochs": EPOCHS, "limit_train_batches": 0.5})
    with pytest.raises(UserError, match=r"limit_train_batches=0\.5 was given, but workers that"):
        rehearse(shares, record, "async")


def test_what_a_worker_raises_is_raised(run: Run, record: Record) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        rehearse(replace(run, module=Fails), record, "async")


def test_a_record_without_pushes_has_no_times(run: Run, record: Record, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has pushed nothing"):
        rehearse(run, replace(record, cells=record.cells[:10]), "async")
