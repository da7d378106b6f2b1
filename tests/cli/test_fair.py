"""``experiment=fair_comparison``: what is tried, chosen and said; a kill in between; bad input."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hybridtrain.cli.exit_status import CommandOutcome
from hybridtrain.cli.sweep import job_launcher
from hybridtrain.cli.sweep.job_launcher import ProcessLauncher
from hybridtrain.cli.sweep.side_by_side import SweepJob
from hybridtrain.errors import Lost, UserError
from hybridtrain.report.fair import Goal
from hybridtrain.report.history import History
from tests.cli.conftest import Command, summary
from tests.picking import by_default

optuna = pytest.importorskip("optuna", reason="searches need the extra `sweep`")

from hybridtrain.cli.sweep.fair import Entry, FairSweeper, candidates, words_of  # noqa: E402
from hybridtrain.cli.sweep.study import space_of  # noqa: E402

FAIR = ["-m", "experiment=fair_comparison", "task=digits", "hydra.sweep.dir=jobs"]
SMALL = [*FAIR, "compare=[hybrid,async]", "optimizer.lr=0.001,0.002", "seeds=1", "target.value=0.9"]
ONE_RATE = "optimizer.lr=choice(0.002)"
Course = Callable[[str, float, int], list[float] | str]


def as_trained(
    monkeypatch: pytest.MonkeyPatch,
    course: Course,
    at_most: int = 99,
    rate_of: str = "optimizer.lr",
) -> list[SweepJob]:
    """Let jobs leave the history of ``course(strategy, learning rate, seed)`` without a process.

    A text is the error of a job that fails. The sweep is broken off after ``at_most`` jobs.
    """
    began: list[SweepJob] = []

    def run(self: ProcessLauncher, jobs: Iterator[SweepJob], ended: Any, *others: Any) -> None:
        for job in jobs:
            if len(began) == at_most:
                raise SystemExit(130)
            began.append(job)
            self.note(job, ended(job, leave(job)))

    def leave(job: SweepJob) -> CommandOutcome:
        cfg: Any = job.config
        rate = float(OmegaConf.select(cfg, rate_of))
        values = course(strategy_of(job), rate, int(cfg.seed))
        if isinstance(values, str):
            return CommandOutcome(1, error=values)
        (job.folder / ".hydra").mkdir(parents=True, exist_ok=True)
        OmegaConf.save(
            OmegaConf.masked_copy(cfg, [str(x) for x in cfg if x != "hydra"]),
            job.folder / ".hydra/config.yaml",
        )
        history = History(job.folder)
        for i, value in enumerate(values, 1):
            row = {"wall_s": i + 1, "train_s": i, "epoch": i, "updates": i, "samples": 100 * i}
            history.add(row | {"train_loss": 1.0, "val/acc": value})
        content = {"exit": 0, "metrics": {str(cfg.task.metric): values[-1]}}
        (job.folder / "summary.json").write_text(json.dumps(content))
        return CommandOutcome(metric=values[-1], directory=str(job.folder))

    monkeypatch.setattr(ProcessLauncher, "run", run)
    return began


def well(strategy: str, rate: float, seed: int) -> list[float]:
    """0.002 is the best rate; async takes twice as many validations."""
    steps = (1 if rate == 0.002 else 2) * (2 if strategy == "async" else 1)
    return [0.1] * steps + [0.95]


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of reports draw it."""
    monkeypatch.setattr(job_launcher, "leave_page", lambda *_: None)


def content() -> Any:
    return json.loads(Path("jobs/fair_comparison.json").read_text())


def strategy_of(job: SweepJob) -> str:
    return next(x.partition("=")[2] for x in job.overrides if x.startswith("strategy="))


# ---- what is tried -------------------------------------------------------------------------------


def test_an_interval_is_tried_evenly_on_its_scale_from_end_to_end() -> None:
    def tried(space: str, n: int) -> list[str]:
        return [x["a"] for x in candidates(space_of([f"a={space}"])[0], n, 0)]

    assert tried("tag(log, interval(0.01, 1))", 3) == ["0.01", "0.1", "1"]
    assert tried("tag(log, interval(0.01, 1))", 1) == ["0.1"]
    assert tried("interval(0, 1)", 5) == ["0", "0.25", "0.5", "0.75", "1"]
    assert tried("range(1, 100)", 3) == ["1", "51", "100"]
    assert tried("range(1, 3)", 7) == ["1", "2", "3"] and tried("x,y", 7) == ["x", "y"]
    assert tried("range(1000, 1004)", 7) == ["1000", "1001", "1002", "1003", "1004"]
    assert tried("int(interval(1000, 2000))", 3) == ["1000", "1500", "2000"]
    assert tried("interval(0.9999, 1.0001)", 3) == ["0.9999", "1", "1.0001"]
    assert tried("interval(1000.2, 1003.4)", 2) == ["1000.2", "1003.4"]
    assert tried("interval(1, 1)", 3) == ["1"]


