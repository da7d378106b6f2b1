"""What virtual workers meet with: a network, a script, service times that were measured."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from hybridtrain.engine.exchanges import make_exchange
from hybridtrain.engine.policies import OnArrival, WaitForAll, make_policy
from hybridtrain.errors import UserError
from hybridtrain.virtual.network import Conditions, Network
from hybridtrain.virtual.script import Dies, Joins, Script, Slows, read_script
from hybridtrain.virtual.service_times import Measured, ServiceTimes, read_times
from hybridtrain.virtual.virtual_world import Curve, VirtualWorld

CONSTANT = ServiceTimes("constant")


def world(policy: Any, workers: int, times: Any = CONSTANT, **conditions: Any) -> VirtualWorld:
    return VirtualWorld(policy, workers, times, conditions=Conditions(**conditions))


# ---- network ------------------------------------------------------------------------------------


def test_a_push_takes_time_to_arrive_and_the_release_to_come_back() -> None:
    """Latency 0.1 s, and 400 bytes at 1,000 bytes/s: half a second each way, but not at first."""
    network = Network(latency_s=0.1, bandwidth=1000, size_bytes=400)
    for policy in (WaitForAll(), OnArrival()):
        far = world(policy, 3, network=network)
        far.run(mini_batches=3)
        assert far.now_s == pytest.approx(1.5), "computed 1 s, under way 0.5 s"
        far.run(mini_batches=6)
        assert far.now_s == pytest.approx(3.5), "back 0.5 s, computed 1 s, under way 0.5 s"


def test_parameters_are_those_at_the_moment_of_the_release() -> None:
    """Two equal workers far away: each gradient is as stale as without a network."""
    far = world(OnArrival(), 2, network=Network(latency_s=10.0))
    far.run(updates=100)
    assert far.server.statistics.ages == {0: 1, 1: 99}


def test_the_servers_own_link_is_passed_one_after_the_other() -> None:
    """4 workers, 0.25 s each on the server's link, both ways: 1 s, whoever has the last place."""
    busy = world(WaitForAll(), 4, network=Network(server_bandwidth=400, size_bytes=100))
    busy.run(updates=1)
    assert busy.now_s == pytest.approx(1.0 + 4 * 0.25)
    busy.run(updates=2)
    # The first is back after 0.25 s and pushes at 3.25; the others follow in their order.
    assert busy.now_s == pytest.approx(2.0 + 0.25 + 1.0 + 4 * 0.25)


def test_a_contribution_that_is_interrupted_in_the_servers_link_passes_it_again() -> None:
    """1 of 4 counts, and what arrives takes a second on the server's link, each time."""
    times = ServiceTimes("exponential", mean_s=2.0)
    network = Network(server_bandwidth=100, size_bytes=100)
    busy = world(make_policy({"name": "backup", "k": 1}), 4, times, network=network, interrupt=True)
    for update in range(1, 50):
        busy.run(updates=update)
        assert not busy.links._inside, "everybody begins anew"
    assert busy.interrupted > 100


def test_a_link_that_is_full_bounds_the_updates_whatever_the_workers() -> None:
    busy = world(OnArrival(), 50, network=Network(server_bandwidth=1000, size_bytes=100))
    busy.run(updates=2000)
    assert 2000 / busy.now_s == pytest.approx(10.0, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"latency_s": -1.0}, "network.latency_s=-1.0 was given"),
        ({"latency_s": float("nan")}, "network.latency_s=nan"),
        (
            {"bandwidth": 0.0},
            "network.bandwidth=0.0 .* above 0, or inf",
        ),
        ({"server_bandwidth": -5.0}, "network.server_bandwidth=-5.0"),
        ({"size_bytes": -1}, "size_bytes=-1"),
    ],
)
def test_impossible_networks_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        Network(**arguments)


# ---- several hosts ------------------------------------------------------------------------------


def hosts(policy: Any, n: int, each: int, **network: Any) -> VirtualWorld:
    """Hosts with ``each`` workers, who compute for a second; rows and parameters of 100 bytes."""
    return world(policy, n * each, network=Network(size_bytes=100, hosts=n, **network))


