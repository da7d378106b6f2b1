"""An update that does not end at once: what stands behind it waits, and nothing waits for ever."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrain.policies import FirstK, OnArrival, Policy, WaitForAll, make_policy
from hybridtrain.protocol.messages import Done, Gone, Install, Refused, Released, Share, Stopped
from hybridtrain.protocol.server_events import (
    Admitted,
    BrokenOff,
    Completed,
    Received,
    Removed,
    Restarted,
    UpdateEnded,
)
from hybridtrain.recording import read_record
from hybridtrain.recording.record_file import Writer
from hybridtrain.recording.recorder import KINDS, RecordingServer, Stamp
from hybridtrain.recording.replayer import Replayer
from hybridtrain.server.rounds import Replies
from hybridtrain.server.server import Server
from hybridtrain.updates import OptimizerFailed, Pending, Stepped
from hybridtrain.updates.thread_pool import Pool
from hybridtrain.util.turn_taking import Ended
from hybridtrain.worlds.in_process import ThreadWorld
from hybridtrain.worlds.virtual.training_task import TimedOptimizers
from tests.support.bodies import descend
from tests.support.headers import header
from tests.support.served import Make, Served, gathered, refusals, released, sgd, stopped


def timed(n: int, policy: Policy | None = None, *given: Any) -> Served:
    """A server whose updates end when the test says so. ``given``: optimizers, and parameters."""
    optimizers, parameters = given or ((sgd,), (torch.zeros(3),))
    served = Served(n, policy, parameters, optimizers)
    updates = served.server.optimizers.updates
    served.server.adopt(served.store, TimedOptimizers(updates, served.store, Pool(1)))
    return served


def ended(served: Served) -> Replies:
    """The update that is under way ends."""
    ticket = served.server.under_way
    assert ticket is not None
    return served.server.on(UpdateEnded(ticket))


def test_nobody_is_released_and_nothing_moves_before_the_update_has_ended() -> None:
    served = timed(2)
    assert served.server.under_way is None
    assert served.push(0, 2.0) == []
    assert served.push(1, 4.0) == [], "and nobody is refused, though all wait"
    assert (served.value(), served.server.statistics.version) == (0.0, 0)
    assert served.server.on(UpdateEnded(77)) == [], "of an update that nobody waits for"
    assert ended(served) == released(1, 0, 1)
    assert (served.value(), served.server.under_way) == (-3.0, None)


def test_updates_are_made_one_after_the_other_in_the_order_of_the_pushes() -> None:
    served = timed(3, OnArrival())
    for worker in range(3):
        assert served.push(worker, 10.0**worker) == []
    for worker, value in enumerate((-1.0, -11.0, -111.0)):
        assert ended(served) == released(worker + 1, worker)
        assert served.value() == value
    assert served.server.under_way is None
    assert served.server.statistics.ages == {0: 1, 1: 1, 2: 1}


def test_a_row_may_be_written_again_while_its_update_is_under_way() -> None:
    served = timed(1)
    served.push(0, 1.0)
    served.store.gradient(0, served.layout.slots[0]).fill_(99.0)
    ended(served)
    assert served.value() == -1.0


def test_the_part_of_a_worker_that_leaves_counts_if_its_update_has_begun() -> None:
    served = timed(3, OnArrival())
    for worker in range(3):
        served.push(worker, 10.0**worker)
    assert served.server.on(Removed(0)) == []
    assert served.server.on(Removed(1)) == [], "its push stands behind, and is lost with it"
    assert ended(served) == [], "who was released is gone; the update of worker 2 has begun"
    assert ended(served) == released(2, 2)
    stats = served.server.statistics.stats()
    assert (served.value(), stats["samples"], stats["dropped"]) == (-101.0, 2, [0, 1, 0])


def test_a_worker_that_comes_back_meanwhile_is_not_released_by_its_former_push() -> None:
    served = timed(2, OnArrival())
    served.push(0, 1.0)
    served.server.on(Removed(0))
    assert served.server.on(Admitted(0)) == released(0, 0)
    assert served.push(0, 10.0) == []
    assert ended(served) == [], "that was the update of its former push"
    assert ended(served) == released(2, 0)
    assert served.value() == -11.0


def test_a_worker_that_is_admitted_anew_is_not_released_twice() -> None:
    served = timed(2, OnArrival())
    served.push(0, 1.0)
    served.push(1, 10.0)
    assert served.server.on(Admitted(1)) == released(0, 1), "what it did before does not count"
    assert ended(served) == released(1, 0)
    assert (served.value(), served.server.under_way) == (-1.0, None)


def restarted(served: Served, at_once: bool) -> list[Replies]:
    """Worker 1 has pushed and is started again, before or after the update ends."""
    told = [served.push(0, 1.0), served.push(1, 3.0)]
    told += [] if at_once else [ended(served)]
    told += [served.server.on(Removed(1, announced=True, returns=True))]
    told += [served.server.on(Restarted(1))]
    return told


def test_the_place_of_a_worker_that_is_restarted_is_kept() -> None:
    """In lock-step its push lies in its row; the same as if the update had ended at once."""
    served = timed(2)
    told = restarted(served, at_once=True)
    assert told == [[], [], [(0, Gone(1, 0, for_now=True))], []]
    assert ended(served) == released(1, 0, 1)
    assert served.value() == -2.0


def test_a_free_worker_that_is_restarted_meanwhile_begins_at_the_version_before() -> None:
    served = timed(2, OnArrival())
    served.push(0, 1.0)
    served.server.on(Removed(0, announced=True, returns=True))
    served.server.on(Restarted(0))
    served.server.on(Received(0, Share(served.layout)))
    assert (0, Done()) in served.server.on(Received(0, Install()))
    assert float(served.store.parameter(0, served.layout.slots[0])[0]) == 0.0
    assert ended(served) == [], "it has not pushed"
    assert served.push(0, 10.0) == []
    assert ended(served) == released(2, 0)
    assert served.value() == -11.0
    assert served.server.statistics.ages == {0: 1, 1: 1}, "it has read version 0"


@pytest.mark.parametrize("policy", [WaitForAll(), OnArrival()])
def test_when_the_run_is_broken_off_the_update_is_not_made(policy: Policy) -> None:
    served = timed(2, policy)
    served.push(0, 1.0)
    served.push(1, 1.0)
    ticket = served.server.under_way
    assert ticket is not None
    assert served.server.on(BrokenOff()) == stopped(0, 1)
    assert served.server.on(UpdateEnded(ticket)) == []
    assert (served.value(), served.server.statistics.version) == (0.0, 0)
    assert served.server.statistics.stats()["samples"] == 0


def test_a_worker_that_stops_does_not_hold_up_the_others() -> None:
    served = timed(3, OnArrival())
    served.push(0, 1.0)
    served.push(1, 10.0)
    assert served.server.on(Received(2, Stopped())) == []
    assert [ended(served), ended(served)] == [released(1, 0), released(2, 1)]


def test_in_lock_step_who_waits_for_the_update_hears_that_another_has_stopped() -> None:
    served = timed(2)
    assert served.gather(1) == []
    assert served.push(0, 1.0) == []
    ticket = served.server.under_way
    assert ticket is not None, "worker 1 sits in a meeting, so nobody waits for it"
    assert served.server.on(Received(1, Stopped())) == stopped(0)
    assert served.server.on(UpdateEnded(ticket)) == []
    assert served.value() == 0.0


def test_a_meeting_ends_while_an_update_is_under_way() -> None:
    served = timed(3, OnArrival())
    served.push(0, 1.0)
    assert served.gather(1) == served.gather(2) == []
    assert ended(served) == released(1, 0)
    assert served.gather(0) == gathered([b""] * 3, 0, 1, 2)
    assert isinstance(served.server.on(Completed(0)), list)


def test_the_last_update_is_the_last_one_though_others_stand_behind_it() -> None:
    served = timed(2, OnArrival())
    served.server._rounds.last = 1
    served.push(0, 1.0)
    served.push(1, 10.0)
    assert ended(served) == [(0, Released(1)), (1, Released(1, counted=False))]
    assert (served.value(), served.server.under_way) == (-1.0, None)


def test_a_push_after_the_last_update_does_not_count_for_what_the_worker_has_pushed_before() -> (
    None
):
    served = timed(2, OnArrival())
    served.server._rounds.last = 1
    served.push(0, 1.0)
    served.server.on(Removed(0))
    served.server.on(Admitted(0))
    served.push(0, 10.0)
    assert ended(served) == [(0, Released(1, counted=False))]


def test_contributions_for_several_optimizers_end_as_one_update() -> None:
    parts: tuple[Make, ...] = (lambda p: sgd(p[:1]), lambda p: sgd(p[1:]))
    served = timed(2, FirstK(2, "use", True), parts, (torch.zeros(3), torch.zeros(3)))
    assert served.push(0, 1.0, optimizer=0) == released(0, 0), "put aside"
    assert served.push(1, 10.0, optimizer=1) == []
    assert served.push(0, 100.0, optimizer=0) == [], "put aside when that has ended"
    assert (served.value(0), served.value(1)) == (0.0, 0.0)
    assert ended(served) == [*released(1, 1), *released(1, 0)]
    assert (served.value(0), served.value(1), served.server.under_way) == (-1.0, -10.0, None)
    assert served.server.statistics.ages == {0: 2}


class Failing(TimedOptimizers):
    """Whose steps fail when they are to end."""

    def step(self, pushes: Any, number: int | None = None) -> Stepped | Pending:
        return Pending(self._fail)

    def _fail(self) -> Stepped:
        raise OptimizerFailed("optimizer 0 raised") from ValueError("no")


def test_a_step_that_fails_at_its_end_ends_the_run_for_all_who_wait() -> None:
    served = timed(2, OnArrival())
    served.server.adopt(served.store, Failing(served.server.optimizers.updates))
    served.push(0, 1.0)
    served.push(1, 1.0)
    assert refusals(ended(served)) == {0: "optimizer 0 raised", 1: "optimizer 0 raised"}
    assert isinstance(served.server.failure, ValueError)
    assert served.server.under_way is None


# ---- whatever happens ---------------------------------------------------------------------------

NAMES: list[Any] = ["hybrid", "async", {"name": "k_async", "k": 2}, {"name": "ssp", "lead": 1}]
NAMES += [{"name": "backup", "k": 2}, {"name": "k_batch_async", "k": 2}]


@pytest.mark.parametrize("given", NAMES, ids=str)
def test_every_push_is_answered_whatever_happens_meanwhile(given: Any) -> None:
    """Workers push, leave and come back in any order; in the end all meet."""
    for seed in range(40):
        chance, served = random.Random(f"{seed}/{given}"), timed(3, make_policy(given))
        busy, there, pushed = set(range(3)), set(range(3)), 0  # who computes, and who is there

        def hear(replies: Replies, busy: set[int] = busy, there: set[int] = there) -> None:
            for worker, reply in replies:
                assert not isinstance(reply, Refused), reply
                assert worker in there, "nobody hears what is gone"
                if isinstance(reply, Released):
                    assert worker not in busy, "nobody is released twice"
                    busy.add(worker)

        for _ in range(60):
            choice = chance.random()
            if served.server.under_way is not None and choice < 0.4:
                hear(ended(served))
            elif busy and (choice < 0.8 or not there - busy):
                worker = chance.choice(sorted(busy))
                busy.discard(worker)
                pushed += 1
                hear(served.push(worker, 1.0))
            elif len(there) > 1 and choice < 0.9:
                worker = chance.choice(sorted(there))
                there.discard(worker)
                busy.discard(worker)
                hear(served.server.on(Removed(worker)))
            elif away := sorted(set(range(3)) - there):
                there.add(away[0])
                hear(served.server.on(Admitted(away[0])))
        meeting = set[int]()
        while meeting != there:
            assert busy - meeting or served.server.under_way, "nobody is left to free the others"
            for worker in sorted(busy - meeting):
                meeting.add(worker)
                hear(served.gather(worker))
            if served.server.under_way is not None:
                hear(ended(served))
        stats = served.server.statistics.stats()
        assert stats["samples"] + sum(stats["dropped"]) == pushed, "each counted or was dropped"
        served.server.close()


# ---- records ------------------------------------------------------------------------------------


def recorded(path: Path, seed: int) -> Any:
    """Two workers, whose updates end at any time; what they have come to."""
    chance, writer = random.Random(seed), Writer(path, KINDS)
    writer.tell({"header": header(2)})
    server = RecordingServer(writer, make_policy("async"), 2)
    world = ThreadWorld(server, 2, 1, lambda worker: False)
    world.start([partial(descend, n_steps=4)] * 2)
    asks = {0, 1}
    while asks or server.under_way is not None:
        if server.under_way is not None and (not asks or chance.random() < 0.5):
            replies = server.on(UpdateEnded(server.under_way))
        else:
            worker = chance.choice(sorted(asks))
            asks.discard(worker)
            word = world.next(worker)
            over = isinstance(word, Ended)
            replies = server.on(Completed(worker) if over else Received(worker, word))  # type: ignore[arg-type]
        world.answer(replies)
        asks |= {worker for worker, _ in replies}
    results = [world.result(worker) for worker in range(2)]
    world.close()
    server.close()
    return results


def test_the_end_of_an_update_is_recorded_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridtrain.server.server.Optimizers", TimedOptimizers)
    results = [recorded(tmp_path / f"{seed}.bin", seed) for seed in range(3)]
    assert results[0] != results[1], "the order matters"
    for seed, result in enumerate(results):
        record = read_record(tmp_path / f"{seed}.bin")
        kinds = [event.kind for event in record.events()]
        assert kinds.count("UpdateEnded") == kinds.count("Push") == 8
        stamp = Stamp()
        server = Server(make_policy("async"), 2, clock=stamp)
        replayer = Replayer(record, server, stamp, lambda said: None)
        report, again = replayer.run([partial(descend, n_steps=4)] * 2)
        assert (report.parted, report.updates, again) == ("", 8, result)
        server.close()
