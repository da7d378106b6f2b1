"""--multirun: every job has the workers it names, a process and a directory of its own."""

from __future__ import annotations

import csv
import json
import math
import os
from collections import Counter
from inspect import signature
from pathlib import Path

import pytest

from hybridtrain.cli import hydra_config
from hybridtrain.cli.exit_status import CommandOutcome
from hybridtrain.cli.sweep import job_launcher
from hybridtrain.cli.sweep.fair import FairSweeper
from hybridtrain.cli.sweep.job_launcher import JobRow, ProcessLauncher, _endings
from hybridtrain.cli.sweep.search import OptunaSweeper
from hybridtrain.report import charts
from tests.cli.conftest import Command, summary
from tests.cli.tiny import TINY, N
from tests.picking import by_default


@pytest.mark.parametrize("strategy", by_default(["hybrid", "ddp"], "hybrid"))
def test_trap_16_a_sweep_over_devices_trains_every_sample_once_per_epoch(
    command: Command, tmp_path: Path, strategy: str
) -> None:
    diaries = [tmp_path / f"diary{i}" for i in range(2)]
    for diary in diaries:
        diary.mkdir()
    where = f"model.diary={tmp_path}/diary${{hydra:job.num}}"
    result = command(
        "-m", *TINY, f"strategy={strategy}", "trainer.devices=2,3", where, "hydra.sweep.dir=jobs"
    )
    assert (result.code, result.complaints) == (0, [])
    found = [summary(f"jobs/{i}") for i in range(2)]
    assert [(x["strategy"], x["workers"]) for x in found] == [(strategy, 2), (strategy, 3)]
    for diary, workers in zip(diaries, (2, 3), strict=True):
        pages = sorted(diary.iterdir())
        assert len(pages) == workers
        seen = Counter(line for page in pages for line in page.read_text().splitlines())
        assert seen == Counter(f"{epoch} {i}" for epoch in range(2) for i in range(N))
    assert sorted(x.name for x in Path("jobs").iterdir()) == [
        *("0", "1", "comparison.csv", "comparison.html", "curves.csv", "jobs.json"),
        "multirun.yaml",
        "sweep.json",
    ]
    assert not Path("outputs").exists()


@pytest.mark.slow
def test_the_table_at_the_end_names_overrides_and_metric(command: Command) -> None:
    options = ["trainer.max_epochs=1,2", "task.metric=train/loss", "hydra.sweep.dir=jobs"]
    result = command(*TINY[:2], TINY[3], "-m", *options)  # flags may follow the overrides
    *table, _, last = result.out.strip().splitlines()[-5:]
    assert last == "side by side: jobs/comparison.html"
    assert table[0].split() == ["job", "overrides", "metric", "where"]
    for number, line in enumerate(table[1:]):
        loss = summary(f"jobs/{number}")["metrics"]["train/loss"]
        assert line.split() == [
            str(number),
            f"trainer.max_epochs={number + 1}",
            charts.number(loss),
            f"jobs/{number}",
        ]