def test_several_keys_are_tried_by_sobols_sequence_the_same_for_a_seed() -> None:
    space, _ = space_of(["a=tag(log, interval(1e-4, 1))", "b=interval(0, 1)", "c=x,y"])
    points = candidates(space, 8, 3)
    assert points == candidates(space, 8, 3) != candidates(space, 8, 4)
    assert len(points) == 8 and {int(4 * float(x["b"])) for x in points} == {0, 1, 2, 3}
    grid, _ = space_of(["a=1,2", "b=x,y"])
    assert len(candidates(grid, 4, 0)) == 4 and len(candidates(grid, 3, 0)) == 3


def test_an_entry_is_split_at_blanks_outside_of_brackets_and_quotes() -> None:
    text = "async  a=tag(log, interval(0.01, 0.1)) b=[1, {c: 2}] d='x y' 'e=f g'"
    split = ["async", "a=tag(log, interval(0.01, 0.1))", "b=[1, {c: 2}]", "d='x y'", "e=f g"]
    assert words_of(text) == split and words_of(" ") == []


# ---- whole comparisons ---------------------------------------------------------------------------


def test_the_best_of_each_search_is_trained_with_new_seeds_in_turn(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = as_trained(monkeypatch, well)
    options = ["budget=3", "seeds=2", "target.value=0.9", "target.slower=2", "logger=none"]
    result = command(*FAIR, "compare=[hybrid,async]", *options)
    assert result.code == 0, result.err
    each = [(strategy_of(j), j.config.optimizer.lr, j.config.seed) for j in jobs]
    both = ("hybrid", "async")
    assert each[:6] == [(x, rate, 0) for rate in (0.00025, 0.002, 0.016) for x in both]
    assert each[6:] == [(x, 0.002, seed) for seed in (1, 2) for x in both]
    assert {j.config.callbacks.straggler.times for j in jobs} == {2}
    assert [j.config.test for j in jobs] == [False] * 6 + [True] * 4
    assert {(j.config.trainer.max_epochs, j.config.target.value) for j in jobs} == {(20, 0.9)}
    rows = content()["strategies"]
    found = [(x["strategy"], x["reached"], x["train_s"]["median"]) for x in rows]
    assert found == [("hybrid", 2, 2), ("async", 2, 3)]
    assert rows[1]["train_s_times"]["median"] == 1.5 and rows[1]["train_s_differ"] is None
    assert "async takes 1.5 times as long as hybrid, perhaps by chance" in result.out
    assert "| hybrid   | lr=0.002 | 2 of 2" in result.out
    assert all("tested" not in x for x in content()["search"])
    assert [x["tested"] for x in content()["runs"]] == [0.95] * 4
    repeated = command(*rows[0]["command"].split()[3:], "seed=1", "--cfg", "job")
    assert repeated.code == 0 and "straggler.AtTarget" in repeated.out


def test_a_strategy_in_a_comparison_may_have_options_and_a_search_of_its_own(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = '"backup strategy.policy.k=1 optimizer.lr=0.1,0.2",hybrid'
    jobs = as_trained(monkeypatch, lambda *_: [0.1, 0.5])
    ends = ["budget.updates=9", "budget.seconds=60", "trainer.devices=2"]
    result = command(*SMALL, ONE_RATE, f"compare=[{own}]", *ends)
    assert result.code == 0, result.err
    ours = [x.config for x in jobs if strategy_of(x) == "backup"]
    assert [x.optimizer.lr for x in ours] == [0.1, 0.2, 0.1]
    assert {(x.strategy.policy.k, x.trainer.max_steps, x.trainer.max_epochs) for x in ours} == {
        (1, 9, -1)
    }
    assert ours[0].trainer.max_time == {"seconds": 60}
    assert "val/acc ≥ 0.9 within the budget: no run did; the best median is 0.5" in result.out
    assert "optimizer.lr=0.1 is the best, at an end of what was tried" in result.out


OWN = ["model._target_=tests.cli.tiny.TinyModule", "data._target_=tests.cli.tiny.TinyData"]


@pytest.mark.slow
def test_a_strategys_own_range_replaces_the_common_one_of_the_same_key(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    fair = [x if x != "task=digits" else "task=own" for x in FAIR]
    common = [*OWN, "model.lr=tag(log, interval(0.001, 0.1))", "task.monitor=val/acc"]
    own = 'compare=[hybrid,"async model.lr=tag(log, interval(0.2, 0.8))"]'
    jobs = as_trained(monkeypatch, well, rate_of="model.lr")
    options = ["budget=3", "seeds=1", "target.value=0.9", "task.mode=max", "logger=none"]
    result = command(*fair, *common, own, *options)
    assert result.code == 0, result.err
    tried = [(strategy_of(x), x.config.model.lr) for x in jobs[:6]]
    assert sorted({*tried}) == [
        *(("async", x) for x in (0.2, 0.4, 0.8)),
        *(("hybrid", x) for x in (0.001, 0.01, 0.1)),
    ]
    assert all(len(x["values"]) == 1 for x in content()["search"])


def test_another_key_is_searched_together_with_the_learning_rate(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = as_trained(monkeypatch, well)
    given = ["compare=[hybrid,async]", "budget=4", "seeds=1", "target.value=0.9"]
    assert command(*FAIR, *given, "data.batch_size=8,16").code == 0
    ours = [x.config for x in jobs[:8] if strategy_of(x) == "hybrid"]
    assert {x.data.batch_size for x in ours} == {8, 16}
    assert len({x.optimizer.lr for x in ours}) == 4
    assert all(0.00025 <= x.optimizer.lr <= 0.016 for x in ours)


def test_a_target_that_is_not_given_is_one_that_every_search_reaches(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def course(strategy: str, rate: float, seed: int) -> list[float]:
        return [0.5, 0.6, 0.7, 0.8] if strategy == "hybrid" else [0.7, 0.8, 0.9, 0.95]

    jobs = as_trained(monkeypatch, course)
    assert command(*SMALL, ONE_RATE, "target.value=null").code == 0
    assert content()["target"] == 0.7
    assert [x.config.target.value for x in jobs] == [None] * 2 + [0.7] * 2


@pytest.mark.slow
def test_failed_nan_and_late_runs_are_said_and_counted(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def course(strategy: str, rate: float, seed: int) -> list[float] | str:
        odd: dict[tuple[str, int], list[float] | str] = {
            ("hybrid", 2): "it broke",
            ("async", 1): [0.8],
            ("async", 2): [float("nan")] * 2,
        }
        return "it broke" if rate == 0.002 else odd.get((strategy, seed), well(strategy, rate, 0))

    as_trained(monkeypatch, course)
    result = command(*SMALL, "seeds=3")
    assert result.code == 1  # as of every sweep with failed jobs
    rows = {x["strategy"]: x for x in content()["strategies"]}
    assert (rows["hybrid"]["reached"], rows["async"]["reached"]) == (2, 1)
    assert rows["hybrid"]["train_s"] == {"median": 3, "low": 3, "high": None}
    assert rows["async"]["train_s"] == {"median": None, "low": 5, "high": None}
    never = "never reached the target"
    for line in (f"hybrid, seed 2: {never} (it broke)", f"async, seed 2: {never}\n"):
        assert line in result.out
    assert f"async, seed 1: {never} (its best is 0.8)" in result.out


def test_a_strategy_without_any_result_is_in_the_table(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_trained(monkeypatch, lambda x, *more: "broke" if x == "async" else well(x, *more))
    result = command(*SMALL, ONE_RATE)
    assert "async: no job of its search returned the metric" in result.out
    assert content()["strategies"][1]["seeds"] == 0


@pytest.mark.parametrize("at_most", by_default([2, 5], 5))
def test_a_comparison_that_was_broken_off_goes_on_as_it_would_have(
    command: Command, monkeypatch: pytest.MonkeyPatch, at_most: int
) -> None:
    with monkeypatch.context() as broken:
        as_trained(broken, well, at_most)
        assert command(*SMALL).code == 130
    times = {x: x.stat().st_mtime_ns for x in Path("jobs").glob("*/summary.json")}
    assert len(times) == at_most
    jobs = as_trained(monkeypatch, well)
    result = command(*SMALL, "resume=auto")
    assert result.code == 0, result.err
    assert len(jobs) == 6 - at_most
    assert times.items() <= {x: x.stat().st_mtime_ns for x in times}.items()
    assert summary("jobs/5")["exit"] == 0
    rows = [(x["strategy"], x["values"], x["train_s"]["median"]) for x in content()["strategies"]]
    rate = {"optimizer.lr": "0.002"}
    assert rows == [("hybrid", rate, 2), ("async", rate, 3)]
    more = command("-m", "resume=jobs", "seeds=5")
    assert (more.code, len(jobs)) == (0, 6 - at_most + 4 * 2), more.err
    assert [x["seeds"] for x in content()["strategies"]] == [5, 5]
    assert "all jobs of this sweep have finished" in command("-m", "resume=jobs").err
    assert "this sweep has seeds=5, and can" in command("-m", "resume=jobs", "seeds=0").err


RATE = {"optimizer.lr": "0.1"}
DAMAGED: dict[str, Any] = {
    "chosen.json.target is missing": {},
    "chosen.json.chosen is missing": {"target": 0.9},
    "chosen.json.chosen.async is missing": {"target": 0.9, "chosen": {"hybrid": RATE}},
    "chosen.json.target is None": {"target": None, "chosen": {}},
    "chosen.json.target is 'high'": {"target": "high", "chosen": {}},
    "chosen.json.chosen is of type list": {"target": 0.9, "chosen": []},
    "chosen.json.chosen.hybrid": {"target": 0.9, "chosen": {"hybrid": [], "async": RATE}},
    "hybrid has values that its search has not tried": {
        "target": 0.9,
        "chosen": {"hybrid": {"optimizer.lr": "7"}, "async": RATE},
    },
}


def test_a_damaged_chosen_json_is_refused_and_one_without_choices_ends_the_comparison() -> None:
    sweeper, path = FairSweeper(), Path("chosen.json")
    sweeper.entries = {x: Entry(x, [], [RATE]) for x in ("hybrid", "async")}
    sweeper.directory, sweeper.sweep_config = Path(), OmegaConf.create({"resume": "jobs"})
    sweeper.goal = Goal("val/acc", "max")
    for said, content in DAMAGED.items():
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match=re.escape(said)):
            sweeper._choice([])
    path.write_text("[")
    with pytest.raises(UserError, match=r"target is missing.*remove chosen\.json"):
        sweeper._choice([])
    path.write_text(json.dumps({"target": 0.9, "chosen": {"hybrid": RATE, "async": None}}))
    assert sweeper._choice([]) == (
        Goal("val/acc", "max", 0.9),
        {"hybrid": RATE, "async": None},
    )
    path.write_text(json.dumps({"target": 0.9, "chosen": dict.fromkeys(sweeper.entries)}))
    with pytest.raises(Lost, match="no job of the searches has logged val/acc"):
        sweeper._choice([])


@pytest.mark.slow
def test_strategies_are_compared_on_digits_in_processes_side_by_side(command: Command) -> None:
    options = ["compare=hybrid,async", "budget.trials=2", "budget.epochs=3", "seeds=2"]
    result = command(*FAIR, *options, "trainer.devices=2", "hydra.launcher.at_once=2")
    assert result.code == 0, result.err
    found = content()
    assert [summary(f"jobs/{i}")["exit"] for i in range(8)] == [0] * 8
    assert sum(x["reached"] for x in found["strategies"]) >= 1, "of four short runs"
    assert "jobs ran side by side: times are those of a shared machine" in result.out
    best = {x["strategy"]: x for x in found["runs"]}["hybrid"]
    assert best["tested"] == summary(f"jobs/{best['folder']}")["metrics"]["test/acc"]


# ---- bad input -----------------------------------------------------------------------------------

BAD = {
    "compare=[hybrid,asinc]": "there is no strategy 'asinc' (did you mean async?)",
    "compare=[]": "compare=[] was given; it must be two strategies or more",
    "compare=[hybrid]": "compare=[hybrid] was given; it must be two strategies or more",
    "compare=[hybrid,hybrid]": "each once",
    "compare=5": "compare=5 was given; it must be a list",
    'compare=[hybrid,"backup strategy.policy.q=3"]': "there is no key 'q' in strategy.policy",
    "compare=[hybrid,'']": "there is no strategy",
    "seeds=0": "seeds=0 was given; it must be a whole number from 1 to 1000",
    "seeds=1,2": "seeds=1,2: a comparison has one seeds",
    "budget=0": "budget.trials=0 was given; it must be a whole number from 1 to 1000",
    "budget=100000000": "budget.trials=100000000 was given; it must be a whole number from 1 to",
    "budget=1,2": "budget=1,2: a comparison has one budget",
    "budget.epochs=1,2": "budget.epochs=1,2: a comparison has one budget.epochs",
    "trainer.devices=1,2": "trainer.devices=1,2: a comparison has one trainer.devices",
    "target.slower=1,2": "target.slower=1,2: a comparison has one target.slower",
    "task.mode=min,max": "task.mode=min,max: a comparison has one task.mode",
    "seed=4294967291": "seed=4294967291 was given; it must be a whole number from 0 to 4294967290",
    "target.value=inf": "target.value=inf was given; it must be a number that is finite, or null",
    "target.value=nan": "target.value=nan was given; it must be a number that is finite, or null",
    "target.slower=0": "target.slower=0 was given; it must be a number from 1 on",
    "target.slower=nan": "target.slower=nan was given; it must be a number from 1 on",
    "target=null": "target=null was given; it must be {value: ",
    'compare=[hybrid,"backup strategy.policy.k=\'3"]': "a quote is not closed",
    'compare=[hybrid,"async optimizer.lr=choice(1"]': "a bracket is not closed",
    "budget=some": "budget=some was given; it must be {trials: ",
    "budget.epochs=0": "budget.epochs=0 was given; it must be a whole number from 1 on, or null",
    "target.value=good": "target.value=good was given; it must be a number",
    "strategy=async": "strategy=async was given; name it in 'compare=[…]'",
    "task.monitor=null": "task.monitor=null: a target is a value of a metric",
    "hydra/launcher=basic": "a search needs hydra/launcher=process",
    "model._target_=tests.cli.tiny.TinyModule": "there is no optimizer.lr to search around",
}


OF_ALL = [
    *("strategy=async", "seed=3", "target.slower=2", "task=speech", "task.mode=min", "test=false"),
    *("trainer.devices=2", "trainer.max_epochs=3", "trainer.max_time=null", "resume=auto"),
    *("hydra.launcher.at_once=2", "hydra/launcher=basic", "budget.trials=3", "experiment=null"),
    *("++trainer.max_steps=3", "~callbacks.straggler"),
]


@pytest.mark.parametrize("option", OF_ALL)
def test_an_option_that_all_strategies_share_is_refused_behind_one_strategys_name(
    option: str,
) -> None:
    with pytest.raises(UserError) as refused:
        FairSweeper()._entry(f"hybrid {option}", ["task=digits"])
    said = str(refused.value)
    assert said.startswith(f"compare, hybrid {option}: {option} cannot be a strategy's own;")
    assert "options of strategy, optimizer, model" in said


@pytest.mark.few(9)
@pytest.mark.parametrize("option", BAD)
def test_bad_input_is_one_line_before_a_job_starts(command: Command, option: str) -> None:
    result = command(*FAIR, option)
    assert result.code == 2 and len(result.err.splitlines()) == 1
    assert BAD[option] in result.err
    assert not Path("jobs/0").exists() and not Path("jobs/sweep.json").exists()


def test_parts_that_contradict_each_other_are_found_before_a_job_starts(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = as_trained(monkeypatch, well)
    own = 'compare=[async,"hybrid strategy.update=median"]'
    result = command(*FAIR, own, "trainer.devices=2")
    assert result.code == 2 and not jobs
    assert "merges at least 3; use policy=hybrid with at least 3 workers" in result.complaint


def test_a_fair_comparison_without_an_option_that_it_needs_names_that_option(
    command: Command,
) -> None:
    result = command("experiment=fair_comparison", "task=digits")
    assert result.code == 2 and "experiment=fair_comparison is a sweep: add -m" in result.err
    result = command("-m", "task=digits", "compare=[hybrid,async]")
    assert result.code == 2 and "compare: it belongs to -m experiment=fair_comparison" in result.err
    result = command("-m", "task=digits", "hydra/sweeper=fair")
    assert result.code == 2 and "comes with experiment=fair_comparison" in result.err


@pytest.mark.parametrize("name", ["optuna", "scipy"])
def test_a_comparison_names_the_package_that_is_not_installed(
    command: Command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    result = command(*FAIR)
    assert result.code == 2
    assert f"this needs the package {name}: pip install 'hybridtrain[sweep]'" in result.err


def test_a_metric_that_no_job_returns_ends_the_comparison_at_the_first(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "task.monitor=val/nothing: the run logged no such metric; it logged val/acc"
    jobs = as_trained(monkeypatch, lambda *_: said)
    result = command(*SMALL, ONE_RATE, "task.monitor=val/nothing")
    assert result.code == 2 and said in result.err and len(jobs) == 1
    as_trained(monkeypatch, lambda *_: "it broke")
    result = command(*SMALL, ONE_RATE)
    assert result.code == 1 and "no job of the searches has logged val/acc" in result.err