def test_rows_share_their_hosts_link_and_parameters_come_down_once() -> None:
    """2 rows of 0.1 s go up one after the other; the parameters come down to both at once."""
    two = hosts(WaitForAll(), 2, 2, bandwidth=1000)
    two.run(updates=1)
    assert two.now_s == pytest.approx(1.0 + 2 * 0.1)
    two.run(updates=2)
    assert two.now_s == pytest.approx(1.2 + 0.1 + 1.0 + 2 * 0.1)
    assert two.links.server_s == 0.0


def test_large_masters_come_down_while_the_last_row_comes_up() -> None:
    """2 rows of 0.1 s; beside the second the masters go down, which takes 0.1 s as well."""
    network = Network(size_bytes=1 << 23, hosts=2, bandwidth=10 << 23, latency_s=0.001)
    two = world(WaitForAll(), 4, network=network)
    two.run(updates=2)
    assert two.now_s == pytest.approx(2 * (1.0 + 2 * 0.1 + 0.001) + 0.001)


def test_on_the_servers_host_nothing_takes_time() -> None:
    two = hosts(OnArrival(), 2, 1, bandwidth=100, latency_s=5.0)
    two.run(until_s=10.5)
    assert two.server.statistics.stats()["samples_per_worker"] == [10, 1]
    two.run(until_s=20.0)  # the other: 1 s, 6 s up, 6 s down, 1 s, 6 s up
    assert two.server.statistics.stats()["samples_per_worker"] == [20, 2]


def test_workers_with_copies_of_the_parameters_are_each_sent_their_own() -> None:
    """Both push at 1.0: up 0.1 and 0.2 s; each is answered by itself."""
    two = hosts(OnArrival(), 2, 2, bandwidth=1000, latency_s=0.25)
    two.run(until_s=2.5)
    assert two.network_s == pytest.approx(0.35 + 0.45 + 0.35 + 0.35)


def test_the_link_of_the_servers_host_is_shared_by_all_others() -> None:
    """3 hosts beside the first, of which each could send 10 rows a second, and it takes 10."""
    many = hosts(OnArrival(), 4, 25, bandwidth=1000, server_bandwidth=1000)
    many.run(until_s=200.0)
    pushed = many.server.statistics.stats()["samples_per_worker"]
    assert sum(pushed[:25]) == pytest.approx(25 * 200, rel=0.01)
    assert sum(pushed[25:]) == pytest.approx(10 * 200, rel=0.02)
    assert many.links.server_s == pytest.approx(200, rel=0.05), "what waits for it is counted"


def test_a_row_passes_both_links_at_once() -> None:
    two = hosts(WaitForAll(), 2, 1, bandwidth=1000, server_bandwidth=500, latency_s=0.25)
    two.run(updates=1)
    assert two.now_s == pytest.approx(1.0 + 0.25 + 0.2)


def test_movements_of_local_sgd_are_sent_once_in_each_interval() -> None:
    """Local SGD: one row of each worker in 4 steps, of the size that it has."""

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    two = VirtualWorld(
        WaitForAll(), 4, CONSTANT, task=One(), optimizer=sgd,
        exchange=make_exchange({"name": "movement", "every": 4}),
        conditions=Conditions(Network(bandwidth=10, size_bytes=999, hosts=2)),
    )  # fmt: skip
    two.run(updates=1)
    assert two.now_s == pytest.approx(4.0 + 2 * 0.4)


# ---- a script -----------------------------------------------------------------------------------


def test_nobody_waits_for_a_worker_that_has_died() -> None:
    """All wait for worker 2, which takes 100 s; when it dies at 10 s they go on at once."""
    slow = ServiceTimes("constant", slower={2: 100.0})
    dying = world(WaitForAll(), 3, slow, script=Script((Dies(10.0, 2),)))
    dying.run(updates=1)
    assert dying.now_s == 10.0
    dying.run(updates=5)
    assert (dying.now_s, dying.server.statistics.stats()["samples"]) == (14.0, 10)


def test_a_worker_joins_from_the_newest_parameters() -> None:
    late = world(OnArrival(), 2, script=Script((Joins(10.5, 1),)))
    late.run(until_s=10.6)
    assert late.server.statistics.stats()["samples_per_worker"] == [10, 0]
    late.run(until_s=20.6)
    stats = late.server.statistics.stats()
    assert stats["samples_per_worker"] == [20, 9 + 1]
    assert stats["staleness"]["max"] == 1, "not as old as the run"
    assert stats["waiting_share"] == [0.0, 0.0], "its absence is no waiting"


