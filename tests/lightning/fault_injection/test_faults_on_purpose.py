"""Faults on purpose happen where they were asked for, in real processes, and are told of."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loops import training_epoch_loop
from pytorch_lightning.profilers import PassThroughProfiler
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from hybridtrain import HybridStrategy
from hybridtrain.engine.faults import PHASES
from hybridtrain.engine.recording import read_record
from hybridtrain.engine.worlds.worker_exit import WorkerDied
from hybridtrain.errors import UserError
from hybridtrain.lightning.fault_injection.in_worker import (
    EXIT_CODE,
    InjectedFault,
    interrupt_updates,
)
from hybridtrain.lightning.replay.replay_fit import replay_fit
from tests.lightning.toys import Regression, flat, make_trainer, regression_data
from tests.picking import by_default

STEP = 3


def train(*faults: dict[str, Any], policy: str = "hybrid", **options: Any) -> tuple[Any, Any]:
    """Two workers, two epochs of six steps; a validation and a checkpoint after each."""
    ours = ("exchange", "on_oom", "on_nonfinite", "checkpoint", "hang_timeout_s")
    mine = {name: options.pop(name) for name in ours if name in options}
    strategy = HybridStrategy(policy, faults=[{"worker": 1, **each} for each in faults], **mine)
    pl.seed_everything(7, verbose=False)
    n_readers = options.pop("n_readers", 0)
    trainer = make_trainer(strategy, 2, max_epochs=2, **options)
    train_loader = DataLoader(regression_data(), 4, shuffle=True, num_workers=n_readers)
    module = Regression()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, train_loader, DataLoader(regression_data(8), 4))
    finally:
        train.strategy = strategy  # type: ignore[attr-defined]
    return module, trainer


def told() -> list[tuple[str, str, int, int]]:
    """What the last run has told of its faults."""
    rows = train.strategy.run_stats()["faults"]  # type: ignore[attr-defined]
    return [(row["kind"], row["phase"], row["worker"], row["count"]) for row in rows]


@pytest.mark.few(3)
@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_can_be_killed_in_every_phase(phase: str, tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, save_on_train_epoch_end=True, monitor=None)
    fault = {"step": STEP, "kind": "kill", "phase": phase}
    with pytest.raises(WorkerDied, match=r"worker 1 .*SIGKILL"):
        train(fault, callbacks=[saving], enable_checkpointing=True)
    assert told() == [("kill", phase, 1, 1)]


class Leisurely(pl.Callback):
    """What is written in the background is written before the next mini-batches are over."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.05)


