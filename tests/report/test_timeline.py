"""Timelines: bars are what a run counts, and the picture shows them to everybody."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hybridtrain.cli.commands.simulate import main
from hybridtrain.cli.commands.simulate_options import parse
from hybridtrain.engine.policies import make_policy
from hybridtrain.engine.server.timeline import MOST_BARS, BarState, Timeline
from hybridtrain.errors import UserError
from hybridtrain.report.timeline import FEWER_ROWS, RIGHT, WIDTH, picture, rows
from hybridtrain.virtual import SimulationRow, simulate
from hybridtrain.virtual.virtual_world import VirtualWorld

SVG = "{http://www.w3.org/2000/svg}"
SLOW = ["workers=4", "slower.3=3", "compute=lognormal"]


def simulated(*arguments: str) -> tuple[SimulationRow, Timeline]:
    """Figures and timeline of one run in virtual time."""
    plan, _ = parse([*SLOW, *arguments])
    timeline = Timeline(plan.workers[0])
    return simulate(plan, plan.strategies[0], plan.workers[0], timeline), timeline


def drawn(timeline: Timeline, title: str = "run") -> ElementTree.Element:
    return ElementTree.fromstring(picture({title: timeline}, "virtual {}"))


def texts(svg: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in svg.iter(f"{SVG}text")]


@pytest.mark.parametrize(
    "strategy",
    ["synchronous", "hybrid", "backup", "k_async:k=2", "k_batch_sync:k=2", "ssp", "grace", "async"],
)
def test_bars_sum_to_what_the_simulation_counts(strategy: str) -> None:
    plan, _ = parse([*SLOW, f"strategy={strategy}"])
    timeline = Timeline(4)
    policy = make_policy(plan.strategies[0].policy)
    world = VirtualWorld(policy, 4, plan.times, timeline=timeline)
    world.run(mini_batches=24)
    stats = world.server.statistics.stats()
    for worker in range(4):
        computing, waiting, dropped = (timeline.seconds(worker, doing) for doing in BarState)
        busy = computing + dropped
        n = sum(bar.worker == worker and bar.doing is not BarState.WAITING for bar in timeline.bars)
        assert busy == pytest.approx(stats["step_s"][worker] * n)
        share = waiting / (waiting + busy) if busy else 0.0
        assert share == pytest.approx(stats["waiting_share"][worker])
    found = Counter(bar.worker for bar in timeline.bars if bar.doing is BarState.DROPPED)
    assert [found[worker] for worker in range(4)] == stats["dropped"]
    assert len(timeline.updates) == stats["updates"]
    assert all(0 <= bar.begin_s < bar.end_s <= world.now_s for bar in timeline.bars)


def test_the_staleness_in_the_bars_is_that_of_the_histogram() -> None:
    row, timeline = simulated("strategy=async", "mini_batches=30")
    ended = [bar for bar in timeline.bars if bar.end_s <= timeline.updates[-1]]
    assert Counter(map(timeline.staleness, ended)) == row.staleness


def test_what_is_interrupted_is_dropped() -> None:
    row, timeline = simulated("strategy=backup", "interrupt=true", "mini_batches=24")
    assert sum(bar.doing is BarState.DROPPED for bar in timeline.bars) == row.interrupted > 0


def test_a_worker_that_awaits_the_answer_to_an_earlier_push_waits() -> None:
    row, timeline = simulated("strategy=streaming_diloco:every=6", "task=clusters", "seconds=20")
    assert timeline.seconds(0, BarState.WAITING) > 5 > timeline.seconds(3, BarState.WAITING) == 0
    assert row.waiting_share > 0.2


def test_a_timeline_ends_with_so_many_contributions_of_the_fastest_worker() -> None:
    _, timeline = simulated("strategy=async", "mini_batches=2000")
    n = Counter(bar.worker for bar in timeline.bars if bar.end_s <= timeline.until_s)
    assert max(n.values()) == MOST_BARS and len(timeline.bars) < 4 * MOST_BARS
    assert timeline.updates[-1] <= timeline.until_s == timeline.end_s


@pytest.mark.parametrize("strategy", ["hybrid", "backup", "async"])
def test_a_picture_is_whole_for_light_and_dark_pages_and_the_same_each_time(strategy: str) -> None:
    _, timeline = simulated(f"strategy={strategy}", "seconds=14")
    text = picture({strategy: timeline}, "virtual {}")
    assert text == picture({strategy: timeline}, "virtual {}")
    assert "prefers-color-scheme:dark" in text and "http" not in text.replace(SVG[1:-1], "")
    svg = ElementTree.fromstring(text)
    assert svg.get("viewBox", "").startswith(f"0 0 {WIDTH} ")
    bars = [each for each in svg.iter(f"{SVG}rect") if each.get("class") in set(BarState)]
    assert len(bars) > 10
    height = float(svg.get("viewBox", "").split()[3])
    for each in (bar for bar in bars if bar.get("x") is not None):
        x, y, width = (float(each.get(name, "")) for name in ("x", "y", "width"))
        assert x >= 0 < width and x + width <= RIGHT + 0.1 and 0 < y < height
    said = texts(svg)
    assert {"worker 0", "worker 3", "server", "virtual seconds", "computes"} <= set(said)
    assert ("dropped: does not count" in said) is (strategy == "backup")


@pytest.mark.few(1)
@pytest.mark.parametrize(("workers", "shown"), [(1, 1), (4, 4), (1000, FEWER_ROWS)])
def test_a_picture_says_how_many_of_how_many_workers_it_shows(workers: int, shown: int) -> None:
    slow = ["compute=lognormal", "slower.0=9", "mini_batches=9000"]
    plan, _ = parse(["strategy=async", f"workers={workers}", *slow])
    timeline = Timeline(workers)
    simulate(plan, plan.strategies[0], workers, timeline)
    assert len(rows(timeline)) == shown and 0 in rows(timeline), "the slowest is among them"
    said = texts(drawn(timeline))
    assert sum(text.startswith("worker ") for text in said) == shown
    assert f"{shown} of {workers:,} workers, from the fastest to the slowest" in said or shown < 12


def test_what_users_say_is_escaped() -> None:
    _, timeline = simulated("strategy=async", "seconds=3")
    assert texts(drawn(timeline, "<b>&"))[0] == "<b>&"


def test_a_run_in_which_nothing_happens_cannot_be_drawn() -> None:
    with pytest.raises(UserError, match="run: no worker has handed over anything, so there is"):
        picture({"run": Timeline(2)}, "{}")


def test_the_command_draws_all_strategies_on_one_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["strategy=hybrid,async", "workers=2", "seconds=9", "report=timeline"]) == 0
    said = texts(ElementTree.parse(tmp_path / "timeline.svg").getroot())
    assert {"hybrid, 2 workers", "async, 2 workers"} <= set(said)
    assert said.count("server") == 2 and said.count("virtual seconds") == 1


def test_a_short_time_has_a_small_unit() -> None:
    _, timeline = simulated("strategy=async", "compute.mean_s=0.01", "mini_batches=20")
    said = texts(drawn(timeline))
    assert "virtual milliseconds" in said
    values = [float(text) for text in said if re.fullmatch(r"\d+(\.\d+)?", text)]
    assert values and max(values) < 1000 and not any(math.isnan(value) for value in values)