def test_in_lock_step_a_worker_that_joins_is_waited_for_from_then_on() -> None:
    slow = ServiceTimes("constant", slower={1: 5.0})
    late = world(WaitForAll(), 2, slow, script=Script((Joins(9.5, 1),)))
    late.run(updates=9)
    assert late.now_s == 9.0
    late.run(updates=10)
    assert late.now_s == 14.5, "it began at 9.5"


def test_a_worker_that_dies_while_it_waits_comes_back_with_a_clean_account() -> None:
    slow = ServiceTimes("constant", slower={0: 10.0})
    back = world(WaitForAll(), 2, slow, script=Script((Dies(5.0, 1), Joins(15.0, 1))))
    back.run(updates=2)
    waiting = back.server.statistics.stats()["waiting_share"][1]
    assert waiting == pytest.approx(4.0 / 6.0, abs=0.3), "not from its death on"


def test_slowness_holds_for_the_time_itself() -> None:
    """1 s of work from 9.5 on, four times slower from 10 to 11: 0.5 + 1 (0.25 done) + 0.25."""
    slow = Script((Slows(0, 4.0, 10.0, 11.0),))
    finish = slow.finish(0)
    assert finish is not None
    assert finish(9.5, 1.0) == pytest.approx(11.25)
    assert finish(2.0, 1.0) == 3.0 and finish(11.0, 1.0) == 12.0
    assert finish(10.0, 0.1) == pytest.approx(10.4), "within"
    assert slow.finish(1) is None
    one = world(OnArrival(), 1, script=slow)
    one.run(until_s=20.0)
    assert one.events == 19, "three quarters of a mini-batch were lost"


def test_a_script_is_read_from_yaml(tmp_path: Path) -> None:
    text = (
        "- {worker: 3, dies_at: 10}\n- {worker: [6, 7], joins_at: 30}\n"
        "- {worker: 1, slower: 4, from: 5, until: 20}\n"
    )
    file = tmp_path / "script.yaml"
    file.write_text(text)
    wanted = (Dies(10, 3), Joins(30, 6), Joins(30, 7), Slows(1, 4, 5, 20))
    assert read_script(str(file)).events == wanted == read_script(text).events
    assert read_script(text).absent() == {6, 7}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing.yaml", "cannot read .* nothing.yaml"),
        ("[{worker: 1", "is no YAML"),
        ("worker: 1", "wanted: a list"),
        ("[{worker: 1, dies: 3}]", "known are"),
        ("[{dies_at: 3}]", "known are"),
        ("[7]", "known are"),
        ("[{worker: x, dies_at: 3}]", "a worker is a whole number"),
        ("[{worker: -1, dies_at: 3}]", "a worker is a whole number"),
        ("[{worker: 1, dies_at: soon}]", "dies_at must be a number"),
        ("[{worker: 1, dies_at: -3}]", "dies_at must be a number"),
        ("[{worker: 1, slower: 0, from: 1}]", "slower > 0"),
        ("[{worker: 1, slower: 2, from: 5, until: 5}]", "from < until"),
        ("[{worker: 1, dies_at: 1}, {worker: 1, dies_at: 2}]", "in between it must join"),
        ("[{worker: 1, joins_at: 1}, {worker: 1, joins_at: 2}]", "in between it must die"),
        (
            "[{worker: 1, slower: 2, from: 1, until: 9}, {worker: 1, slower: 3, from: 4}]",
            "must not overlap",
        ),
    ],
)
def test_impossible_scripts_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_script(text)


def test_a_script_must_fit_the_workers() -> None:
    with pytest.raises(UserError, match="worker 4 was given, but 4 workers have the numbers 0"):
        world(WaitForAll(), 4, script=Script((Dies(1.0, 4),)))
    with pytest.raises(UserError, match="somebody must be there at the start"):
        world(WaitForAll(), 1, script=Script((Joins(1.0, 0),)))


