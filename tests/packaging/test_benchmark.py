"""``scripts/benchmark.py``: what it makes of figures, what it refuses, and one small part of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import cli, frame, results, rows, runs, shown
from benchmarks.jobs import exchange, peers
from benchmarks.plan import PARTS

from hybridtrain.errors import UserError

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/benchmark.py"


class Played(runs.Runner):
    """Gives figures out in turn instead of running anything."""

    def __init__(self, figures: dict[str, list[Any]]) -> None:
        self.figures, self.order = {name: list(each) for name, each in figures.items()}, []

    def run(self, job: runs.Job) -> Any:
        self.order.append(job.label)
        figure = self.figures[job.label].pop(0)
        if isinstance(figure, Exception):
            raise figure
        return figure


def job(label: str) -> runs.Job:
    return runs.Job(label, "nowhere:nothing")


def measured(played: Played, *goals: tuple[str, rows.Goal], repeats: int = 3) -> list[Any]:
    own = frame.Frame("step", frame.Options(repeats), played)
    return list(own.alternate("work", job("ours"), [(job(name), goal) for name, goal in goals]))


def test_runs_alternate_and_ratios_are_taken_pair_by_pair() -> None:
    played = Played({"ours": [0.001, 0.002, 0.004], "theirs": [0.003, 0.010, 0.008]})
    (row,) = measured(played, ("theirs", rows.Goal(3, 6)))
    assert played.order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert row.ratios == pytest.approx((3.0, 5.0, 2.0)), "not the ratio of the medians, 4"
    assert (row.ours, row.theirs, row.ratio) == pytest.approx((2.0, 8.0, 3.0))
    assert row.as_dict()["met"] is True and row.as_dict()["lowest"] == pytest.approx(2.0)


def test_a_goal_in_time_is_met_from_below() -> None:
    played = Played({"ours": [1.2], "theirs": [1.0]})
    (row,) = measured(played, ("theirs", rows.Goal(1.15, 1.05, of="time")), repeats=1)
    assert row.ratio == pytest.approx(1.2) and row.as_dict()["met"] is False


def test_a_baseline_that_is_not_there_is_left_out_with_the_reason_and_the_others_stay() -> None:
    missing = UserError("deepspeed is not installed")
    played = Played({"ours": [1.0, 1.0], "gone": [missing], "theirs": [2.0, 2.0]})
    none = rows.NOTHING_ASKED
    gone, row = measured(played, ("gone", none), ("theirs", none), repeats=2)
    assert isinstance(gone, rows.Skipped) and gone.reason == "deepspeed is not installed"
    assert row.ratios == (2.0, 2.0) and played.order.count("gone") == 1


def test_what_is_written_is_what_is_read_and_changes_are_told_from_noise(tmp_path: Path) -> None:
    def result(*ratios: float, of: str = "speed") -> rows.Row:
        goal, names = rows.Goal(2, 3, of), ("step", of, "hybrid", "ddp")
        base = [1.0] * len(ratios)
        return rows.compare(
            names, *([base, ratios] if of == "speed" else [ratios, base]), "s", goal
        )

    def told(former: rows.Row, now: rows.Row) -> str:
        return shown.changes([former], [now]).splitlines()[-1].split("|")[-2].strip()

    old = [result(2.0, 2.1), result(1.0, of="time"), rows.Skipped("gpu", "all", "no GPU")]
    file = tmp_path / "old.json"
    results.Result(old, {"step": {}}).write(file)
    assert results.read(file).rows == old
    assert told(old[0], result(2.5, 2.6)) == "better"
    assert told(old[0], result(1.5, 1.6)) == "WORSE"
    assert told(old[0], result(1.5, 2.6)) == "within the spread"
    assert told(old[1], result(0.8, of="time")) == "better? (single pairs)"


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["stap"], "there is no part 'stap' (did you mean step?)"),
        (["--repeats", "0"], "--repeats 0 was given; at least 1 is needed"),
        (["--compare", "nowhere.json"], "nowhere.json: No such file"),
        (["--compare", str(SCRIPT)], "is no result of benchmark.py --json"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], arguments: list[str], fragment: str
) -> None:
    try:
        code: Any = cli.main(arguments)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2 and fragment in err and out == ""


@pytest.mark.slow
def test_a_run_that_fails_says_why_and_leaves_nothing() -> None:
    script = "sleep 97.25 & echo last words; exit 3"
    runner = runs.Runner(limit_s=60)
    with pytest.raises(runs.RunFailed, match="exit status 3") as caught:
        runner.run(runs.Job("bad", "subprocess:check_call", {"args": ["sh", "-c", script]}))
    assert str(caught.value).startswith("bad: ") and "last words" in str(caught.value)
    assert "sleep\x0097.25" not in "".join(map(_command, Path("/proc").glob("[0-9]*")))


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.slow
def test_a_small_part_runs_by_the_real_command(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "step", "--quick", f"--json={out}", f"--out={tmp_path}/d"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    (row,) = content["rows"]
    assert row["ours"] > 0 and row["theirs"] > 0 and row["baseline"].startswith("Lightning ddp")
    assert content["machines"]["step"]["cores"] and str(ROOT) not in out.read_text()
    assert "| MLP 3 k" in done.stdout and list((tmp_path / "d").glob("*.json"))


def test_a_part_that_is_measured_again_replaces_its_rows_and_leaves_the_others() -> None:
    def row(part: str, ours: float) -> rows.Row:
        return rows.Row(part, "work", "hybrid", ours, "s")

    old = [row("step", 2.0), row("job", 3.0), row("sparse", 5.0)]
    before = results.Result(old, {key: {"n": 1} for key in ["step", "job", "sparse"]})
    again = [row("step", 1.0), row("update", 4.0)]
    machines: dict[str, dict[str, Any]] = {key: {"n": 2} for key in ["update", "step"]}
    whole = results.Result(again, machines | {"sparse": {"only": "another"}}).over(before)
    found = [(each.part, each.ours) for each in whole.rows if isinstance(each, rows.Row)]
    assert found == [("update", 4.0), ("step", 1.0), ("job", 3.0), ("sparse", 5.0)]
    assert [whole.machines[name].get("n") for name in ("update", "step", "job")] == [2, 2, 1]
    assert results.Result([], machines).over(before).rows == [row("job", 3.0), row("sparse", 5.0)]


def test_what_does_not_fit_into_memory_is_left_out_with_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "available_bytes", lambda: 2 << 30)
    exchange.room_for(1 << 30)
    with pytest.raises(UserError, match=r"needs 4\.1 GiB of memory, and 2\.0 are free"):
        exchange.hybrid(10**8, 8, 0.1)
    with pytest.raises(UserError, match=r"numba_of_old cannot be imported .*benchmark\]"):
        peers.optional("numba_of_old.more")


def test_an_exchange_without_a_network_is_timed() -> None:
    assert 0 < exchange.hybrid(1000, 2, 0.01) < 60


def test_every_part_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(PARTS)
