"""`python -m hybridtrain simulate`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridtrain import virtual
from hybridtrain.cli.commands.simulate import main
from hybridtrain.cli.commands.simulate_options import parse
from hybridtrain.errors import UserError
from hybridtrain.virtual.service_times import ServiceTimes

ROOT = Path(__file__).parents[2]


def test_strategies_and_numbers_of_workers_are_compared_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    options = ["workers=1,4", "mini_batches=2000", "slower.0=2", "batch_size=8", f"json={out}"]
    assert main(options) == 0
    text = capsys.readouterr().out
    assert "of ideal" in text and all(len(line) <= 80 for line in text.splitlines())
    rows = json.loads(out.read_text())
    assert [(r["strategy"], r["workers"]) for r in rows] == [
        *(("hybrid", 1), ("async", 1), ("hybrid", 4), ("async", 4))
    ]
    alone, _, together, free = rows
    assert alone["efficiency"] == pytest.approx(1.0, abs=0.1)
    assert together["efficiency"] < 0.6 < 0.9 < free["efficiency"]
    assert together["staleness_max"] == 0 < free["staleness_mean"]
    assert together["samples"] == 2000 * 8 and together["updates"] == 500
    assert main([*options[:-1], f"json={tmp_path / 'again.json'}"]) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    for one, other in zip(rows, again, strict=True):
        assert one | {"events_per_s": 0} == other | {"events_per_s": 0}, "same seed, same figures"


def test_the_page_of_a_simulation_has_its_charts_strategies_and_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the extra `report`")
    page = tmp_path / "page.html"
    for workers in ("4", "2,4"):
        assert main([f"workers={workers}", "mini_batches=200", f"html={page}"]) == 0
        text = page.read_text()
        assert text.count("<svg") >= 6 and "hybrid" in text and "async" in text
        assert "mini_batches=200" in text, "the command that made it"


def test_conditions_of_the_command_line_reach_the_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, times = tmp_path / "out.json", tmp_path / "times.csv"
    times.write_text("worker,seconds\n0,0.5\n1,1.5\n")
    options = ["strategy=async", "workers=3", "compute=measured", f"from={times}", "seconds=40"]
    options += ["network.latency_s=0.25", "network.bandwidth=400", "parameters=25"]
    options += ["script=[{worker: 1, dies_at: 20}, {worker: 2, slower: 3, from: 0}]"]
    assert main([*options, f"json={out}"]) == 0
    assert "network" in capsys.readouterr().out
    (row,) = json.loads(out.read_text())
    # 0.5 s each way: worker 0 every 1.5 s; worker 1 every 2.5 s for 20 s; worker 2 every 2.5 s.
    assert row["samples"] == 32 * (27 + 8 + 16)
    assert row["network_share"] == pytest.approx(51 / 120, abs=0.03)
    assert row["seconds"] <= 40 and row["updates"] == 51 == sum(row["staleness"].values())


def test_hosts_share_their_links_and_the_table_says_what_is_busy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    options = ["strategy=hybrid", "hosts=2x1,2x4", "compute=constant", "mini_batches=800"]
    options += ["network.bandwidth=4000", "parameters=100", "update_s=0.25", f"json={out}"]
    assert main(options) == 0
    text = capsys.readouterr().out
    assert "2x1" in text and "2x4" in text and "link" in text and "workers" not in text
    one, four = json.loads(out.read_text())
    assert (one["hosts"], one["workers"], four["hosts"], four["workers"]) == (2, 2, 2, 8)
    # A step: 1 s, the rows of a host 0.1 s each, the update 0.25 s, the parameters 0.1 s.
    assert one["updates_per_s"] == pytest.approx(1 / 1.45, rel=0.01)
    assert four["updates_per_s"] == pytest.approx(1 / 1.75, rel=0.01)
    assert one["link_share"] == pytest.approx(0.1 / 1.45, rel=0.01)
    assert four["update_share"] == pytest.approx(0.25 / 1.75, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["workers=10000", "hosts=4x2500"])
def test_ten_thousand_workers_are_no_trouble(size: str) -> None:
    plan, _ = parse([size, "mini_batches=20000"])
    row = virtual.simulate(
        plan, virtual.StrategySpec("hybrid", "hybrid"), 10_000, None, plan.hosts[0]
    )
    assert (row.updates, row.samples) == (2, 2 * 10_000 * 32)


@pytest.mark.few(14)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["strategy=hybird"], "strategy=hybird was given (did you mean hybrid?)"),
        (["workers=0"], "workers=0 was given; it must be a whole number from 1 to 10000"),
        (["workers=2,10001"], "workers=10001 was given; it must be a whole number from 1 to"),
        (["workers=2,x"], "workers=x was given"),
        (["worker=3"], "(did you mean workers?)"),
        (["compute=gamma"], "compute='gamma' was given; known are constant"),
        (["compute.mean_s=-1"], "compute.mean_s=-1 was given; it must be a number above 0"),
        (["compute.mean_s=fast"], "compute.mean_s=fast was given; it must be a number"),
        (["compute.sigma=1"], "compute=exponential has no such parameter"),
        (["strategy=hybrid:k"], "options follow the name as :option=value, like backup:k=3"),
        (["seconds=0"], "seconds=0 was given; it must be a number above 0"),
        (["seconds=inf"], "seconds=inf was given; it must be a number above 0"),
        (["interrupt=yes"], "interrupt=yes was given; it must be true or false"),
        (["network.bandwidth=5"], "network.bandwidth was given without parameters"),
        (["parameters=5"], "parameters was given without network.bandwidth"),
        (["network.latency_s=-1"], "network.latency_s=-1 was given"),
        (["network.latency=1"], "(did you mean network.latency_s?)"),
        (["hosts=4"], "hosts=4 was given; say hosts=HxN, H hosts with N workers each: hosts=2x4"),
        (["hosts=0x4"], "hosts=0x4 was given; say hosts=HxN"),
        (["hosts=2x4,2xa"], "hosts=2xa was given; say hosts=HxN"),
        (["host=2x4"], "(did you mean hosts?)"),
        (["hosts=2x4", "workers=8"], "workers=8 was given with hosts=2x4, which says how many"),
        (["hosts=2x4", "network.bandwidth=5"], "network.bandwidth was given without parameters"),
        (["hosts=2x2", "slower.4=2"], "slower.4 was given, but 4 workers have the numbers 0 to 3"),
        (["hosts=2x2", "compute.seconds_per_step=1,2"], "workers=4; give a number for each"),
        (["compute=measured"], "compute=measured was given without from="),
        (["run=none"], "run=none: there is no such directory"),
        (["epoch=0"], "epoch=0 was given; it must be a whole number from 1 on"),
        (["epoch=9", "task=parabola"], "epoch was given together with task=parabola; the task"),
        (["from=x.csv"], "compute=exponential was given with from="),
        (["compute=measured", "from=none.csv"], "cannot read service times from none.csv"),
        (["compute=measured", "from=x", "compute.mean_s=2"], "compute=measured has no such"),
        (["script=[{worker: 9, dies_at: 1}]"], "worker 9 was given, but 8 workers"),
        (["script=[{worker: 0, dies_at: x}]"], "dies_at must be a number"),
        (["html=none/page.html", "mini_batches=10"], "html=none/page.html could not be written"),
        (["slower.9=2", "workers=4"], "slower.9 was given, but 4 workers have the numbers 0 to 3"),
        (["slower.x=2"], "slower.W=x was given"),
        (["hello"], "'hello' was given"),
        (["plot=figures.png"], "'plot=figures.png' was given"),
        (["report=timelien"], "report=timelien was given (did you mean timeline?)"),
        (["svg=x.svg"], "svg=x.svg was given without report=timeline"),
        (
            ["report=timeline", "svg=none/x.svg", "mini_batches=10"],
            "svg=none/x.svg could not be written",
        ),
    ],
)
def test_bad_input_is_one_line_on_standard_error(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


@pytest.mark.slow
def test_the_module_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hybridtrain", "simulate", "--help"],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0 and "strategy=hybrid,async" in done.stdout


@pytest.mark.slow
def test_strategies_whose_workers_train_on_their_own_stand_beside_the_others() -> None:
    arguments = ["strategy=hybrid,local_sgd:every=4,diloco:every=4", "task=digits", "workers=2"]
    plan, _ = parse([*arguments, "mini_batches=41"])  # of an epoch of 48
    hybrid, local, diloco = (virtual.simulate(plan, each, 2) for each in plan.strategies)
    assert (hybrid.updates, local.updates, diloco.updates) == (20, 5, 5)
    assert 0.9 < hybrid.sent_bytes / (4 * local.sent_bytes) < 1.1  # one is under way
    assert local.sent_bytes == diloco.sent_bytes
    assert local.loss != diloco.loss


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["strategy=local_sgd"], "strategy=local_sgd was given without task="),
        (["strategy=local_sgd:evry=3", "task=parabola"], "did you mean every?"),
    ],
)
def test_bad_options_of_strategies_whose_workers_train_on_their_own_are_refused(
    given: list[str], said: str
) -> None:
    with pytest.raises(UserError, match=said.replace("?", r"\?")):
        plan, _ = parse(given)
        virtual.simulate(plan, plan.strategies[0], 2)


def test_what_is_dropped_is_no_use() -> None:
    times = ServiceTimes("constant", slower={1: 1.5})
    plan = virtual.SimulationPlan(times=times, batch_size=1, mini_batches=60)
    row = virtual.simulate(plan, virtual.StrategySpec("", {"name": "backup", "k": 1}), 2)
    assert row.dropped > 0
    assert row.efficiency == pytest.approx(row.samples_per_s / (1 + 1 / 1.5))
