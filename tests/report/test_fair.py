"""A comparison's figures: where a target is reached, medians with censored runs, what is noise."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.report.comparison import RUNS, compare, sections_of
from hybridtrain.report.fair import (
    Goal,
    Training,
    at_an_end,
    conclusions,
    reachable,
    rows_of,
    spread,
    times_as_much,
)
from hybridtrain.report.fair_page import FAIR_FILE, SHEET, TABLE, columns_of, leave
from tests.report.test_comparison import course
from tests.report.test_comparison import leave as run_of

pytest.importorskip("scipy", reason="intervals need the extra `sweep`")

ACC = Goal("val/acc", "max", 0.9)


def runs(strategy: str, *times: float | None) -> list[Training]:
    return [
        Training(
            *(strategy, {"optimizer.lr": "0.1"}, seed, f"{strategy}{seed}"),
            train_s=x,
            samples=None if x is None else 100 * x,
            updates=x,
            wall_s=x,
            best=0.8 if x is None else 0.91,
            tested=0.5,
        )
        for seed, x in enumerate(times, 1)
    ]


def compared(*strategies: list[Training]) -> list[dict[str, Any]]:
    return rows_of({each[0].strategy: each for each in strategies})


# ---- one run -------------------------------------------------------------------------------------


def test_a_target_is_reached_at_the_first_validation_that_is_as_good(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    course(tmp_path / "0", 0.5, math.nan, 0.9, 0.7, 0.95)
    found = Training("hybrid", {}, 0, "0").measured(tmp_path, ACC)
    assert (found.train_s, found.wall_s, found.samples, found.updates) == (3, 3.5, 90, 9)
    assert found.best == 0.95
    low = Training("hybrid", {}, 0, "0").measured(tmp_path, Goal("val/acc", "min", 0.5))
    assert (low.train_s, low.best) == (1, 0.5)


def test_a_run_that_never_reaches_the_target_has_its_best_value_and_ranks_behind(
    tmp_path: Path,
) -> None:
    for name, values in {
        "far": [0.5],
        "near": [0.8],
        "nan": [math.nan],
        "there": [0.1, 0.9],
    }.items():
        (tmp_path / name).mkdir()
        course(tmp_path / name, *values)
    each = [
        Training("x", {}, 0, f).measured(tmp_path, ACC) for f in ("nan", "far", "near", "there")
    ]
    each.append(Training("x", {}, 0, "none").measured(tmp_path, ACC))
    assert [x.samples for x in each] == [None, None, None, 60, None]
    assert [x.best for x in each] == [None, 0.5, 0.8, 0.9, None]
    ranked = sorted(each, key=lambda x: x.rank(ACC))
    assert [x.folder for x in ranked[:3]] == ["there", "near", "far"]


def test_a_target_that_is_not_given_is_what_every_search_has_reached_early(tmp_path: Path) -> None:
    search = []
    for i, values in enumerate([[0.1, 0.4, 0.6, 0.99], [0.2, 0.7, 0.5, 0.5], [math.nan] * 4]):
        (tmp_path / str(i)).mkdir()
        course(tmp_path / str(i), *values)
        search.append(Training("ab"[i % 2], {}, 0, str(i)))
    goal = Goal("val/acc", "max")
    assert reachable(search, tmp_path, goal) == 0.6  # a: 0.6 of the first three, b: 0.7
    assert reachable(search[:1], tmp_path, Goal("val/acc", "min")) == 0.1
    assert reachable(search[2:], tmp_path, goal) is None


# ---- over the seeds ------------------------------------------------------------------------------


def test_a_censored_run_counts_as_longer_than_all_others() -> None:
    assert spread([3.0, None, 1.0, 2.0, 4.0]) == {"median": 3.0, "low": 1.0, "high": None}
    assert spread([1.0, None, None, None, 2.0])["median"] is None
    assert spread([1.0, None]) == {"median": None, "low": 1.0, "high": None}
    assert spread([2.5]) == {"median": 2.5, "low": None, "high": None}
    assert spread([]) == dict.fromkeys(("median", "low", "high"))


def test_the_interval_is_the_percentile_bootstrap_of_the_median() -> None:
    import numpy as np

    values = [float(x) for x in range(21)]
    drawn = np.random.default_rng(5).choice(values, (20_000, 21))
    low, high = np.percentile(np.median(drawn, 1), [2.5, 97.5])
    found = spread(values)
    assert found["median"] == 10 and found["low"] is not None and found["high"] is not None
    assert abs(found["low"] - low) <= 1 and abs(found["high"] - high) <= 1
    assert spread(values) == found


def test_ratios_are_taken_seed_by_seed() -> None:
    assert times_as_much([2.0, 20.0, 200.0], [1.0, 10.0, 100.0]) == spread([2.0] * 3)
    assert times_as_much([None, 1.0, None], [None, 1.0, None])["median"] == 1
    assert times_as_much([None] * 3, [1.0] * 3)["median"] is None
    late = times_as_much([1.4] * 5, [1.0, 1.0, 1.0, None, None])
    assert late["low"] == 0.0, "no ratio to a run that never reached it"


def test_a_difference_is_real_where_the_interval_leaves_out_1() -> None:
    fast, noisy = runs("fast", 10, 11, 12, 10, 11), runs("noisy", 9, 14, 11, 12, 12)
    slow, few = runs("slow", 20, 21, 24, 21, 20), runs("few", None, 8, None, 9, None)
    rows = compared(slow, noisy, fast, few)
    assert [row["strategy"] for row in rows] == ["fast", "noisy", "slow", "few"]
    assert [row["train_s_differ"] for row in rows] == [None, False, True, False]
    assert rows[2]["train_s_times"]["low"] > 1.8 and rows[0]["train_s_times"] is None
    assert list(conclusions(rows, ACC)) == [
        "fast has the shortest median time to val/acc ≥ 0.9",
        "noisy: within the noise (1.091 times as long as fast)",
        "slow takes 2 times as long as fast",
        "few: 2 of 5 runs reach it",
    ]


def test_fewer_than_five_seeds_tell_nothing_and_one_has_no_interval() -> None:
    rows = compared(runs("a", 1, 1, 1, 1), runs("b", 2, 2, 2, 2))
    assert rows[1]["train_s_differ"] is None
    assert list(conclusions(rows, ACC))[1].endswith("perhaps by chance: it takes 5 seeds to tell")
    rows = compared(runs("a", 1), runs("b", 2))
    content = {"metric": "val/acc", "tested": "test/acc", "strategies": rows}
    for row in rows:
        row["values"] = {"optimizer.lr": "0.1"}
    assert columns_of(content)["time, s"] == ["1", "2"]


def test_a_target_that_no_run_reaches_is_said_instead_of_a_number() -> None:
    rows = compared(runs("a", *[None] * 5), runs("b", *[None] * 5))
    assert list(conclusions(rows, ACC)) == [
        "val/acc ≥ 0.9 within the budget: no run did; the best median is 0.8. Give another "
        "target.value, or a larger budget"
    ]
    rows = compared(runs("a", 1, *[None] * 4), runs("b", *[None] * 5))
    assert "no strategy reached it with more than half of its seeds" in next(conclusions(rows, ACC))


def test_the_best_at_an_end_of_what_was_tried_is_found() -> None:
    search = [Training("a", {"lr": x, "kind": "p"}, 0, "0") for x in ("0.1", "0.01", "1")]
    ends = {x: list(at_an_end(search, {"lr": x, "kind": "p"})) for x in ("0.01", "0.1", "1")}
    assert ends == {"0.01": ["lr"], "0.1": [], "1": ["lr"]}


# ---- what it leaves ------------------------------------------------------------------------------


def left(folder: Path) -> dict[str, Any]:
    each = [*runs("a", 1, 2, 3, 2, 2), *runs("b", 4, 4, None, 5, 6)]
    rows = compared(each[:5], each[5:])
    for row in rows:
        row |= {"values": {"optimizer.lr": "0.1"}, "command": "python -m hybridtrain"}
    for x in each:
        (folder / x.folder).mkdir()
        course(folder / x.folder, 0.1, 0.5, x.best or 0.0)
    search = [
        {"strategy": n, "values": {"optimizer.lr": v}, "best": 0.5} for n in "ab" for v in "12"
    ]
    content = {"metric": "val/acc", "mode": "max", "target": 0.9, "tested": "test/acc"}
    content |= {"strategies": rows, "said": ["a is the first"], "protocol": "Each: as told."}
    content |= {"runs": [{"strategy": x.strategy, "folder": x.folder} for x in each]}
    leave(folder, content | {"search": search})
    return content


def test_table_and_sheet_have_medians_intervals_and_what_was_not_reached(tmp_path: Path) -> None:
    left(tmp_path)
    lines = (tmp_path / TABLE).read_text().splitlines()
    cells = [[x.strip() for x in line.strip("|").split("|")] for line in lines[:4]]
    assert cells[0][:5] == ["strategy", "found", "reached", "time, s", "× fastest"]
    assert cells[2][:5] == ["a", "lr=0.1", "5 of 5", "2 [1, 3]", "1"]
    assert cells[3][:4] == ["b", "lr=0.1", "4 of 5", "5 [4, not reached]"]
    assert lines[-1] == "- a is the first"
    rows = list(csv.DictReader((tmp_path / SHEET).read_text("utf-8-sig").splitlines()))
    assert (rows[1]["train_s_median"], rows[1]["train_s_high"]) == ("5", "")
    assert rows[1]["train_s_times_median"] == "3" and rows[0]["train_s_times_median"] == ""


def test_runs_are_named_without_the_comparisons_own_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridtrain.report.comparison.can_draw", lambda: False)
    (tmp_path / FAIR_FILE).write_text("{}")
    its = [["task.metric='val/acc'", "test=false", "target.value=null"], ["target.value=0.9"]]
    for i, own in enumerate(its):
        options = [*own, f"++model.lr=0.0{i + 1}", f"seed={i}"]
        course(run_of(tmp_path / str(i), "strategy=hybrid", *options), 0.5)
    compare([tmp_path], tmp_path)
    rows = list(csv.DictReader((tmp_path / RUNS).read_text("utf-8-sig").splitlines()))
    assert [x["run"] for x in rows] == ["0: lr=0.01 seed=0", "1: lr=0.02 seed=1"]


def test_the_page_has_the_table_and_bands_and_survives_a_damaged_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    left(tmp_path)
    text = "".join(sections_of(tmp_path))
    assert "Fair comparison: val/acc ≥ 0.9" in text and "5 [4, not reached]" in text
    assert text.count("<figure>") == 3 and "PolyCollection" in text  # two with bands, one of lr
    content = json.loads((tmp_path / FAIR_FILE).read_text())
    del content["strategies"][0]["train_s"]
    (tmp_path / FAIR_FILE).write_text(json.dumps(content))
    assert "could not be read" in "".join(sections_of(tmp_path))
    assert not list(sections_of(tmp_path / "elsewhere"))


def test_a_search_over_words_has_the_other_charts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    content = left(tmp_path)
    search = [
        {"strategy": n, "values": {"optimizer": x}, "best": 0.5}
        for n in "ab"
        for x in ("adam", "sgd")
    ]
    (tmp_path / FAIR_FILE).write_text(json.dumps(content | {"search": search}))
    assert "".join(sections_of(tmp_path)).count("<figure>") == 2


@pytest.mark.parametrize(("value", "mode"), [(176 / 180, "max"), (1 / 30, "min"), (2 / 3, "min")])
def test_an_automatic_target_has_been_reached(value: float, mode: str, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    course(tmp_path / "0", round(value, 7))
    job = Training("hybrid", {}, 0, "0")
    target = reachable([job], tmp_path, Goal("val/acc", mode))
    assert target == pytest.approx(value, rel=1e-3)
    assert job.measured(tmp_path, Goal("val/acc", mode, target)).samples is not None


def test_where_medians_and_runs_with_the_same_seed_disagree_it_is_said() -> None:
    a = runs("a", *range(1, 10))
    b = runs("b", 0.5, 1.5, 2.5, 3.5, 5.2, 5.5, 6.5, 7.5, 8.5)
    rows = compared(a, b)
    assert rows[1]["train_s_times"]["high"] < 1 and rows[1]["train_s_differ"] is True
    assert list(conclusions(rows, ACC))[1].endswith("though its median is longer: give more seeds")
    assert times_as_much([1.0], [0.0])["median"] is None
