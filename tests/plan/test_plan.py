"""`python -m hybridtrain plan`: what it ranks, models, ranges, and refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridtrain.cli.commands.plan import main
from hybridtrain.virtual.plan import prediction
from hybridtrain.virtual.plan.evidence import MetricTarget, evidence
from hybridtrain.virtual.plan.prediction import samples_to
from tests.report.test_advice import UPDATE_S, recorded

COLUMNS = "wall_s,train_s,epoch,updates,samples,train_loss,val/loss"


def left(
    folder: Path,
    seconds: Sequence[float] = (1.0, 1.0),
    losses: Sequence[float] = (),
    rounds: int = 80,
    sizes: Sequence[int] = (8,) * 8,
    policy: Any = "hybrid",
    exchange: Any = None,
    size_bytes: int = 0,
    epoch: int = 20,  # rounds
    **summary: Any,
) -> Path:
    """The folder of a run that validated after every 1,000 samples."""
    recorded(folder, seconds, rounds, policy, sizes, epoch, size_bytes, exchange=exchange)
    name = policy if isinstance(policy, str) else policy.get("name", "hybrid")
    n = len(seconds)
    said = {"strategy": name, "samples": rounds * n * 8, "effective_batch": n * 8.0}
    said |= {"staleness": {"mean": 0.0}, "cores": 64, "cpu_s": 0.1 * rounds * n, "exit": 0}
    (folder / "summary.json").write_text(json.dumps(said | summary))
    rows = [f"1,1,0,1,{1000 * (i + 1)},0.5,{loss}" for i, loss in enumerate(losses)]
    (folder / "history.csv").write_text("\n".join([COLUMNS, *rows]) + "\n")
    return folder


def planned(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """The rows of a plan."""
    out = tmp_path / "plan.json"
    assert main([*arguments, f"json={out}", "quiet=true"]) == 0
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error of a plan that is refused."""
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


# ---- speed --------------------------------------------------------------------------------------


def test_a_straggler_puts_strategies_that_do_not_wait_first(tmp_path: Path) -> None:
    run = left(tmp_path / "run")
    rows = planned(tmp_path, f"run={run}", "hosts=1x4:slower=3", "strategy=hybrid,backup,async")
    assert [row["strategy"] for row in rows] == ["async", "backup", "hybrid"]
    free, backup, together = rows
    assert together["samples_per_s"] == pytest.approx(4 * 8 / (3 + UPDATE_S), rel=0.02)
    assert together["bottleneck"] == "worker 3, 3× slower"
    assert backup["dropped_share"] > 0.05 and free["staleness"] > 1
    assert free["samples_per_s"] <= 8 / UPDATE_S  # an update for each gradient
    assert {"workers 2 → 4", "a slower worker"} <= set(free["extrapolated"])


def test_the_runs_own_row_is_what_was_measured_and_extrapolates_nothing(tmp_path: Path) -> None:
    run = left(tmp_path / "run", [1.0, 4.0])
    (row,) = planned(tmp_path, f"run={run}", "strategy=hybrid")
    assert row["extrapolated"] == [] and abs(row["error"]) < 0.01
    assert row["samples_per_s"] == pytest.approx(16 / (4 + UPDATE_S), rel=0.01)
    assert row["bottleneck"] == "worker 1, 4× slower"
    (alike,) = planned(tmp_path, f"run={run}", "strategy=hybrid", "hosts=1x4")
    assert alike["samples_per_s"] == pytest.approx(32 / (1 + UPDATE_S), rel=0.01)
    assert "slow worker 1 of the run left out" in alike["extrapolated"]


