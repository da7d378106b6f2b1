"""``hydra/sweeper=optuna``: the search space, what a kill changes (nothing), pruning, bad input."""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
import sys
from contextlib import closing, redirect_stdout
from io import StringIO
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from hybridtrain.cli.sweep import reports, search
from hybridtrain.cli.sweep.reports import Mailbox, Reporter
from hybridtrain.cli.sweep.search import LiveTable, SearchRun
from hybridtrain.cli.sweep.study import Search, combinations, reading, seed_of, space_of
from hybridtrain.errors import UserError
from hybridtrain.report import charts
from tests.cli.conftest import Command, summary
from tests.cli.test_interrupt import _none_left
from tests.cli.tiny import TINY
from tests.cli.zygote import Zygote
from tests.picking import by_default

optuna = pytest.importorskip("optuna", reason="searches need the extra `sweep`")
distributions = optuna.distributions

SEARCH = ["-m", *TINY, "hydra/sweeper=optuna", "task.metric=train/loss", "hydra.sweep.dir=jobs"]
PRUNED = ["hybrid", "ddp", "async", "local_sgd", "hogwild", "diloco"]
LR = "model.lr=tag(log, interval(1e-4, 1e-1))"


# ---- the search space, and what is asked of the study --------------------------------------------


def test_the_syntax_of_a_space_is_that_of_hydras_own_optuna_sweeper() -> None:
    given = ["strategy=hybrid,async", "trainer.devices=range(1,4)", "a=interval(0, 1.5)"]
    given += [
        "b=tag(log, int(interval(1, 100)))",
        "c=range(0, 1, step=0.25)",
        "d=choice(1, 'x y')",
    ]
    space, fixed = space_of(
        [*given, "e=3", "~f", "a=interval(0, 2.5)", "+g=tag(log,interval(1e-3,1))"]
    )
    assert fixed == ["e=3", "~f"]
    assert space == {
        "strategy": distributions.CategoricalDistribution(("hybrid", "async")),
        "trainer.devices": distributions.IntDistribution(1, 4),
        "a": distributions.FloatDistribution(0, 2.5),
        "b": distributions.IntDistribution(1, 100, log=True),
        "c": distributions.FloatDistribution(0, 1, step=0.25),
        "d": distributions.CategoricalDistribution(("1", "x\\ y")),
        "+g": distributions.FloatDistribution(1e-3, 1, log=True),
    }
    with pytest.raises(UserError, match="no key has several values"):
        space_of(["e=3"])
    with pytest.raises(UserError, match=r"a=tag\(log, interval\(0, 1\)\): "):
        space_of(["a=tag(log, interval(0, 1))"])
    with pytest.raises(UserError, match=r"a=interval\(0, inf\): an interval has finite ends"):
        space_of(["a=interval(0, inf)"])
    huge, _ = space_of(["a=range(1, 1000000000000)"])
    with pytest.raises(UserError, match="1000000000000 combinations"):
        combinations(huge)


def asked(sampler: Any, n: int, broken_at: int | None, home: Path) -> list[dict[str, Any]]:
    """The parameters of n trials; another process asks after a kill while ``broken_at`` runs."""
    storage = optuna.storages.InMemoryStorage()
    space, _ = space_of(["lr=tag(log, interval(1e-4,1))", "kind=a,b,c"])
    if sampler == "grid":
        space, _ = space_of(["lr=0.1,0.2", "kind=a,b,c"])

    def begun() -> Search:
        study = optuna.create_study(storage=storage, study_name="search", load_if_exists=True)
        search = Search(study, space, sampler, 5, home)
        search.prepare(n)
        return search

    search, found = begun(), []
    while (next_one := search.next()) is not None:
        trial, has_begun = next_one
        if trial.number == broken_at and not has_begun:
            search = begun()
            continue
        assert has_begun == (trial.number == broken_at)
        found.append(dict(trial.params))
        search.study.tell(trial, math.log(float(trial.params["lr"])) ** 2)
    return found


