"""``StepProfiler``: where a step's time goes, under every strategy and however a run ends."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.profilers import PassThroughProfiler

import hybridtrain
from hybridtrain import StepProfiler
from hybridtrain.engine.worlds.worker_exit import WorkerDied
from hybridtrain.errors import UserError
from tests.lightning.toys import Regression, fit
from tests.profiling.test_profiling import check_trace

NAP_S = 0.03


class Straggler(Regression):
    """Worker 1 sleeps in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1:
            time.sleep(NAP_S)
        return super().training_step(batch, batch_idx)


def profile(folder: Path) -> dict[str, Any]:
    """The figures; the timeline is looked at, too, and nothing else is left."""
    assert sorted(path.name for path in folder.iterdir()) == ["profile.json", "timeline.json"]
    check_trace(folder / "timeline.json")
    figures: dict[str, Any] = json.loads((folder / "profile.json").read_text())
    return figures


def seconds(worker: dict[str, Any], phase: str) -> float:
    return float(worker["phases"].get(phase, {"seconds": 0.0})["seconds"])


def spans(worker: dict[str, Any]) -> dict[str, int]:
    return {span["name"]: span["times"] for span in worker["spans"]}


def test_in_lock_step_the_others_wait_for_a_straggler(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit("hybrid", 2, 4, Straggler, profiler=StepProfiler(tmp_path))
    found = profile(tmp_path)
    quick, slow = found["workers"]["0"], found["workers"]["1"]
    steps = quick["steps"]
    assert steps == slow["steps"] == 18 and found["server"][0]["steps"] == 18
    assert seconds(slow, "forward") >= NAP_S * steps
    assert seconds(quick, "wait") > seconds(quick, "forward")
    for worker in (quick, slow):
        together = sum(seconds(worker, phase) for phase in worker["phases"])
        assert together == pytest.approx(worker["seconds"], rel=0.01)
        assert {"backward", "data", "push", "wait", "pull", "hooks"} <= worker["phases"].keys()
    updates = [spans(each).get("update for all", 0) for each in (quick, slow)]
    assert spans(found["server"][0])["update"] + sum(updates) == 18
    assert updates[0] == 0 < updates[1], "the last one makes it"
    printed = capfd.readouterr().out
    assert "worker 1" in printed and "timeline.json shows every step" in printed


@pytest.mark.slow
def test_the_exchange_of_free_running_workers_shows_though_nobody_counts_it(tmp_path: Path) -> None:
    strategy = hybridtrain.HybridStrategy("async", record=tmp_path / "record")
    fit(strategy, 2, 4, profiler=StepProfiler(tmp_path / "profile", quiet=True))
    found = profile(tmp_path / "profile")
    assert strategy.run_stats()["waiting_share"] == [0.0, 0.0]
    assert all(seconds(worker, "wait") > 0 for worker in found["workers"].values())
    server = spans(found["server"][0])
    assert server["update"] == sum(w["steps"] for w in found["workers"].values()) == 36
    assert 0 < server["draw"] < 36, "the others are drawn with a push"
    assert server["copy parameters"] > 0, "workers copy them behind the updates that they make"
    events = check_trace(tmp_path / "profile" / "timeline.json")
    versions = [event["args"]["version"] for w in (1, 2) for event in events[w, 0]]
    assert max(versions) == 36
    assert {event["args"]["worker"] for event in events[0, 0]} - {-1} == {0, 1}


def test_without_a_lock_updates_are_the_workers_own(tmp_path: Path) -> None:
    profiler = hybridtrain.StepProfiler(tmp_path, quiet=True)
    fit(hybridtrain.HybridStrategy("hogwild"), 2, 4, profiler=profiler)
    found = profile(tmp_path)
    assert sum(spans(worker).get("own step", 0) for worker in found["workers"].values()) >= 30


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ssp", "synchronous"])
def test_steps_of_other_policies_and_of_a_single_worker_are_profiled(
    strategy: str, tmp_path: Path
) -> None:
    fit(
        strategy,
        2,
        4,
        profiler=StepProfiler(tmp_path / "two", quiet=True),
        max_epochs=1,
    )
    fit(
        strategy,
        1,
        4,
        profiler=StepProfiler(tmp_path / "one", quiet=True),
        max_epochs=1,
    )
    two, one = profile(tmp_path / "two"), profile(tmp_path / "one")
    assert sum(worker["steps"] for worker in two["workers"].values()) == 12
    assert one["workers"]["0"]["steps"] == 12
    assert ("turn" in spans(two["workers"]["0"])) == (strategy == "synchronous")


def test_lightnings_own_strategies_are_measured_as_far_as_lightning_tells(tmp_path: Path) -> None:
    fit(
        "ddp_fork",
        2,
        4,
        profiler=StepProfiler(tmp_path / "two", quiet=True),
        max_epochs=1,
    )
    fit("auto", 1, 4, profiler=StepProfiler(tmp_path / "one", quiet=True), max_epochs=1)
    two, one = profile(tmp_path / "two"), profile(tmp_path / "one")
    assert [two["workers"][w]["steps"] for w in "01"] == [6, 6] and not two["server"]
    for worker in (two["workers"]["1"], one["workers"]["0"]):
        assert {"forward", "backward", "update", "data"} <= worker["phases"].keys()


class Breaking(Regression):
    """Something happens in worker 1's fourth step."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 3:
            match self.what:
                case "interrupted":
                    os.kill(os.getppid(), signal.SIGINT)
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "fails":
                    raise LookupError("on purpose")
        return super().training_step(batch, batch_idx)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("what", "error", "known"),
    [
        ("interrupted", SystemExit, ["0", "1"]),
        ("fails", LookupError, ["0", "1"]),
        ("killed", WorkerDied, ["0"]),
    ],
)
def test_a_run_that_ends_early_has_a_profile_of_what_there_was(
    what: str, error: type[BaseException], known: list[str], tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGINT)
    profiler = hybridtrain.StepProfiler(tmp_path, quiet=True)
    try:
        with pytest.raises(error):
            fit("hybrid", 2, 4, lambda: Breaking(what), profiler=profiler)
    finally:
        signal.signal(signal.SIGINT, before)
    found = profile(tmp_path)
    assert list(found["workers"]) == known
    assert all(worker["steps"] >= 3 for worker in found["workers"].values())


def test_validation_and_checkpoints_are_apart_from_steps(tmp_path: Path) -> None:
    class Napping(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            time.sleep(NAP_S)

        def val_dataloader(self) -> Any:
            return self.trainer.fit_loop._data_source.instance

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            time.sleep(NAP_S)

    folder = tmp_path / "profile"
    fit(
        "hybrid",
        2,
        12,
        Napping,
        profiler=StepProfiler(folder, quiet=True),
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    for worker in profile(folder)["workers"].values():
        assert seconds(worker, "validation") >= 3 * 2 * NAP_S
        assert seconds(worker, "checkpoint") >= 3 * NAP_S


def test_a_profile_changes_nothing_but_the_time(tmp_path: Path) -> None:
    plain, _ = fit("hybrid", 2, 4)
    watched, _ = fit("hybrid", 2, 4, profiler=StepProfiler(tmp_path, quiet=True))
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)


def test_without_a_profile_nothing_stands_around_any_method() -> None:
    class Looking(Regression):
        def on_train_end(self) -> None:
            strategy: Any = self.trainer.strategy
            session, client = strategy.session, strategy.client
            watched = [client.push, client.queue.draw, client.line.send, session.replica.collect]
            watched += [session.steps[0]._offer, session.guard.accepts]
            assert not any(hasattr(method, "measured") for method in watched)
            assert isinstance(self.trainer.profiler, PassThroughProfiler)

    fit("hybrid", 2, 4, Looking, max_epochs=1)


def test_where_nothing_can_be_written_is_said_before_any_process_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"the profile cannot be written to .*file"):
        fit("hybrid", 2, 4, profiler=StepProfiler(tmp_path / "file"))
    with pytest.raises(UserError, match="limit=0 was given"):
        hybridtrain.StepProfiler(limit=0)
