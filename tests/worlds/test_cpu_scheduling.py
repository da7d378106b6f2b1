"""The server steps aside where it shares a core with a worker and another core is free."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from hybridtrain.engine.policies import WaitForAll
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worlds import cpu_scheduling
from hybridtrain.engine.worlds.process_world import ProcessWorld

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="cores are told and chosen as Linux does it"
)
SERVER = os.getpid()


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """What the calling thread was confined to, one after the other; it may use cores 0 to 3."""
    made: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: made.append(set(cores)))
    return made


def placed(monkeypatch: pytest.MonkeyPatch, server: int, *workers: int | None) -> bool:
    cores = {SERVER: server} | {-n: core for n, core in enumerate(workers, start=1)}
    monkeypatch.setattr(cpu_scheduling, "last_core", cores.get)
    return cpu_scheduling.stand_aside([-n for n in range(1, len(workers) + 1)])


def test_a_server_on_a_workers_core_moves_off_and_may_then_go_anywhere(
    monkeypatch: pytest.MonkeyPatch, moves: list[set[int]]
) -> None:
    assert placed(monkeypatch, 1, 1, 2)
    assert moves == [{0, 3}, {0, 1, 2, 3}]


@pytest.mark.parametrize(
    ("server", "workers"),
    [(0, (1, 2)), (0, (0, 1, 2, 3)), (0, ()), (0, (None, None))],
    ids=["has its own", "no core is free", "no worker", "all have ended"],
)
def test_a_server_with_a_core_of_its_own_or_no_free_core_stays_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
    moves: list[set[int]],
    server: int,
    workers: tuple[int | None, ...],
) -> None:
    assert not placed(monkeypatch, server, *workers)
    assert moves == []


def test_the_core_of_a_process_is_one_that_it_may_use() -> None:
    assert cpu_scheduling.last_core(os.getpid()) in os.sched_getaffinity(0)
    assert cpu_scheduling.last_core(2**30) is None


def test_standing_aside_leaves_the_affinity_of_the_process_as_it_was() -> None:
    before = os.sched_getaffinity(0)
    cpu_scheduling.stand_aside([os.getpid()])
    assert os.sched_getaffinity(0) == before


def policy_of(client: Client) -> int:
    return os.sched_getscheduler(0)


def test_workers_take_no_core_from_the_server() -> None:
    assert ProcessWorld(ParameterServer(WaitForAll(), 2), 2).run(policy_of) == [os.SCHED_BATCH] * 2
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_policy_that_was_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_IDLE)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *_: pytest.fail("it was changed"))
    assert not cpu_scheduling.yield_when_woken()


def test_a_system_that_refuses_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert not cpu_scheduling.yield_when_woken()