@pytest.mark.parametrize("sampler", ["random", "grid", "tpe"])
def test_a_kill_in_the_third_trial_changes_no_suggestion(sampler: Any, tmp_path: Path) -> None:
    n = {"tpe": 14, "grid": 6}.get(sampler, 8)  # TPE draws ten at random first
    whole = asked(sampler, n, None, tmp_path)
    assert len(whole) == n
    assert asked(sampler, n, 2, tmp_path) == whole
    assert len({json.dumps(each) for each in whole}) == n


def test_a_study_of_another_space_is_refused_by_the_keys_that_differ(tmp_path: Path) -> None:
    study = optuna.create_study()
    Search(study, space_of(["lr=1,2", "width=1,2"])[0], "tpe", 0, tmp_path)
    Search(study, space_of(["lr=1,2", "width=1,2"])[0], "tpe", 0, tmp_path)
    with pytest.raises(UserError, match="another search space: lr, more differ"):
        Search(study, space_of(["lr=1,3", "width=1,2", "more=1,2"])[0], "tpe", 0, tmp_path)


def test_failed_points_of_a_grid_wait_again_and_a_failed_job_is_made_up_for(tmp_path: Path) -> None:
    study, failed = optuna.create_study(), optuna.trial.TrialState.FAIL
    space, _ = space_of(["lr=1,2"])
    search = Search(study, space, "grid", 0, tmp_path)
    search.prepare(None)
    for state in (failed, optuna.trial.TrialState.COMPLETE):
        trial, _ = search.next() or pytest.fail("two are to be had")
        study.tell(trial, None if state == failed else 1.0, state)
    assert search.next() is None
    search.prepare(None)
    again, _ = search.next() or pytest.fail("one has failed")
    assert again.params == {"lr": "1"} and search.next() is None


def test_trials_of_a_search_that_has_moved_go_on(tmp_path: Path) -> None:
    study = optuna.create_study()
    space, _ = space_of(["lr=tag(log, interval(1e-4,1))"])
    first = Search(study, space, "random", 0, tmp_path / "before")
    first.prepare(3, alone=True)
    assert first.next() is not None
    moved = Search(study, space, "random", 0, tmp_path / "behind")
    moved.prepare(3, alone=True)
    trial, has_begun = moved.next() or pytest.fail("it goes on")
    assert (trial.number, has_begun) == (0, True)


def test_two_sweeps_that_share_a_study_try_each_point_once(tmp_path: Path) -> None:
    study = optuna.create_study()
    space, _ = space_of(["lr=1,2", "width=1,2"])
    sweeps = [Search(study, space, "grid", 0, tmp_path / name) for name in "ab"]
    for each in sweeps:
        each.prepare(None)
    tried = []
    for each in sweeps * 4:
        if (found := each.next()) is not None:
            tried.append(tuple(found[0].params.values()))
            study.tell(found[0], 1.0)
    assert sorted(tried) == [("1", "1"), ("1", "2"), ("2", "1"), ("2", "2")]


def test_a_report_is_no_metric_and_a_replaced_failure_is_none(tmp_path: Path) -> None:
    study = optuna.create_study(direction="maximize")
    trial = study.ask({"lr": distributions.FloatDistribution(0, 1)})
    trial.report(-0.45, 0)
    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    study.tell(study.ask(), state=optuna.trial.TrialState.FAIL)
    assert study.trials[0].value == -0.45, "Optuna's own"
    runs = SearchRun.__new__(SearchRun)
    vars(runs)["_states"] = optuna.trial.TrialState
    ends = [runs._ending(x, tmp_path / str(x.number)) for x in study.trials]
    assert [(x.exit, x.metric) for x in ends] == [(0, None), (0, None)]
    assert [x.error for x in ends] == [f"{x} before the search went on" for x in ("pruned", "fail")]
    with redirect_stdout(StringIO()) as out:
        LiveTable(-1.0).draw(study.trials, "val/acc", None)
    assert out.getvalue().splitlines()[1].split()[:4] == ["0", "pruned", "-", "0.45"]


# ---- what others have written to the study -------------------------------------------------------

