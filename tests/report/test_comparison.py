"""``python -m hybridtrain compare``: a page out of whatever runs have left."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from hybridtrain.cli.commands import compare
from hybridtrain.report.charts import length_chart
from hybridtrain.report.comparison import _thinned
from hybridtrain.report.history import History
from hybridtrain.report.runs import (
    ABSENT,
    Run,
    brief,
    differences,
    distinct,
    find_runs,
    labels,
    read_run,
    sheet,
)

pytest.importorskip("matplotlib", reason="drawing needs the extra `report`")


def leave(folder: Path, *overrides: str, task: str = "digits", **summary: Any) -> Path:
    """A run as the command line leaves it; with ``exit=None`` as a killed one does."""
    (folder / ".hydra").mkdir(parents=True)
    config = {"task": {"name": task, "monitor": "val/acc", "metric": "test/acc"}, "run_dir": "?"}
    for text in overrides:
        key, _, value = text.partition("=")
        if "." in key:
            config.setdefault(key.split(".")[0], {})[key.split(".")[1]] = value  # type: ignore[index]
    (folder / ".hydra/config.yaml").write_text(json.dumps(config))
    (folder / ".hydra/overrides.yaml").write_text(json.dumps([f"task={task}", *overrides]))
    content = {"exit": 0, "samples_per_s": 1000.0, "workers": 2, "updates": 9, "device": "cpu"}
    content |= {"metrics": {"test/acc": 0.5}, "started": "2026-11-21 17:00:00+00:00"} | summary
    if content["exit"] is not None:
        (folder / "summary.json").write_text(json.dumps(content))
    return folder


def course(folder: Path, *metrics: float) -> None:
    history = History(folder)
    for i, metric in enumerate(metrics, 1):
        history.add(
            {"wall_s": i + 0.5, "train_s": i, "epoch": i, "updates": 3 * i, "samples": 30 * i}
            | {"train_loss": 1 / i, "val/acc": metric}
        )


class Seen(HTMLParser):
    """Headings, links, cells and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def page_of(folder: Path) -> tuple[str, Seen]:
    assert compare.main([str(folder)]) == 0
    text = (folder / "comparison.html").read_text()
    return text, Seen(text)


def test_curves_are_drawn_against_time_samples_and_updates(tmp_path: Path) -> None:
    for i, strategy in enumerate(["hybrid", "async"]):
        course(leave(tmp_path / str(i), f"strategy={strategy}"), 0.3, 0.6, 0.9)
    text, seen = page_of(tmp_path)
    for what in ("loss in training", "val/acc"):
        for across in ("wall time", "samples", "updates"):
            assert f"{what} against {across}" in seen.texts
    assert "digits: 2 runs compared" in seen.texts
    assert "begun 2026-11-21 17:00" in text and "task=digits" in seen.texts
    assert {"0: hybrid", "1: async"} <= set(seen.texts), "links and legends name what differs"


def test_bytes_are_shown_and_what_was_saved_where_something_was(tmp_path: Path) -> None:
    leave(tmp_path / "plain", handed_over={"sent_bytes": 4000, "saved_bytes": 0})
    _, seen = page_of(tmp_path)
    assert "handed over, bytes" in seen.texts and "saved, bytes" not in seen.texts
    leave(tmp_path / "int8", handed_over={"sent_bytes": 1016, "saved_bytes": 2984})
    _, seen = page_of(tmp_path)
    assert {"4000", "1016", "saved, bytes", "2984"} <= set(seen.texts)
    sheet = (tmp_path / "comparison.csv").read_text("utf-8-sig").splitlines()
    rows = {row["run"]: row for row in csv.DictReader(sheet)}
    assert (rows["int8"]["sent_bytes"], rows["int8"]["saved_bytes"]) == ("1016", "2984")