@pytest.mark.parametrize(("mini_batch_s", "step_s"), [(1.0, 1.0), (0.1, UPDATE_S)])
def test_one_update_behind_a_step_takes_the_longer_of_mini_batch_and_update(
    mini_batch_s: float, step_s: float, tmp_path: Path
) -> None:
    run = left(tmp_path / "run", [mini_batch_s] * 2, epoch=1000)
    rows = planned(tmp_path, f"run={run}", "strategy=hybrid,pipe_sgd", "hosts=1x2,1x64")
    speeds = {(row["strategy"], row["workers"]): row["samples_per_s"] for row in rows}
    for workers in (2, 64):  # whose 2,000 mini-batches are fewer updates than those of the warm-up
        together, behind = (speeds[name, workers] for name in ("hybrid", "pipe_sgd"))
        assert together == pytest.approx(8 * workers / (mini_batch_s + UPDATE_S), rel=0.01)
        assert behind == pytest.approx(8 * workers / step_s, rel=0.04)
    row = next(each for each in rows if each["strategy"] == "pipe_sgd" and each["workers"] == 2)
    waits = max(0.0, UPDATE_S - mini_batch_s) / step_s
    assert row["limits"]["server's update"] == pytest.approx(waits, abs=0.02)
    assert row["staleness"] == pytest.approx(1, abs=0.01)
    assert "an update beside mini-batches not measured" in row["extrapolated"]


def test_a_run_that_hides_its_updates_predicts_only_its_own_strategy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = left(tmp_path / "run", policy="pipe_sgd")
    told = refused(capsys, f"run={run}", "strategy=hybrid")
    assert "under whose strategy pipe_sgd updates are made beside mini-batches" in told
    assert "give a run of hybrid" in told
    other = left(tmp_path / "other", [1.0] * 4)
    rows = planned(tmp_path, f"run={run},{other}", "strategy=hybrid,pipe_sgd", "hosts=1x2")
    assert {row["strategy"] for row in rows} == {"hybrid", "pipe_sgd"}


def test_one_update_behind_takes_two_rows_of_each_worker_and_two_copies(tmp_path: Path) -> None:
    run = left(tmp_path / "run", [1.0] * 4, size_bytes=400)
    rows = planned(tmp_path, f"run={run}", "strategy=hybrid,pipe_sgd")
    n_bytes = {row["strategy"]: row["memory_bytes"] for row in rows}
    assert n_bytes["pipe_sgd"] - n_bytes["hybrid"] == 400 * (4 + 2)


def test_workers_share_the_cores_of_their_host(tmp_path: Path) -> None:
    """Half of a mini-batch is the processor's: on a core for two it takes 1.5 times as long."""
    run = left(tmp_path / "run", cores=2, cpu_s=0.5 * 160)
    two, four = (
        planned(tmp_path, f"run={run}", "strategy=hybrid", f"hosts={size}")[0]
        for size in ("1x2", "1x4")
    )
    assert two["samples_per_s"] == pytest.approx(16 / (1 + UPDATE_S), rel=0.01)
    assert four["samples_per_s"] == pytest.approx(32 / (1.5 + UPDATE_S), rel=0.01)
    assert four["limits"]["cores"] > 0.2 and "4 busy threads on 2 cores" in four["extrapolated"]
    (apart,) = planned(tmp_path, f"run={run}", "strategy=hybrid", "hosts=1x4:cores=4")
    assert apart["samples_per_s"] == pytest.approx(32 / (1 + UPDATE_S), rel=0.01)


def test_waiting_for_cores_in_the_recorded_run_is_taken_out(tmp_path: Path) -> None:
    run = left(tmp_path / "run", [1.0] * 4, cores=2, cpu_s=0.5 * 320)
    (row,) = planned(tmp_path, f"run={run}", "strategy=hybrid", "hosts=1x4:cores=4")
    assert row["samples_per_s"] == pytest.approx(32 / (0.5 + UPDATE_S), rel=0.01)