SPACE = ["lr=interval(0.1, 0.9)", "n=range(1, 9, step=2)", "kind=hybrid,async"]
FIT: dict[str, Any] = {"lr": 0.5, "n": 3, "kind": "async"}
EVIL = "torch.hub.load"
of, states = distributions, optuna.trial.TrialState
MISFITS: dict[str, dict[str, tuple[Any, Any]]] = {
    "another name": {"+callbacks.x._target_": (EVIL, of.CategoricalDistribution([EVIL]))},
    "another choice": {"kind": (EVIL, of.CategoricalDistribution(["hybrid", EVIL]))},
    "a choice that is no text": {"kind": (True, of.CategoricalDistribution(["hybrid", True]))},
    "a text for a number": {"lr": (EVIL, of.CategoricalDistribution([EVIL]))},
    "beyond the interval": {"lr": (0.95, of.FloatDistribution(0, 2))},
    "between the steps": {"n": (2, of.IntDistribution(1, 9))},
    "no whole number": {"n": (3.0, of.FloatDistribution(1, 9))},
}


def of_a_stranger(kind: str, state: Any, home: Path) -> tuple[Any, dict[str, Any]]:
    """A study with one trial that does not fit, as a stranger leaves it: it claims to be mine."""
    space, _ = space_of(SPACE)
    study, params, each = optuna.create_study(), dict(FIT), dict(space)
    for key, (value, distribution) in MISFITS[kind].items():
        params[key], each[key] = value, distribution
    trial = optuna.trial.create_trial(
        state=state,
        value=0.0 if state == states.COMPLETE else None,
        params=params,
        distributions=each,
        user_attrs={"directory": str(home.absolute())},
    )
    study.add_trial(trial)
    return study, space