def test_a_failed_job_is_reported_and_the_sweep_goes_on_and_is_told_each_jobs_metric(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    launch = job_launcher.ProcessLauncher.launch

    def listen(self: job_launcher.ProcessLauncher, jobs: object, initial_job_idx: int) -> object:
        returned = launch(self, jobs, initial_job_idx)  # type: ignore[arg-type]
        told.extend(x.return_value for x in returned)
        return returned

    monkeypatch.setattr(job_launcher.ProcessLauncher, "launch", listen)
    options = ["model.fail_at=2,null", "task.metric=train/loss", "hydra.sweep.dir=jobs"]
    result = command("-m", *TINY, *options)
    assert result.code == 1
    assert math.isnan(told[0])
    assert told[1] == pytest.approx(summary("jobs/1")["metrics"]["train/loss"])
    assert [summary(f"jobs/{i}")["exit"] for i in range(2)] == [1, 0]
    assert "failed (1): RuntimeError: this module fails on purpose" in result.out


@pytest.mark.parametrize(
    "strategies",
    [
        pytest.param(["hybrid", "async", "ddp"], marks=pytest.mark.slow, id="all"),
        pytest.param(["async", "hybrid"], id="some"),
    ],
)
def test_a_sweep_ends_with_a_page_of_its_jobs_the_failed_ones_named_as_such(
    command: Command, strategies: list[str]
) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the extra `report`")
    jobs = [f"strategy={','.join(strategies)}", "model.fail_at=null,2"]
    options = ["trainer.devices=2", "logger=none", "hydra.sweep.dir=jobs"]
    result = command("-m", *TINY, *jobs, *options)
    assert "side by side: jobs/comparison.html" in result.out
    page = Path("jobs/comparison.html").read_text()
    n = len(strategies)
    assert f"own: {2 * n} runs compared" in page and f"{n} of {2 * n} runs did not finish" in page
    known = n - ("ddp" in strategies)  # ddp's error is a traceback
    assert page.count(">RuntimeError: this module fails on purpose<") == known
    assert page.count('<tr class="bad">') == 2 * n
    assert page.count("<figure>") >= 3 + 2  # loss three times; speed; waiting
    with Path("jobs/comparison.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(x["strategy"], x["status"]) for x in rows] == [
        (s, how) for s in strategies for how in ("finished", "failed")
    ]
    updates = {"hybrid": 12, "async": 24, "ddp": 12}
    assert [int(x["updates"]) for x in rows[::2]] == [updates[s] for s in strategies]
    assert [x["waiting_percent"] != "" for x in rows[::2]] == [s != "ddp" for s in strategies]
    with Path("jobs/curves.csv").open(encoding="utf-8-sig", newline="") as file:
        last = {x["run"]: x for x in csv.DictReader(file)}
    assert [
        int(last[f"{2 * i}: {s} fail_at=null"]["samples"]) for i, s in enumerate(strategies)
    ] == [2 * N] * n


def test_the_endings_of_jobs_are_json_whatever_their_errors_say() -> None:
    outcomes = [
        CommandOutcome(1, math.nan, "the loss is NaN"),
        CommandOutcome(0, math.inf),
        CommandOutcome(0, 0.5),
    ]
    rows = [JobRow(n, [], outcome, Path(f"jobs/{n}")) for n, outcome in enumerate(outcomes)]

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found = json.loads(_endings(rows, Path("jobs")), parse_constant=refuse)
    assert [found[str(n)]["metric"] for n in range(3)] == [None, None, 0.5]
    assert found["0"]["error"] == "the loss is NaN"


@pytest.mark.slow
def test_a_page_that_cannot_be_made_does_not_change_how_the_sweep_ends(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr("hybridtrain.cli.sweep.job_launcher.compare", fail)
    result = command("-m", *TINY, "model.width=1,2", "hydra.sweep.dir=jobs")
    assert result.code == 0 and "side by side" not in result.out
    assert "python -m hybridtrain compare jobs" in result.complaint


@pytest.mark.parametrize("strategy", ["hybrid", "ddp"])
@pytest.mark.slow
def test_a_job_finds_nothing_of_the_job_before_it(command: Command, strategy: str) -> None:
    before = dict(os.environ)
    leaving = ["model.leaves=LEFT_BY_A_JOB", "model.width=1,2", f"strategy={strategy}"]
    assert command("-m", *TINY, *leaving, "trainer.devices=2").code == 0
    changed = {k for k in os.environ if os.environ[k] != before.get(k)}
    assert changed <= {"PYTHONWARNINGS", "PYTORCH_NVML_BASED_CUDA_CHECK"}


@pytest.mark.parametrize(
    ("option", "fragment"),
    by_default(
        [
            ("trainer.devices=1,eight", "trainer.devices=eight"),
            ("strategy=hybrid,hybird", "no strategy 'hybird'"),
            ("optimizer=adam,sgd optimizer.momentum=0.9", "momentum"),
        ],
        ("strategy=hybrid,hybird", "no strategy 'hybird'"),
    ),
)
def test_one_bad_job_stops_the_sweep_before_any_has_started(
    command: Command, option: str, fragment: str
) -> None:
    result = command("-m", *TINY, *option.split(), "hydra.sweep.dir=jobs")
    assert result.code == 2
    assert fragment in result.complaint
    assert result.out == ""


def test_the_table_says_why_a_job_failed_and_hides_what_all_jobs_share() -> None:
    ended = (CommandOutcome(metric=0.25, directory="a"), CommandOutcome(exit=1, error="boom"))
    rows = [
        job_launcher.JobRow(n, ["task=x", f"lr={n + 1}"], outcome, Path())
        for n, outcome in enumerate(ended)
    ]
    lines = job_launcher.table(rows).splitlines()
    assert lines[1].split() == ["0", "lr=1", "0.25", "a"]
    assert "failed (1): boom" in lines[2]
    assert "task=x" not in job_launcher.table(rows)


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_jobs_and_ranks_in_fresh_interpreters_train_on_each_sample_once_per_epoch(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a machine with CUDA does: no process is forked, and none re-enters the sweep."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    (tmp_path / "diary0").mkdir()
    (tmp_path / "diary1").mkdir()
    result = command(
        *("-m", *TINY, "strategy=ddp", "strategy.start_method=popen", "trainer.devices=3,2"),
        *("hydra.launcher.start_method=popen", "task.metric=train/loss", "hydra.sweep.dir=jobs"),
        f"model.diary={tmp_path}/diary${{hydra:job.num}}",
    )
    assert result.code == 0
    assert [summary(f"jobs/{i}")["workers"] for i in range(2)] == [3, 2]
    for number, workers in ((0, 3), (1, 2)):
        pages = list((tmp_path / f"diary{number}").iterdir())
        assert len(pages) == workers
        seen = Counter(x for page in pages for x in page.read_text().splitlines())
        assert seen == Counter(f"{epoch} {i}" for epoch in range(2) for i in range(N))
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("kind", "node"),
    [
        (ProcessLauncher, hydra_config.LAUNCHER),
        (OptunaSweeper, hydra_config.SEARCH),
        (FairSweeper, hydra_config.FAIR),
    ],
)
def test_the_keys_of_a_plugin_are_its_constructors_with_the_same_defaults(
    kind: type, node: dict[str, object]
) -> None:
    defaults = {x.name: x.default for x in signature(kind).parameters.values()}
    target = {"_target_": f"hydra_plugins.hybridtrain.{kind.__name__}"}
    assert node == target | defaults