def test_workers_of_a_run_without_such_figures_are_taken_to_have_been_busy_and_waited_for_cores(
    tmp_path: Path,
) -> None:
    run = left(tmp_path / "run", [1.0] * 4, cores=2, cpu_s=0)
    four, alone = (
        planned(
            tmp_path, f"run={run}", "strategy=grace:window_s=inf:together=true", f"hosts={size}"
        )[0]
        for size in ("1x4", "1x4:cores=4")
    )
    assert four["samples_per_s"] == pytest.approx(32 / (1 + UPDATE_S), rel=0.02)
    assert alone["samples_per_s"] == pytest.approx(32 / (0.5 + UPDATE_S), rel=0.02)
    assert "processor time not recorded" in four["extrapolated"]


def test_hosts_have_a_network_and_strategies_options(tmp_path: Path) -> None:
    run = left(tmp_path / "run")
    size = "2x2:network.latency_s=0.5"
    rows = planned(tmp_path, f"run={run}", f"hosts=2x2,{size}", "strategy=ssp:lead=1,local_sgd")
    speed = {(row["strategy"], row["hosts"]): row["samples_per_s"] for row in rows}
    assert speed["ssp:lead=1", "2x2"] > 1.2 * speed["ssp:lead=1", size]
    assert speed["local_sgd", size] > 0.8 * speed["local_sgd", "2x2"]  # after 8, and then after 2
    assert all("network not measured" in row["extrapolated"] for row in rows)
    slow = planned(tmp_path, f"run={run}", "hosts=1x2:slower.0=2", "strategy=hybrid")
    assert slow[0]["bottleneck"] == "worker 0, 2× slower"


def test_a_run_whose_workers_train_alone_has_several_mini_batches_in_a_contribution(
    tmp_path: Path,
) -> None:
    run = left(tmp_path / "run", strategy="local_sgd", exchange={"name": "movement", "every": 4})
    own, each = (
        planned(tmp_path, f"run={run}", f"strategy={name}")[0]
        for name in ("local_sgd:every=4", "hybrid")
    )
    assert own["samples_per_s"] == pytest.approx(16 / (1 + UPDATE_S), rel=0.01)
    assert each["samples_per_s"] == pytest.approx(4 / (0.25 + UPDATE_S), rel=0.01)
    assert (own["lag"], each["lag"]) == (evidence(run).lag, 2) == (8, 2)


@pytest.mark.parametrize("every", [1, 4])
def test_a_worker_that_trains_alone_makes_each_step_itself(tmp_path: Path, every: int) -> None:
    run, name = left(tmp_path / "run"), f"strategy=local_sgd:every={every}"
    (row,) = planned(tmp_path, f"run={run}", name)
    assert row["samples_per_s"] == pytest.approx(16 / (1 + UPDATE_S + UPDATE_S / every), rel=0.01)
    run = left(tmp_path / "own", strategy="local_sgd", exchange={"name": "movement", "every": 1})
    (row,) = planned(tmp_path, f"run={run}", "strategy=local_sgd:every=1")
    assert row["samples_per_s"] == pytest.approx(16 / (1 + UPDATE_S), rel=0.01)


# ---- the target ---------------------------------------------------------------------------------


def test_one_run_gives_a_range_and_its_own_row_a_measurement(tmp_path: Path) -> None:
    run = left(tmp_path / "run", losses=[0.9, 0.5, 0.2])
    rows = planned(
        tmp_path, f"run={run}", "target=val/loss:0.4", "hosts=1x2,1x4", "strategy=hybrid"
    )
    two, four = sorted(rows, key=lambda row: int(row["workers"]))
    assert (two["trust"], two["samples_to_target"]) == ("measured", [2000, 3000])
    assert (four["trust"], four["samples_to_target"]) == ("range", [2000, 6000])
    assert two["time_to_target_s"] == pytest.approx(
        [x / two["samples_per_s"] for x in (2000, 3000)], rel=0.01
    )