def test_a_metric_with_the_name_of_a_column_leaves_the_runs_own_figure(tmp_path: Path) -> None:
    metrics = {"updates": 0.25, "folder": 0.5, "samples": 0.75, "val/acc": 1.0}
    leave(tmp_path / "run", metrics=metrics)
    assert compare.main([str(tmp_path)]) == 0
    (row,) = csv.DictReader((tmp_path / "comparison.csv").read_text("utf-8-sig").splitlines())
    assert (row["updates"], row["folder"], row["val/acc"]) == ("9", f"{tmp_path}/run", "1")
    assert row["samples"] == "", "the run does not say"


def test_hosts_are_shown_where_there_were_several(tmp_path: Path) -> None:
    leave(tmp_path / "1", "strategy=a")
    assert "Hosts" not in page_of(tmp_path)[1].texts
    each = {"workers": 2, "waiting_share": 0.125, "sent": 1234567, "received": 7654321}
    leave(tmp_path / "2", "strategy=b", hosts=[each, each | {"sent": "x"}])
    leave(tmp_path / "3", "strategy=c", hosts="x")
    texts = page_of(tmp_path)[1].texts
    assert "Hosts" in texts and texts.count("7654321") == 2 and texts.count("1234567") == 1
    assert texts.count("0.125") == 2


def test_the_page_needs_nothing_but_itself_and_its_links_lead_to_the_runs(tmp_path: Path) -> None:
    course(leave(tmp_path / "a #1%", "model.width=1"), 0.5)
    leave(tmp_path / "b", "model.width=2")
    text, seen = page_of(tmp_path)
    assert not {"script", "img", "link"} & set(seen.tags)
    assert "@import" not in text and "url(http" not in text and "src=" not in text
    outside = [x for x in seen.links if not x.startswith("#")]
    assert outside and all((tmp_path / unquote(x)).exists() for x in outside)