def test_a_checkpoint_is_torn_when_its_writer_dies(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, save_on_train_epoch_end=True, save_top_k=-1)
    fault = {"step": 11, "kind": "kill", "phase": "checkpoint", "worker": 0}
    told = [saving, Leisurely()]
    with pytest.raises(WorkerDied, match="worker 0"):
        train(fault, callbacks=told, enable_checkpointing=True, checkpoint="background")
    whole = {path: torch.load(path, weights_only=True) for path in tmp_path.rglob("*.ckpt")}
    steps = {path.name: content["global_step"] for path, content in whole.items()}
    assert sorted(steps.values()) == [6, 12] and steps["interrupted.ckpt"] == 12, "another wrote it"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("exit", WorkerDied, f"worker 1 .* exited with code {EXIT_CODE}"),
        ("exception", InjectedFault, "on purpose: exception of worker 1 in compute, step 3"),
        ("oom", torch.OutOfMemoryError, "on purpose"),
        ("nan", UserError, "worker 1 .* not finite"),
        ("lose_data_loader", InjectedFault, "no process of its own"),
    ],
)
def test_a_fault_ends_the_run_as_the_real_one_would(kind: str, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        train({"step": STEP, "kind": kind})
    assert told() == [(kind, "compute", 1, 1)]


def test_losing_the_processes_that_read_data_is_what_it_would_be_for_torch() -> None:
    """Which sees the death or the broken pipe first, or waits for half a message for ever."""
    with pytest.raises((RuntimeError, OSError, EOFError)) as caught:
        train({"step": 1, "kind": "lose_data_loader"}, n_readers=1, hang_timeout_s=10)
    assert not isinstance(caught.value, InjectedFault)
    assert told() == [("lose_data_loader", "compute", 1, 1)]


@pytest.mark.parametrize("policy", by_default(["hybrid", "async"], "hybrid"))
def test_what_the_strategy_forgives_is_left_out(policy: str) -> None:
    faults = [{"step": 2, "kind": "nan"}, {"step": 4, "kind": "oom"}]
    module, _ = train(*faults, policy=policy, on_nonfinite="drop", on_oom="drop")
    stats = train.strategy.run_stats()  # type: ignore[attr-defined]
    assert stats["left_out"] == {"nonfinite": [0, 1], "oom": [0, 1]}
    assert flat(module).isfinite().all()


def test_a_corrupt_gradient_is_finite_and_moves_parameters_where_they_should_not_be() -> None:
    straight, _ = train()
    bent, _ = train({"step": 2, "kind": "corrupt_gradient", "factor": -3})
    assert flat(bent).isfinite().all() and not torch.equal(flat(straight), flat(bent))
    assert told() == [("corrupt_gradient", "compute", 1, 1)]


def test_a_slow_worker_computes_the_same() -> None:
    straight, _ = train()
    slow, _ = train({"step": 2, "kind": "slow", "factor": 1.5})
    assert torch.equal(flat(straight), flat(slow))
    assert told() == [("slow", "compute", 1, 1)]


@pytest.mark.parametrize(("phase", "happens"), [("compute", 7), ("push", 9), ("pull", 9)])
def test_steps_between_two_exchanges_are_steps(
    phase: str, happens: int, capfd: pytest.CaptureFixture[str]
) -> None:
    every_4 = {"name": "movement", "every": 4}
    with pytest.raises(InjectedFault):
        train({"step": 7, "kind": "exception", "phase": phase}, exchange=every_4)
    assert f"faults: exception, worker 1, step {happens}, in {phase}" in capfd.readouterr().err


def test_an_update_is_that_of_the_step_behind_which_the_exchange_is() -> None:
    kill = {"step": 2, "kind": "kill", "phase": "update"}  # steps count from 0 here, from 1 below
    with pytest.raises(WorkerDied, match="in its training step 4,"):
        train(kill, exchange={"name": "movement", "every": 2})


def test_random_faults_strike_whoever_they_are_drawn_for() -> None:
    faults = {"worker": None, "kind": "nan", "rate": 0.3, "seed": 5}
    train(faults, on_nonfinite="drop")
    counts = {worker: count for _, _, worker, count in told()}
    stats = train.strategy.run_stats()  # type: ignore[attr-defined]
    assert stats["left_out"] == {"nonfinite": [counts[0], counts[1]]}


def test_a_fault_that_never_came_is_told_of() -> None:
    strategy = HybridStrategy(faults=[{"worker": 0, "step": 400, "kind": "kill"}])
    trainer = make_trainer(strategy, 2, max_epochs=1)
    with pytest.warns(UserWarning, match=r"kill of worker 0 in compute, step 400: it never came"):
        trainer.fit(Regression(), DataLoader(regression_data(), 4))


def patched_by_workers() -> tuple[Any, ...]:
    """What worker processes change in Lightning's and torch's classes and modules."""
    signature = training_epoch_loop.is_param_in_hook_signature
    fetching = _MapDatasetFetcher.fetch, ExceptionWrapper.reraise
    return (dict(vars(pl.LightningModule)), PassThroughProfiler.profile, signature, *fetching)


def test_a_replay_survives_the_faults_of_the_run(tmp_path: Path) -> None:
    fault = {"worker": 1, "step": 2, "kind": "nan"}
    slow = {"worker": 0, "step": 2, "kind": "slow", "factor": 1.1}

    def run(**options: Any) -> tuple[Any, Any]:
        strategy = HybridStrategy("async", faults=[fault, slow], on_nonfinite="drop", **options)
        pl.seed_everything(7, verbose=False)
        return make_trainer(strategy, 2, max_epochs=1), Regression()

    trainer, module = run(record=tmp_path)
    loader = DataLoader(regression_data(), 4, shuffle=True)
    trainer.fit(module, loader)
    again, copy = run()
    (path,) = tmp_path.iterdir()
    before = patched_by_workers()
    report = replay_fit(read_record(path), again, copy, train_dataloaders=loader)
    assert report.equal and report.whole and report.updates > 0, report
    # Workers, in processes of their own, may change these; a replay is in the user's process.
    assert patched_by_workers() == before


def test_who_is_to_fail_must_be_there_and_hogwild_has_no_update_to_strike_in() -> None:
    with pytest.raises(UserError, match="there is no worker 2"):
        train({"worker": 2, "step": 1, "kind": "kill"})
    with pytest.raises(UserError, match="under hogwild"):
        train({"step": 1, "kind": "kill", "phase": "update"}, policy="hogwild")


def test_without_faults_nothing_is_wrapped() -> None:
    class Server:
        pass

    strategy = HybridStrategy()
    trainer = make_trainer(strategy, 2)
    trainer.state.fn = "fit"  # type: ignore[assignment]
    strategy.faults.begin(trainer, 2)
    interrupt_updates(Server(), strategy.faults)  # it would fail for lack of rounds
    assert strategy.faults.conclude(well=True) == {}