def test_runs_of_two_lags_give_both_constants(tmp_path: Path) -> None:
    few = evidence(left(tmp_path / "2", losses=[0.9, 0.9, 0.2]))
    many = evidence(left(tmp_path / "4", [1.0] * 4, losses=[0.9] * 4 + [0.2]))
    target = MetricTarget("val/loss", 0.4)
    # At lag 2 it took 2,000 to 3,000 samples, at lag 4 4,000 to 5,000: 500 to 1,500 more for each.
    assert samples_to([few, many], target, "hybrid", 2.0) == ((2000, 3000), "measured")
    found, trust = samples_to([few, many], target, "async", 8.0)
    assert trust == "fitted" and found == (3000 + 6 * 500, 3000 + 6 * 1000)
    assert samples_to([few], target, "async", 50.0) == (None, "")  # anything from 1 to 25 times


def test_a_target_that_no_run_comes_near_is_said_and_has_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = left(tmp_path / "run", losses=[0.9, 0.5])
    assert main([f"run={run}", "target=val/loss:0.1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "no run has reached val/loss:0.1; the nearest value was 0.5, so the time" in text
    assert "seconds to target" not in text
    rows = planned(tmp_path, f"run={run}", "target=val/loss:0.1")
    assert all(row["time_to_target_s"] is None for row in rows)


def test_whether_less_is_better_is_as_the_task_says(tmp_path: Path) -> None:
    run = left(tmp_path / "run", losses=[0.95, 0.8])  # an accuracy that falls
    (run / ".hydra").mkdir()
    (run / ".hydra/config.yaml").write_text("task: {monitor: val/loss, mode: max}\n")
    reached = evidence(run).reached(MetricTarget("val/loss", 0.9))
    assert reached == (0, 1000)


@pytest.mark.parametrize("losses", [[0.9], [0.9, 0.45, 0.95]])
def test_a_direction_that_the_runs_do_not_tell_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], losses: list[float]
) -> None:
    run = left(tmp_path / "run", losses=losses)
    error = refused(capsys, f"run={run}", "target=val/loss:0.5")
    assert "do not say whether less of it is better" in error
    assert "give target=val/loss:0.5:min, or val/loss:0.5:max" in error
    (row,) = planned(tmp_path, f"run={run}", "strategy=hybrid", "target=val/loss:0.5:min")
    reached = [1000, 2000] if len(losses) > 1 else None
    assert row["samples_to_target"] == reached


def test_workers_that_take_turns_leave_the_cores_to_the_one_that_computes(tmp_path: Path) -> None:
    run = left(tmp_path / "run", cores=2, cpu_s=1.0 * 160)
    (row,) = planned(tmp_path, f"run={run}", "strategy=synchronous", "hosts=1x8")
    assert row["samples_per_s"] == pytest.approx(8 / (1 + UPDATE_S), rel=0.02)


def test_a_slower_device_needs_no_more_processor_time(tmp_path: Path) -> None:
    run = left(tmp_path / "run", cores=2, cpu_s=1.0 * 160)
    (row,) = planned(tmp_path, f"run={run}", "strategy=hybrid", "hosts=1x4:slower=3")
    assert row["samples_per_s"] == pytest.approx(32 / (3 + 1 + UPDATE_S), rel=0.02)


def test_a_slower_device_needs_no_more_processor_time_after_a_run_that_waited_for_cores(
    tmp_path: Path,
) -> None:
    """Four workers on a core each took four seconds for one: alone the slow one takes three."""
    run = left(tmp_path / "run", [4.0] * 4, cores=1, cpu_s=1.0 * 320)
    (row,) = planned(tmp_path, f"run={run}", "strategy=hybrid", "hosts=1x2:slower=3:cores=4")
    assert row["samples_per_s"] == pytest.approx(16 / (3 + UPDATE_S), rel=0.03)


# ---- what is shown ------------------------------------------------------------------------------