@pytest.mark.parametrize("policy", [WaitForAll, OnArrival])
def test_a_run_that_nobody_is_left_for_ends_with_a_reason(policy: Any) -> None:
    dead = world(policy(), 2, script=Script((Dies(1.5, 0), Dies(2.5, 1))))
    with pytest.raises(UserError, match="nobody is left who computes"):
        dead.run(updates=100)
    assert dead.now_s == 2.5


# ---- measured -----------------------------------------------------------------------------------


def test_measured_times_come_in_their_order_and_again_from_the_start() -> None:
    times = Measured({0: [1.0, 2.0], 1: [3.0]}, slower={1: 2.0})
    draw = times.stream(0, seed=5)
    assert [draw() for _ in range(5)] == [1.0, 2.0, 1.0, 2.0, 1.0]
    assert times.expected_s(0) == 1.5 and times.expected_s(1) == 6.0
    assert times.stream(1, seed=0)() == 6.0


def test_more_workers_than_were_measured_have_the_same_times_from_other_places_on() -> None:
    times = Measured({0: list(range(1, 101)), 1: [0.5]})
    firsts = [times.stream(worker, seed=0)() for worker in range(0, 20, 2)]
    assert firsts[0] == 1 and len(set(firsts)) > 5
    assert [times.stream(w, 0)() for w in range(1, 20, 2)] == [0.5] * 10
    assert firsts == [times.stream(worker, seed=0)() for worker in range(0, 20, 2)]


@pytest.mark.parametrize("name", ["times.json", "times.csv"])
def test_measured_times_are_read_from_files(tmp_path: Path, name: str) -> None:
    wanted = {0: [0.25, 0.5], 1: [1.0]}
    lines = ["worker,seconds", "0,0.25", "1,1.0", "0,0.5"]
    text = json.dumps(wanted) if name.endswith("json") else "\n".join(lines)
    for mark in ("", "\ufeff"):  # as spreadsheets write it
        (tmp_path / name).write_text(mark + text)
        assert read_times(tmp_path / name) == wanted


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "[1, 2]"),
        ("a.json", "{"),
        ("a.json", '{"0": ["x"]}'),
        ("a.json", '{"0": 1.5}'),
        ("a.json", '{"0": [1], "1": [2], "0": [3]}'),
    ],
)
def test_files_without_service_times_are_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=r"a\.json holds no service times"):
        read_times(tmp_path / name)
    with pytest.raises(UserError, match="cannot read service times"):
        read_times(tmp_path / "nothing.csv")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("w,s\n0,1", "line 1: the column worker is missing"),
        ("worker,seconds\n0,", "line 2: worker '0', seconds '' were given"),
        ("worker,seconds\n0,0,25", "line 2: cells in the row: 3, columns in the header: 2"),
        (
            "worker;seconds\n0;0,25",
            "line 2: worker '0', seconds '0,25' were given; .*decimal point",
        ),
        ("worker,seconds\n0,1\nworker,seconds\n", "line 3: the header stands here again"),
        ("worker,seconds\n0.5,1\n", "line 2: worker '0.5', seconds '1' were given"),
    ],
)
def test_a_line_that_is_no_service_time_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=rf"a\.csv, {said}"):
        read_times(tmp_path / "a.csv")