@pytest.mark.slow
def test_what_a_configuration_says_is_shown_and_does_nothing(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>$x_1$'
    course(leave(tmp_path / "0", f"model.name={evil}", task=evil, error=evil, exit=1), 0.5)
    course(leave(tmp_path / "1", "model.name==1+1", task=evil), 0.5)
    text, seen = page_of(tmp_path)
    assert "script" not in seen.tags and "&lt;script&gt;" in text
    with (tmp_path / "comparison.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [x["model.name"] for x in rows] == [evil, "'=1+1"], "no formula"


def test_failed_killed_and_half_written_runs_are_shown_as_such(tmp_path: Path) -> None:
    course(leave(tmp_path / "0", "strategy=a"), 0.5, 0.6)
    leave(tmp_path / "1", "strategy=b", exit=1, error="RuntimeError: boom", metrics={})
    leave(tmp_path / "2", "strategy=c", exit=None)
    (leave(tmp_path / "3", "strategy=d") / "summary.json").write_text('{"exit": 0, "met')
    (tmp_path / "3/history.csv").write_text("wall_s,train_s")
    (tmp_path / "4/.hydra").mkdir(parents=True)
    (tmp_path / "4/.hydra/config.yaml").write_text("a: [1, 2\n: {")
    _, seen = page_of(tmp_path)
    assert "4 of 5 runs did not finish." in seen.texts
    assert seen.texts.count("failed") == 2 and "RuntimeError: boom" in seen.texts
    assert seen.texts.count("unfinished") == 6, "c, d and 4, in two tables"
    assert seen.texts.count("it runs still, or was killed") == 3
    assert "3: d: could not be read: summary.json, history.csv (1 rows)." in seen.texts
    assert "4: could not be read: .hydra/config.yaml." in seen.texts


def test_how_a_job_without_a_summary_ended_is_known_from_its_sweep(tmp_path: Path) -> None:
    leave(tmp_path / "x/0", "model.a=1", exit=None)
    ended = {"x/0": {"exit": 1, "error": "its process was killed by SIGKILL"}}
    (tmp_path / "jobs.json").write_text(json.dumps(ended))
    run = read_run(tmp_path / "x/0")
    assert (run.status, run.reason) == ("failed", "its process was killed by SIGKILL")


def test_a_job_that_was_resumed_behind_its_sweep_has_finished(tmp_path: Path) -> None:
    leave(tmp_path / "x/0", "model.a=1")
    ended = {"x/0": {"exit": 137, "error": "was killed"}}
    (tmp_path / "jobs.json").write_text(json.dumps(ended))
    run = read_run(tmp_path / "x/0")
    assert (run.status, run.reason) == ("finished", "")


def of_strategy(folder: str, choice: str, policy: Any, **exchange: Any) -> Run:
    """A run whose configuration has what the file of its strategy says."""
    overrides = (f"strategy={choice}",) if choice else ()
    config: dict[str, Any] = {
        f"strategy.exchange{'.' * bool(k)}{k}": x for k, x in exchange.items()
    }
    if isinstance(policy, str):
        config["strategy.policy"] = policy
    else:
        config |= {f"strategy.policy.{key}": value for key, value in policy.items()}
    return Run(Path(folder), overrides, config, {"strategy": choice or folder})


def test_a_choice_of_strategy_is_one_row_of_settings() -> None:
    hybrid = of_strategy("hybrid", "hybrid", "hybrid")
    late = of_strategy("async", "async", {"name": "async", "max_staleness": None})
    assert differences([hybrid, late]) == {"strategy": ["hybrid", "async"]}
    assert differences([of_strategy("hybrid", "", "hybrid"), late]) == {
        "strategy": ["hybrid", "async"]
    }
    local = of_strategy("local_sgd", "local_sgd", "hybrid", name="movement", every=8)
    assert differences([hybrid, late, local]) == {"strategy": ["hybrid", "async", "local_sgd"]}


def test_settings_that_differ_within_a_choice_or_were_given_have_rows() -> None:
    hybrid = of_strategy("hybrid", "hybrid", "hybrid")
    late, later = (of_strategy("", "async", {"name": "async", "max_staleness": n}) for n in (4, 8))
    assert differences([hybrid, late, later]) == {
        "strategy": ["hybrid", "async", "async"],
        "strategy.policy.max_staleness": [ABSENT, 4, 8],
    }
    given = replace(late, overrides=("strategy=async", "++strategy.policy.max_staleness=4"))
    assert differences([hybrid, given]) == {
        "strategy": ["hybrid", "async"],
        "strategy.policy.max_staleness": [ABSENT, 4],
    }
    policy = replace(hybrid, overrides=("strategy=hybrid", "strategy.policy=async"))
    policy = replace(policy, config={"strategy.policy": "async"})
    assert differences([hybrid, policy]) == {"strategy.policy": ["hybrid", "async"]}


def test_a_choice_of_another_group_is_one_row_as_well() -> None:
    adam = {"optimizer._target_": "Adam", "optimizer.betas": [0.9, 0.999], "seed": 1}
    sgd = {"optimizer._target_": "SGD", "optimizer.momentum": 0.9, "seed": 2}
    runs = [Run(Path("0"), ("seed=1",), adam), Run(Path("1"), ("optimizer=sgd", "seed=2"), sgd)]
    assert differences(runs) == {"optimizer": [ABSENT, "sgd"], "seed": [1, 2]}


def test_a_metric_that_is_logged_per_step_and_per_epoch_has_one_column(tmp_path: Path) -> None:
    found = {f"train/loss{end}": 0.5 for end in ("", "_step", "_epoch")}
    leave(tmp_path / "0", metrics={**found, "test/acc": 0.5, "val/one_step": 0.1, "samples": 3})
    _, seen = page_of(tmp_path)
    heads = seen.texts[seen.texts.index("run") :]
    assert heads.index("test/") < heads.index("val/") < heads.index("logged/")
    assert heads.count("loss") == 1 and "step" in heads and "epoch" not in heads
    assert distinct(["a_step", "a_epoch", "b", "b_epoch"]) == ["a_step", "a_epoch", "b"]


def test_names_beside_bars_are_whole(tmp_path: Path) -> None:
    for i, lr in enumerate(["0.001", "0.0003"]):
        leave(
            tmp_path / str(i), "strategy=streaming_diloco", f"model.lr={lr}", f"data.batch_size={i}"
        )
    text, _ = page_of(tmp_path)
    shown = re.findall(r"<text[^>]*>(.*?)</text>", text)
    assert {"0: lr=0.001", "batch_size=0", "1: lr=0.0003", "batch_size=1"} <= set(shown)
    assert "…" not in "".join(shown)
    longest = "x" * 50
    svg = length_chart([longest, "b"], [1.0, 2.0], "samples")
    assert "".join(re.findall(r">(x+)<", svg)) == longest


def test_one_run_without_metric_or_history_has_a_page_that_says_so(tmp_path: Path) -> None:
    leave(tmp_path / "0", metrics={})
    _, seen = page_of(tmp_path)
    assert "digits: 1 run compared" in seen.texts
    assert "No run has left a history.csv." in seen.texts
    assert "What sets the runs apart" not in seen.texts


@pytest.mark.slow
def test_fifty_runs_share_the_colours_of_what_they_have_in_common(tmp_path: Path) -> None:
    for i in range(50):
        strategy, seed = ("hybrid", "async")[i % 2], i // 2
        course(leave(tmp_path / str(i), f"model.seed={seed}", f"strategy={strategy}"), 0.5, 0.6)
    text, seen = page_of(tmp_path)
    legend = re.findall(r'<ul class="legend">(.*?)</ul>', text)[0]
    assert re.findall(r"<span>(.*?)</span>", legend) == ["strategy=hybrid", "strategy=async"]
    assert "There are too many runs for bars; the table has their figures." in seen.texts
    assert "hybrid (0)" not in seen.texts and "49: seed=24 async" in seen.texts
    assert len(text) < 1_500_000
    assert seen.tags.count("tr") == 1 + 50 + 1 + 50, "results and settings, a row for each run"


@pytest.mark.slow
def test_nine_runs_with_nothing_in_common_leave_the_last_in_grey(tmp_path: Path) -> None:
    for i in range(9):
        course(leave(tmp_path / str(i), f"model.lr={i}"), 0.5, 0.6)
    text, _ = page_of(tmp_path)
    assert "the others" in text


@pytest.mark.slow
def test_different_tasks_are_not_drawn_on_the_same_axes(tmp_path: Path) -> None:
    for i, task in enumerate(["digits", "parabola"]):
        course(leave(tmp_path / str(i), task=task), 0.5, 0.6)
    _, seen = page_of(tmp_path)
    assert "digits, parabola: 2 runs compared" in seen.texts
    assert {"Task digits", "Task parabola"} <= set(seen.texts)
    assert seen.texts.count("val/acc against samples") == 2


def test_without_matplotlib_there_are_tables_and_a_word_about_the_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course(leave(tmp_path / "0"), 0.5, 0.6)
    monkeypatch.setattr("hybridtrain.report.comparison.can_draw", lambda: False)
    _, seen = page_of(tmp_path)
    assert "figure" not in seen.tags and "table" in seen.tags
    assert "pip install matplotlib" in seen.texts
    assert f"python -m hybridtrain compare {tmp_path}" in seen.texts


def test_labels_show_control_characters_as_escapes(tmp_path: Path) -> None:
    names = ("a\tb", "c\nd", "e\x1b[2Jf")
    found = labels([Run(tmp_path / name) for name in names])
    assert found == [r"a\tb", r"c\nd", r"e\x1b[2Jf"]


def test_labels_say_what_differs_and_are_never_alike(tmp_path: Path) -> None:
    told = [("a.b=1", "c=x"), ("a.b=2", "c=x"), ("a.b=2", "c=x"), ()]
    runs = [read_run(leave(tmp_path / str(i), *each)) for i, each in enumerate(told)]
    assert labels(runs) == ["0: b=1 x", "1: b=2 x", "2: b=2 x", "3"]
    runs = [read_run(leave(tmp_path / f"r{i}", *each)) for i, each in enumerate(told)]
    assert labels(runs) == ["b=1 x", "b=2 x (r1)", "b=2 x (r2)", "r3"]
    sweeps = [(n, x) for n in "AB" for x in ("hybrid", "async")]
    runs = [read_run(leave(tmp_path / n / x[0], f"strategy={x}")) for n, x in sweeps]
    assert labels(runs) == [f"{x} ({n}/{x[0]})" for n, x in sweeps]
    assert brief("++model.lr=0.0123456789") == "model.lr=0.01235"
    assert brief("seed=123456789") == "seed=123456789"


def test_runs_are_found_at_any_depth_once_and_2_before_10(tmp_path: Path) -> None:
    for name in ("day/10", "day/2", "day/9/checkpoints", "other"):
        leave(tmp_path / name)
    leave(tmp_path / "day/2/inside")  # of a run: not looked at
    found = find_runs([tmp_path / "day", tmp_path / "day/2", tmp_path])
    assert [str(x.relative_to(tmp_path)) for x in found] == [
        *("day/2", "day/9/checkpoints", "day/10", "other"),
    ]


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ([], "no folder was given"),
        (["nowhere"], "nowhere is no folder"),
        (["empty"], "empty holds no run"),
        (["file"], "file is no folder"),
        (["run", "out=nowhere"], "out=nowhere is no folder"),
        (["run", "--fast"], "'--fast' was given"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    fragment: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    leave(tmp_path / "run")
    (tmp_path / "empty/deep").mkdir(parents=True)
    (tmp_path / "file").touch()
    assert compare.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and fragment in err


@pytest.mark.slow
def test_several_folders_are_compared_in_the_working_directory_or_where_one_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    course(leave(tmp_path / "one", "model.a=1"), 0.5)
    course(leave(tmp_path / "two", "model.a=2"), 0.5)
    (tmp_path / "there").mkdir()
    assert compare.main(["one", "two", "out=there"]) == 0
    assert capsys.readouterr().out.startswith("2 runs: there/comparison.html")
    assert 'href="./../one"' in (tmp_path / "there/comparison.html").read_text()
    assert compare.main(["one"]) == 0
    assert capsys.readouterr().out.startswith("1 run: comparison.html")
    assert (tmp_path / "comparison.html").is_file() and not (
        tmp_path / "one/comparison.html"
    ).exists()


def test_the_few_that_are_older_than_almost_all_share_a_bin(tmp_path: Path) -> None:
    ages = {"mean": 1.0, "max": 40, "histogram": {"0": 300, "1": 699, "40": 1}}
    leave(tmp_path / "0", "strategy=a", staleness=ages)
    leave(tmp_path / "1", "strategy=b", staleness={"histogram": {"0": 5}})
    leave(tmp_path / "2", "strategy=c", staleness={"histogram": {"x": 5, "1": "y"}})
    leave(tmp_path / "3", "strategy=d", staleness={})
    text, seen = page_of(tmp_path)
    assert "staleness in updates (2: and more)" in seen.texts
    drawn = text[text.index("Staleness of what was applied") :]
    assert re.findall(r"<span>(.*?)</span>", drawn) == ["0: a", "1: b"]


@pytest.mark.parametrize("n", [1, 200, 450])
def test_a_long_curve_is_thinned_and_keeps_its_ends(n: int) -> None:
    x = [float(i) for i in range(n)]
    kept, _ = _thinned(x, x)
    assert kept[0] == 0.0 and kept[-1] == n - 1.0 and len(kept) <= 201


def test_in_a_sheet_texts_are_no_formulas_and_numbers_are_numbers() -> None:
    (line,) = list(
        csv.reader(sheet("abcd", [{"a": "=1+1", "b": "-x", "c": -5, "d": -0.5}]).splitlines()[1:])
    )
    assert line == ["'=1+1", "'-x", "-5", "-0.5"]