def test_the_table_names_what_was_extrapolated_and_how_well_the_run_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    run = left(tmp_path / "run", losses=[0.9, 0.2])
    assert main([f"run={run}", "target=val/loss:0.4", "hosts=1x2,1x4", "top=3"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "a strategy other than hybrid" in text and "workers 2 → 4" in text
    assert "(+0.0 %)" in text and "11 more rows: top=N" in text and "seconds to target" in text


def test_what_is_piped_has_its_full_width_and_says_what_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = left(tmp_path / "run", losses=[0.9, 0.2])
    assert main([f"run={run}", "target=val/loss:0.4", "hosts=1x4:slower=3"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.rstrip().endswith("first bottleneck    not measured") or "not measured" in head
    assert any("worker 3, 3× slower" in row and "hybrid " in row for row in rows)
    assert any("measured without first mini-batches and validations" in row for row in rows)
    assert any(row.startswith("seconds to target: of training;") for row in rows)


def test_a_record_that_names_no_policy_is_of_hybrid(tmp_path: Path) -> None:
    recorded(tmp_path / "run", [1.0, 1.0], policy=None)
    (tmp_path / "run" / "summary.json").write_text('{"exit": 0}')
    run = evidence(tmp_path / "run")
    assert (run.strategy, run.gathers, run.seen.steps) == ("hybrid", 2.0, 1)


def test_planned_memory_is_that_of_the_memory_page(tmp_path: Path) -> None:
    """With Adam and two workers, a worker's own parameters and state included: docs/memory.md."""
    run = left(tmp_path / "run", size_bytes=4)
    own = 2 * (4 + 8)
    wanted = {"hybrid": 20, "async": 28, "softsync": 32, "sign_sgd": 28, "local_sgd": 12 + own}
    wanted |= {"diloco": 16 + own, "async_diloco": 32 + own, "easgd": 24 + own}
    wanted |= {"downpour": 28 + own}
    rows = planned(tmp_path, f"run={run}", f"strategy={','.join(wanted)}")
    assert {row["strategy"]: row["memory_bytes"] for row in rows} == wanted


@pytest.mark.parametrize(
    ("optimizer", "n_bytes"),
    [
        ({"_target_": "torch.optim.SGD", "momentum": 0.9}, 4),
        ({"_target_": "torch.optim.SGD", "momentum": 0.0}, 0),
        ({"_target_": "torch.optim.Adam", "amsgrad": True}, 12),
        ({"_target_": "torch.optim.RMSprop", "momentum": 0.9, "centered": True}, 12),
    ],
)
def test_planned_optimizer_state_follows_from_the_optimizers_options(
    tmp_path: Path, optimizer: Any, n_bytes: int
) -> None:
    run = left(tmp_path / "run", size_bytes=4)
    (run / ".hydra").mkdir(exist_ok=True)
    (run / ".hydra/config.yaml").write_text(json.dumps({"optimizer": optimizer}))
    assert evidence(run).state_bytes == n_bytes
    narrow = {"optimizer": optimizer, "strategy": {"state_dtype": "bf16"}}
    (run / ".hydra/config.yaml").write_text(json.dumps(narrow))
    assert evidence(run).state_bytes == n_bytes // 2


def test_a_range_that_begins_at_0_is_ranked_by_its_middle() -> None:
    rows = [SimpleNamespace(time_to_target_s=x, samples_per_s=1.0) for x in ((0, 60), (20, 25))]
    assert sorted(rows, key=prediction._rank) == rows[::-1]  # type: ignore[arg-type]


def test_the_end_of_an_epoch_hands_over_what_is_left(tmp_path: Path) -> None:
    """An epoch has 20 mini-batches of each worker: 8, 8 and 4, or one contribution of all."""
    run = left(tmp_path / "run")
    some, one = (
        planned(tmp_path, f"run={run}", f"strategy=local_sgd:every={n}")[0] for n in (8, 100)
    )
    assert (some["lag"], one["lag"]) == (pytest.approx(2 * 20 / 3), 2 * 20)


def test_a_codec_makes_rows_smaller(tmp_path: Path) -> None:
    run = left(tmp_path / "run", size_bytes=4000)
    sizes = "hosts=2x2,2x2:network.bandwidth=1e3"
    rows = planned(tmp_path, f"run={run}", sizes, "strategy=hybrid,sign_sgd")
    mb = {row["strategy"]: row["handed_over_bytes_per_s"] / row["updates_per_s"] for row in rows}
    assert mb["hybrid"] == pytest.approx(4 * 4000) and mb["sign_sgd"] == pytest.approx(4 * 125)
    speed = {(row["strategy"], row["hosts"]): row["samples_per_s"] for row in rows}
    slow = "2x2:network.bandwidth=1e3"
    # Two rows up and the masters down, 4,000 bytes each, at 1,000 bytes a second.
    assert speed["hybrid", slow] == pytest.approx(32 / (1 + UPDATE_S + 8 + 4), rel=0.05)
    assert speed["sign_sgd", slow] == pytest.approx(32 / (1 + UPDATE_S + 0.25 + 4), rel=0.05)
    assert all(
        ("time of encoding not measured" in row["extrapolated"]) == (row["strategy"] == "sign_sgd")
        for row in rows
    )


def test_a_page_has_table_and_charts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the extra `report`")
    run, page = left(tmp_path / "run", losses=[0.9, 0.2]), tmp_path / "plan.html"
    said = [f"run={run}", "target=val/loss:0.4", "hosts=1x2,1x4", f"html={page}", "quiet=true"]
    assert main(said) == 0
    text = page.read_text()
    assert text.count("<figure>") == 2 and "1x4" in text and "workers 2 → 4" in text


# ---- bad input ----------------------------------------------------------------------------------


def test_a_record_that_is_too_short_says_how_long_it_must_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = left(tmp_path / "run", rounds=12)
    error = refused(capsys, f"run={run}")
    assert "its record has 12 contributions of worker 0; a plan needs 30 of each worker" in error


def test_a_run_without_a_record_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    assert "there is no record in it" in refused(capsys, f"run={tmp_path / 'run'}")
    assert "there is no such directory" in refused(capsys, f"run={tmp_path / 'none'}")


def test_runs_of_different_trainings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = left(tmp_path / "1"), left(tmp_path / "2", sizes=(4, 4))
    error = refused(capsys, f"run={one},{other}")
    assert "differ in samples in a mini-batch: 8, 4; runs in one plan train the same" in error


def test_more_mini_batches_than_a_row_may_have_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = left(tmp_path / "run", epoch=10**9)  # its workers never meet
    error = refused(capsys, f"run={run}", "strategy=local_sgd:every=100000000")
    assert "1,200,000,000 mini-batches, and a row has at most" in error


def test_a_metric_that_no_run_logs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = left(tmp_path / "run", losses=[0.5])
    error = refused(capsys, f"run={run}", "target=val/los:0.1")
    assert "no run has logged val/los (did you mean val/loss?); logged were val/loss" in error
    bare = left(tmp_path / "bare")
    assert "logged were no metrics" in refused(capsys, f"run={bare}", "target=val/los:0.1")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["hosts=4"], "hosts=4 was given; say hosts=HxN"),
        (["hosts=1x2:slower"], "'slower' was given without a value; say slower=VALUE"),
        (["hosts="], "'hosts=' was given without a value; say hosts=VALUE"),
        (["hosts=1x2", "hosts=1x4"], "hosts was given twice"),
        (["hosts=1x4:slower.0=3:slower.0=2"], "slower.0 was given twice"),
        (["hosts=1x4:slower=3:slower.3=2"], "slower.3 was given twice"),
        (["hosts=1x1000000"], "hosts=1x1000000 was given; at most 10,000 workers in all"),
        (["hosts=1x999999999999999999999"], "at most 10,000 workers in all"),
        ([f"hosts={'9' * 5000}x1"], "at most 10,000 workers in all"),
        (["hosts=1x4:slower=1e308"], "slower=1e+308 was given; it must be a number above 0 and up"),
        (["network.latency_s=1e308"], "network.latency_s=1e+308 was given; it must be"),
        (["network.bandwidth=1e-300"], "network.bandwidth=1e-300 was given; it must be"),
        (["strategy=power_sgd"], "how many bytes it hands over depends on the shapes"),
        (["target=val/loss:nan"], "target=val/loss:nan was given; say target=METRIC:X"),
        (["target=val/loss:inf"], "target=val/loss:inf was given; say target=METRIC:X"),
        (["target=val/loss:true"], "target=val/loss:true was given; say target=METRIC:X"),
        (["strategy=nope"], ", local_sgd, pipe_sgd, post_local_sgd"),
        (["hosts=1x2:slower=0"], "slower=0 was given; it must be a number above 0"),
        (["hosts=1x2:slower.2=3"], "hosts=1x2:slower.2=3: worker 2 was named, but 2 workers"),
        (["hosts=1x2:slower.x=3"], "slower.W=x was given"),
        (["hosts=1x2:core=3"], "(did you mean cores?)"),
        (["hosts=1x2,1x4:cores=0"], "cores=0 was given"),
        (["network.bandwidth=-1"], "network.bandwidth=-1 was given"),
        (["strategy=hybird"], "strategy=hybird was given (did you mean hybrid?)"),
        (["strategy=backup:k=9"], "k=9 was given for 2 workers"),
        (["strategy=streaming_diloco"], "its workers compute on while they hand over"),
        (["strategy=sandblaster"], "strategy=sandblaster"),
        (["target=0.1"], "target=0.1 was given; say target=METRIC:X"),
        (["target=val/wer:low"], "target=val/wer:low was given; say target=METRIC:X"),
        (["workers=4"], "'workers=4' was given"),
        (["top=0"], "top=0 was given"),
    ],
)
def test_bad_input_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    run = left(tmp_path / "run")
    assert text in refused(capsys, f"run={run}", *arguments)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("samples", -1),
        ("samples", float("nan")),
        ("samples", "many"),
        ("effective_batch", float("inf")),
        ("effective_batch", 10**400),
        ("staleness.mean", -1.0),
        ("staleness", 3),
        ("cores", 10**400),
        ("cores", 2.5),
        ("cpu_s", float("nan")),
        ("cpu_s", [1]),
        ("strategy", {"name": "hybrid"}),
    ],
)
def test_figures_that_no_run_can_have_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: Any
) -> None:
    name, _, inner = key.partition(".")
    run = left(tmp_path / "run", **{name: {inner: value} if inner else value})
    error = refused(capsys, f"run={run}", "hosts=1x2", "strategy=hybrid")
    assert f"run={run}: summary.json.{key} is " in error and "correct the file" in error


