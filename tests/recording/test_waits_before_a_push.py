"""The time that a worker has waited for others before it sent its push is not computing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridtrain.engine.policies import make_policy
from hybridtrain.engine.protocol import shared_round
from hybridtrain.engine.protocol.events import Received
from hybridtrain.engine.protocol.messages import GetState, GradientPush, Released
from hybridtrain.engine.protocol.shared_round import Arrival
from hybridtrain.engine.protocol.step_log import LoggedContribution
from hybridtrain.engine.recording import Record, read_record
from hybridtrain.engine.recording.record_file import Writer
from hybridtrain.engine.recording.recorded_timeline import timeline_of
from hybridtrain.engine.recording.recorder import KINDS, RecordingServer
from hybridtrain.engine.server.shared_parameters import round_of, step_log_of
from hybridtrain.engine.server.timeline import BarState, Timeline
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worker.makers import last_worker
from hybridtrain.engine.worker.makers.last_worker import PATIENCE_S, LastWorkerMaker
from tests.support.headers import header
from tests.support.served import Served
from tests.worker.test_client import Slow
from tests.worker.test_shared_round import round_of as a_round_of

LOCK_STEP = ({"name": "hybrid"}, {"name": "ssp", "lead": 0}, {"name": "backup", "k": 3})


def recording(folder: Path, policy: Any, worker_updates: bool = False) -> tuple[Served, Any]:
    """A recorded run of three workers; the second result closes and reads its record."""
    writer = Writer(folder / "record.bin", KINDS)
    said = header(3)
    said["requirements"]["whole_rounds"] = True
    writer.tell({"header": said})
    make = partial(RecordingServer, writer, timeline=Timeline(3))
    served = Served(3, make_policy(policy), make=make, worker_updates=worker_updates)

    def read() -> Record:
        writer.close()
        return read_record(folder / "record.bin")

    return served, read


def counted_timeline(served: Served) -> Timeline:
    timeline = served.server.statistics.timeline
    assert timeline is not None, "there is one"
    return timeline


def computed(timeline: Timeline) -> list[tuple[int, float, float]]:
    bars = (bar for bar in timeline.bars if bar.doing is BarState.COMPUTING)
    return sorted((b.worker, round(b.begin_s, 6), round(b.end_s, 6)) for b in bars)


@pytest.mark.parametrize("policy", LOCK_STEP, ids=lambda policy: policy["name"])
def test_a_worker_that_waited_before_its_push_has_computed_as_long_as_it_has(
    tmp_path: Path, policy: Any
) -> None:
    """Worker 2 is slow, and not the last whose push arrives."""
    served, read = recording(tmp_path, policy)
    for begin_s in (0.0, 8.0):
        for worker, after_s, waited_s in ((0, 5.0, 4.0), (2, 7.0, 0.0), (1, 8.0, 6.0)):
            served.now_s = begin_s + after_s
            served.push(worker, 1.0, waited_s=waited_s)
    stats = served.server.statistics.stats()
    assert stats["updates"] == 2
    assert stats["step_s"] == [1.0, 2.0, 7.0]
    assert stats["waiting_share"] == [7 / 8, 6 / 8, 1 / 8]
    assert stats["awaited_share"] == [0.0, 0.0, 1.0]
    record, bars = read(), computed(counted_timeline(served))
    own = record.of_kind("Push")
    assert own["own_s"].tolist() == 2 * [1.0, 7.0, 2.0]
    assert bars == computed(timeline_of(record, 0.0))
    assert bars == [(w, at_s, at_s + own_s) for w, own_s in enumerate((1, 2, 7)) for at_s in (0, 8)]


def test_after_a_round_of_the_workers_all_compute_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, read = recording(tmp_path, "hybrid", worker_updates=True)
    clock = SimpleNamespace(monotonic_ns=lambda: round(1e9 * served.now_s))
    monkeypatch.setattr(shared_round, "time", clock)
    served.server.on(Received(0, GetState(flat=True)))
    shared, log = round_of(served.store), step_log_of(served.store)
    for worker in range(3):
        served.now_s = float(1 + worker)
        log.write(1, worker, LoggedContribution(worker, 0, served.now_s, 4.0, served.now_s))
        shared.come(worker, 1, Arrival(4.0, 4.0), lambda weights: None)
    for worker in range(3):
        served.now_s += 1.0 + worker
        served.push(worker, 1.0)
    own = read().of_kind("Push")
    assert own["own_s"][own["made"] == 0].tolist() == [1.0, 3.0, 6.0]
    assert served.server.statistics.stats()["step_s"] == [1.0, 2.5, 4.5]


def test_a_push_says_how_long_its_worker_has_waited_in_a_round_that_was_called_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [10.0]
    monkeypatch.setattr(last_worker, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def passes(for_s: float) -> None:
        now_s[0] += 0.75 * for_s

    does = lambda *_: True  # noqa: E731
    lent = SimpleNamespace(keep=does, restore=does)
    borrowed: Any = SimpleNamespace(
        groups=lambda: (),
        never=False,
        ready=does,
        takes=does,
        give_up=does,
        server_steps=does,
        lent=lent,
    )
    bells: Any = SimpleNamespace(ring=does, wait=passes)
    line = Slow(99, Released(1), Released(2))
    client = Client(0, 2, line)
    client.steps.choose(LastWorkerMaker(0, a_round_of(2), bells, borrowed))
    for _ in range(2):  # the server makes the second round
        client.push(GradientPush(0, 4.0))
    assert [push.waited_s for push in line.sent] == pytest.approx([1.5 * PATIENCE_S, 0.0])