def test_service_times_that_pandas_has_written_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(",worker,seconds\n0,0.0,0.25\n1,1.0,1e-1\n")
    assert read_times(tmp_path / "a.csv") == {0: [0.25], 1: [0.1]}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ({}, "worker nobody were given"),
        ({1: [1.0]}, "worker 1 were given; workers are numbered from 0"),
        ({0: [1.0, -2.0]}, "worker 0 contain -2.0 s"),
        ({0: [float("nan")]}, "worker 0 contain nan s"),
        ({0: [0.0]}, "no time at all"),
        ({0: []}, "no time at all"),
    ],
)
def test_impossible_measurements_are_refused(seconds: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        Measured(seconds)


# ---- all at once --------------------------------------------------------------------------------

POLICIES: list[Any] = [
    "hybrid",
    "synchronous",
    "backup",
    {"name": "backup", "k": "auto"},
    {"name": "k_async", "k": 2},
    {"name": "k_batch_sync", "k": 2},
    {"name": "softsync", "n": 2},
    {"name": "ssp", "lead": 1},
    "async",
    {"name": "switch", "at_update": 5},
]


def chances(seed: int, workers: int) -> Script:
    """Workers come, go and tire as it happens; worker 0 is there at first."""
    random, events = Random(seed), list[Dies | Joins | Slows]()
    for worker in range(workers):
        at_s, there = 0.0, worker == 0 or random.random() < 0.8
        while random.random() < 0.6:
            at_s += random.uniform(1, 15)
            events.append(Dies(at_s, worker) if there else Joins(at_s, worker))
            there = not there
        if random.random() < 0.3:
            events.append(Slows(worker, random.uniform(0.5, 5), 3.0, 9.0))
    return Script(tuple(events))


@pytest.mark.few(4)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_whatever_happens_to_workers_a_run_goes_on_while_somebody_is_left(policy: Any) -> None:
    for seed in range(15):
        workers = 2 + seed % 5
        n_hosts = 2 if workers % 2 == 0 else 1
        servers = 200 if seed % 3 else math.inf
        network = Network(0.3 * (seed % 2), 100, servers, 25 * (seed % 4), n_hosts)
        conditions = {"network": network, "script": chances(seed, workers), "interrupt": seed > 7}
        one = world(make_policy(policy), workers, ServiceTimes("exponential"), **conditions)
        try:
            one.run(mini_batches=200)
        except UserError as error:
            assert "nobody is left who computes" in str(error), seed
            assert len(one.server._members) == 0, seed
        else:
            assert one.events >= 200, seed


def test_a_long_series_is_kept_as_means() -> None:
    curve = Curve(most=8)
    for number in range(100):
        curve.add(float(number), 2.0 * number)
    points = curve.points()
    assert len(points) <= 8 and points[0][0] < points[-1][0]
    assert all(value == pytest.approx(2 * at_s) for at_s, value in points)
    assert points[0][0] == 7.5, "of the first 16"
    assert points[-1][0] == 87.5, "the last four are too few for a point"
    for number in range(100, 104):
        curve.add(float(number), 2.0 * number)
    assert curve.points()[-1][0] == 99.5, "eight are not"


def test_who_computes_for_a_round_that_a_timer_or_a_death_has_ended_begins_anew_too() -> None:
    """Not only when a contribution has ended it."""
    slow = ServiceTimes("lognormal", slower={2: 4.0})
    deaths = Script((Dies(5.3, 3), Joins(9.0, 3), Dies(17.1, 3)))
    policy = make_policy({"name": "backup", "k": "auto"})
    made = world(policy, 4, slow, script=deaths, interrupt=True)
    while made.now_s < 40.0:
        made._step()
        version = made.server.statistics.version
        assert all(read == version for read in made._read.values())
    assert made.interrupted > 5


def test_what_is_not_handed_over_takes_no_time_on_the_network() -> None:
    """Every fifth step is pushed: five seconds of computing for one way there and back."""
    exchange: Any = make_exchange({"name": "accumulated", "n_push": 5, "n_fetch": 5})

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    far = VirtualWorld(
        OnArrival(), 1, CONSTANT, task=One(), optimizer=sgd, exchange=exchange,
        conditions=Conditions(Network(latency_s=2.0)),
    )  # fmt: skip
    far.run(mini_batches=101)
    # Steps 0, 5, ... push; steps 4, 9, ... fetch: two of five go to the server and back.
    assert far.now_s == pytest.approx(101 + 2 * 40 * 2.0)
    assert far.network_s == pytest.approx(far.now_s - 101 + 2.0), "what is under way is counted"


class One:
    """A parameter whose gradient is itself."""

    def parameters(self) -> list[torch.Tensor]:
        return [torch.ones(1)]

    def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [values[0].clone()]


@pytest.mark.parametrize("policy", ["async", "switch"])
def test_who_may_be_late_is_not_interrupted(policy: str) -> None:
    """Of four equal workers none is ever more than three updates late."""
    late: Any = {"name": "async", "max_staleness": 3}
    switch = {"name": "switch", "first": late, "then": "async", "at_update": 1000}
    found = []
    for interrupt in (False, True):
        made = make_policy(late if policy == "async" else switch)
        run = world(made, 4, interrupt=interrupt)
        run.run(until_s=20.5)
        found.append(run.server.statistics.stats()["samples_per_worker"])
    assert found[0] == found[1] == [20, 20, 20, 20]