@pytest.mark.parametrize(
    ("seconds", "sizes", "text"),
    [
        ((0.0, 0.0), (8, 8), "usual mini-batches of worker 0 took no time"),
        ((1e38, 1.0), (8, 8), "record.times.0[0] is"),
        ((1.0, 1.0), (3e9, 3e9), "record.batch_size is"),
    ],
)
def test_times_and_sizes_that_no_run_can_have_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: Any, sizes: Any, text: str
) -> None:
    run = left(tmp_path / "run", seconds, sizes=sizes)
    assert text in refused(capsys, f"run={run}", "hosts=1x2", "strategy=hybrid")


def test_a_history_whose_samples_go_back_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = left(tmp_path / "run")
    rows = ["1,1,0,1,2000,0.5,0.9", "1,1,0,1,1000,0.5,0.2"]
    (run / "history.csv").write_text("\n".join([COLUMNS, *rows]) + "\n")
    error = refused(capsys, f"run={run}", "target=val/loss:0.4")
    assert "history.csv has 1000 samples after 2000" in error


def test_a_plan_needs_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no run was given; say run=DIR" in refused(capsys, "hosts=1x2")


def test_a_run_of_several_hosts_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = left(tmp_path / "run")
    monkeypatch.setattr("hybridtrain.engine.recording.record_file.Record.n_hosts", 2)
    assert "had 2 hosts, and its workers' times have the network" in refused(capsys, f"run={run}")