@pytest.mark.parametrize("state", [states.RUNNING, states.COMPLETE, states.FAIL])
@pytest.mark.parametrize("kind", MISFITS)
def test_only_names_and_values_of_the_search_space_become_overrides(
    kind: str, state: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, space = of_a_stranger(kind, state, tmp_path)
    search = Search(study, space, "random", 0, tmp_path)
    search.prepare(2, alone=True)
    assert "1 of its trials have names or values that are not of this search, and are passed" in (
        capsys.readouterr().err
    )
    found = []
    while (next_one := search.next()) is not None:
        trial, has_begun = next_one
        assert not has_begun and search.misfit(trial) is None
        found.append(trial.number)
        study.tell(trial, 1.0)
    assert found == [1, 2], "the stranger's is none of the two"
    best = search.best()
    assert best is not None and best.number == 1, "nor is it shown as the best, with its command"
    assert search.before == []


@pytest.mark.parametrize(
    "fixed",
    [{"lr": 7.0}, {"n": 2}, {"kind": EVIL}, {"lr": EVIL}, {"+callbacks.x._target_": EVIL}, [EVIL]],
)
def test_a_trial_that_a_stranger_has_enqueued_is_no_job(
    fixed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, (space, _) = optuna.create_study(), space_of(SPACE)
    study.add_trial(
        optuna.trial.create_trial(state=states.WAITING, system_attrs={"fixed_params": fixed})
    )
    search = Search(study, space, "random", 0, tmp_path)
    search.prepare(2)
    try:
        while (found := search.next()) is not None:
            assert search.misfit(found[0]) is None and found[0].params.keys() == space.keys()
            study.tell(found[0], 1.0)
    except UserError as error:
        assert "the study no-name" in str(error) and "\n" not in str(error)


def test_a_trial_that_a_kill_has_cut_short_is_drawn_anew(tmp_path: Path) -> None:
    study, (space, _) = optuna.create_study(), space_of(SPACE)
    study.ask({"lr": space["lr"]})
    search = Search(study, space, "random", 0, tmp_path)
    search.prepare(1, alone=True)
    trial, has_begun = search.next() or pytest.fail("one is to be had")
    assert (trial.number, has_begun) == (1, False) and trial.params.keys() == space.keys()
    study.tell(trial, 1.0)
    assert search.next() is None


def test_a_search_whose_study_others_can_write_does_not_go_on(command: Command) -> None:
    Path("jobs").mkdir()
    study = Path("jobs/study.db")
    study.touch(0o666)
    study.chmod(0o666)
    result = command(*SEARCH, LR)
    assert result.code == 2 and f"{study} can be written by everybody" in result.complaint
    study.chmod(0o644)
    Path("jobs").chmod(0o777)
    assert "jobs can be written by everybody" in command(*SEARCH, LR).complaint


ENTRIES: dict[str, str] = {
    "a distribution that is none": "update trial_params set distribution_json = '{}'",
    "a value that is no choice": "update trial_params set param_value = 99",
    "a seed that is none": "update study_user_attributes set value_json = '\"x\"'",
    "a space that is none": "update study_user_attributes set value_json = '[3]'",
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_entries_of_a_study_that_make_no_sense_are_one_line(entry: str, tmp_path: Path) -> None:
    space, _ = space_of(["lr=0.1,0.2"])

    def begun() -> Search:
        study = optuna.create_study(
            storage="sqlite:///study.db", study_name="search", load_if_exists=True
        )
        with reading(study):
            search = Search(study, space, "random", seed_of(study, 0), tmp_path)
            search.prepare(2)
        return search

    search = begun()
    trial, _ = search.next() or pytest.fail("one is to be had")
    search.study.tell(trial, 1.0)
    with closing(sqlite3.connect("study.db")) as database, database:
        database.execute(ENTRIES[entry])
    with pytest.raises(UserError, match=r"^the study search has entries that no search has"):
        begun()


# ---- pruning -------------------------------------------------------------------------------------


def test_a_job_reports_hears_the_answer_and_trains_on_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mailbox, answers, taken = Mailbox(), list[bool](), list[Any]()
    job = Reporter(mailbox.path, "loss")
    asking = Thread(target=lambda: answers.extend([job.ask(0, 0.5), job.ask(1, 2.0)]))
    asking.start()
    while asking.is_alive():
        if (report := mailbox.take()) is not None:
            taken.append(report)
            assert not job.was_pruned()
            mailbox.answer(report[1] > 1)
    assert answers == [False, True] and taken == [(0, 0.5), (1, 2.0)] and job.was_pruned()
    monkeypatch.setattr(reports, "_PATIENCE_S", 0.01)
    assert job.ask(2, 3.0) is False  # nobody looks
    mailbox.close()
    assert job.ask(3, 3.0) is False and not job.was_pruned()


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    by_default([*PRUNED, *(f"{x} strategy.start_method=spawn" for x in PRUNED[:2])], "async"),
)
def test_a_job_is_pruned_under_every_strategy(
    command: Command, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    class OfTheSecond(optuna.pruners.BasePruner):  # type: ignore[misc, name-defined]
        def prune(self, study: Any, trial: Any) -> bool:
            return trial.number == 1 and trial.last_step == 1

    monkeypatch.setattr(optuna.pruners, "MedianPruner", OfTheSecond)
    options = ["model.lr=choice(0.01, 0.02)", "hydra.sweeper.sampler=grid"]
    options += f"strategy={strategy}".split()
    options += ["hydra.sweeper.pruner=median", "trainer.devices=2", "logger=none"]
    result = command(*SEARCH, *options, "trainer.max_epochs=6", "trainer.check_val_every_n_epoch=2")
    assert result.code == 0, result.err
    found = json.loads(Path("jobs/search.json").read_text())
    assert [x["state"] for x in found["trials"]] == ["complete", "pruned"]
    assert "pruned at report 2" in result.out
    updates = [summary(f"jobs/{i}")["updates"] for i in range(2)]
    assert 0 < updates[1] < updates[0]
    assert summary("jobs/1")["exit"] == 0 and "test/n" not in summary("jobs/1")["metrics"]


@pytest.mark.parametrize(
    ("monitor", "mode", "direction", "turned"),
    [
        ("val/loss", "min", "maximize", True),
        ("val/acc", "max", "maximize", False),
        ("val/acc", "max", "minimize", True),
        ("test/n", "min", "maximize", False),  # the metric itself, whose direction was given
        (None, "min", "maximize", False),
    ],
)
def test_what_is_reported_is_judged_by_its_own_direction(
    monitor: str | None, mode: str, direction: str, turned: bool
) -> None:
    task = SimpleNamespace(monitor=monitor, metric="test/n", mode=mode)
    assert search._turned(task, direction) == turned


@pytest.mark.slow
def test_jobs_report_the_values_of_validations_also_without_a_pruner(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["model.lr=0.012345678,0.02", "hydra.sweeper.sampler=grid", "logger=none"]
    result = command(*SEARCH, *options, "trainer.max_epochs=3")
    assert result.code == 0, result.err
    trials = optuna.load_study(study_name="search", storage="sqlite:///jobs/study.db").trials
    assert [len(x.intermediate_values) for x in trials] == [2, 2], (
        "the first validation precedes train/loss"
    )
    monkeypatch.setenv("COLUMNS", "200")
    with redirect_stdout(StringIO()) as out:
        LiveTable().draw(trials, "train/loss", trials[0])
    shown = [x.split() for x in out.getvalue().splitlines()]
    assert shown[0] == ["job", "state", "train/loss", "reported", "reports", "values"]
    assert shown[1][2:] == [charts.number(trials[0].value), shown[1][3], "2", "model.lr=0.01235"]
    assert "model.lr=0.01235 " in result.out


# ---- whole searches ------------------------------------------------------------------------------


def test_a_search_ends_with_the_winners_command_and_a_failed_job_counts_as_failed(
    command: Command,
) -> None:
    options = ["model.lr=0.01,0.05,1e30", "hydra.sweeper.sampler=grid", "logger=none"]
    result = command(*SEARCH, *options, "trainer.max_epochs=1")
    assert result.code == 1, "a failed job, as in any sweep"
    found = json.loads(Path("jobs/search.json").read_text())
    assert [x["state"] for x in found["trials"]] == ["complete", "complete", "fail"]
    best = min(found["trials"][:2], key=lambda x: x["value"])
    assert found["best"] == best["number"]
    assert result.out.rstrip().splitlines()[-1].strip() == found["command"]
    assert f"model.lr={best['params']['++model.lr']}" in found["command"]
    page = Path("jobs/comparison.html").read_text()
    assert ">Search<" in page and "The best is job" in page


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("storage", ["null", "jobs.journal", "sqlite:///own.db"])
def test_a_killed_search_goes_on_as_if_it_had_not_been(
    zygote: Zygote, command: Command, storage: str
) -> None:
    options = [*SEARCH, LR, "hydra.sweeper.n_trials=4", f"hydra.sweeper.storage={storage}"]
    options += ["trainer.max_epochs=6", "model.sleep_s=0.03", "trainer.devices=2"]
    run = zygote.start(Path.cwd(), *options)
    run.until("jobs/2/checkpoints/last.ckpt")
    os.killpg(run.pid, signal.SIGKILL)
    run.status()
    assert _none_left(run.pid)
    result = command(*options, "resume=auto")
    assert result.code == 0, result.err
    assert "jobs/2 goes on from" in result.out and summary("jobs/2")["resumed"]
    trials = json.loads(Path("jobs/search.json").read_text())["trials"]
    alone = [x.replace("jobs", "alone") if "sweep.dir" in x else x for x in options]
    alone[-2] = "model.sleep_s=0"
    if storage != "null":
        alone.append("hydra.sweeper.study_name=alone")
    assert command(*alone).code == 0
    assert json.loads(Path("alone/search.json").read_text())["trials"] == trials
    more = command("-m", "resume=jobs", "hydra.sweeper.n_trials=5")
    assert more.code == 0 and len(json.loads(Path("jobs/search.json").read_text())["trials"]) == 5


@pytest.mark.parametrize("damage", by_default(["gone", "empty", "no values"], "gone"))
def test_a_search_without_its_study_does_not_run_finished_jobs_again(
    command: Command, damage: str
) -> None:
    options = [*SEARCH, LR, "hydra.sweeper.n_trials=2"]
    assert command(*options).code == 0
    study, first = Path("jobs/study.db"), Path("jobs/0/summary.json").read_text()
    if damage == "no values":
        with closing(sqlite3.connect(study)) as database, database:
            database.execute("delete from trial_values")
    else:
        study.unlink() if damage == "gone" else study.write_bytes(b"")
    result = command("-m", "resume=jobs", "hydra.sweeper.n_trials=3")
    assert result.code == 2
    lost = "has no value of trial 0" if damage == "no values" else "has 0 trials"
    assert f"the study search {lost}, but jobs/jobs.json has 2 finished jobs" in result.err
    assert "Traceback" not in result.err
    assert Path("jobs/0/summary.json").read_text() == first and not Path("jobs/2").exists()


@pytest.mark.slow
def test_an_interrupt_ends_both_trials_that_run_at_once_and_both_are_resumed(
    zygote: Zygote, command: Command
) -> None:
    options = [*SEARCH, LR, "hydra.sweeper.n_trials=3", "hydra.launcher.at_once=2"]
    options += ["trainer.max_epochs=8", "model.sleep_s=0.03"]
    run = zygote.start(Path.cwd(), *options)
    for number in (0, 1):
        run.until(f"jobs/{number}/checkpoints/last.ckpt")
    os.kill(run.pid, signal.SIGINT)
    assert run.status() == 130
    assert run.left() == []
    assert command(*options, "resume=auto").code == 0
    assert [bool(summary(f"jobs/{i}")["resumed"]) for i in range(3)] == [True, True, False]


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (["optimizer.lrr=interval(0.1,1)"], "optimizer.lrr: there is no key 'lrr' in optimizer"),
        (["strategy=choice(hybrid,hybird)"], "there is no strategy 'hybird'"),
        ([LR, "task.metric=null"], "a search needs a metric"),
        ([LR, "task.metric=test/acc", "test=false"], "task.metric=test/acc is a metric of the"),
        ([LR, "hydra.sweeper.sampler=grid"], "is an interval of real numbers"),
        ([LR, "hydra.sweeper.sampler=tee"], "hydra.sweeper.sampler"),
        ([LR, "hydra.sweeper.storage=nothing://x"], "hydra.sweeper.storage=nothing://x: the study"),
        (["model.lr=0.1"], "no key has several values"),
        (["model.lr=range(1, 20000)", "hydra.sweeper.sampler=grid"], "20000 combinations"),
        (["hydra.sweeper.params={optimizer.lrr: 'interval(0,1)'}"], "no key 'lrr' in optimizer"),
    ],
)
def test_what_cannot_be_searched_is_one_line_before_any_job(
    command: Command, options: list[str], fragment: str
) -> None:
    result = command(*SEARCH, *options)
    assert result.code == 2 and fragment in result.complaint
    assert not Path("jobs").exists()


@pytest.mark.slow
def test_a_metric_that_no_job_returns_ends_the_search_after_the_first(command: Command) -> None:
    result = command(*SEARCH, LR, "task.metric=val/lost", "trainer.max_epochs=1", "logger=none")
    assert result.code == 2
    assert "task.metric=val/lost: the run logged no such metric" in result.err
    assert Path("jobs/0").exists() and not Path("jobs/1").exists()


@pytest.mark.slow
def test_an_end_with_an_error_ends_the_jobs_beside_it(zygote: Zygote) -> None:
    options = [*SEARCH, "model.sleep_s=0,1000", "hydra.sweeper.sampler=grid", "logger=none"]
    options += ["task.metric=val/lost", "hydra.launcher.at_once=2", "trainer.max_epochs=1"]
    run = zygote.start(Path.cwd(), *options)
    assert run.status() == 2
    assert run.left() == [], run.said()


def test_without_optuna_the_extra_is_named(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert "pip install 'hybridtrain[sweep]'" in command(*SEARCH, LR).complaint
