"""The server's decisions, without processes: one request in, replies out."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from hybridtrain.engine.memory import Arena, Layout
from hybridtrain.engine.policies import BoundedStaleness, OnArrival, RoundRobin, WaitForAll
from hybridtrain.engine.protocol.events import BrokenOff, Completed, Received, Removed
from hybridtrain.engine.protocol.messages import (
    Begin,
    Clip,
    Draw,
    DrawnBatch,
    Gone,
    Install,
    LoaderPass,
    OptimizerState,
    Paused,
    Pull,
    Push,
    ReadStats,
    Released,
    Resumed,
    Share,
    Snapshot,
    Stats,
    Stop,
    Stopped,
    Ticket,
)
from hybridtrain.engine.server.rounds import Replies
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.updates.groups import plain
from hybridtrain.engine.updates.serialize import dump
from hybridtrain.errors import UserError
from tests.support.served import Served, gathered, refusals, released, sgd, stopped

GROUP = {"lr": 1.0}


def stats(served: Served) -> dict[str, Any]:
    ((_, reply),) = served.server.on(Received(0, ReadStats()))
    assert isinstance(reply, Stats)
    return reply.values


def test_what_the_leader_writes_before_a_further_install_reaches_all_copies_and_hosts() -> None:
    """A search for a learning rate puts the weights back, and training begins anew."""
    served = Served(2, OnArrival(), [torch.zeros(4, 2)])
    store, slot = served.store, served.layout.slots[0]
    store.moves.note([0], {0: np.array([1])})  # from here on copies are brought up to date by rows
    for worker in range(2):
        store.refresh(worker)
    before = store.moves.n_changes  # by which other hosts know that they lack masters
    store.master(slot).fill_(7.0)
    payload = dump(sgd(served.parameters), {id(served.parameters[0]): 0})
    for worker, install in enumerate([Install((payload,)), Install()]):
        served.server.on(Received(worker, install))
    assert store.moves.n_changes > before
    for worker in range(2):
        assert torch.equal(store.parameter(worker, slot), store.master(slot))


# ---- rounds -------------------------------------------------------------------------------------


def test_a_round_applies_the_mean_once_and_then_lets_all_go() -> None:
    served = Served(3)
    assert served.push(2, 3.0) == []
    assert served.push(0, 1.0) == []
    assert served.value() == 0.0, "nothing moves while somebody computes"
    assert served.push(1, 2.0) == released(1, 0, 1, 2)
    assert served.value() == -2.0


def test_the_mean_is_weighted_by_samples() -> None:
    served = Served(2)
    served.push(0, 1.0, weight=1.0)
    served.push(1, 5.0, weight=3.0)
    assert served.value() == -4.0


def test_who_abstains_has_no_share_and_is_released_with_the_others() -> None:
    served = Served(3)
    served.push(0, float("nan"), weight=0.0)
    served.push(1, 2.0)
    assert served.push(2, 4.0) == released(1, 0, 1, 2)
    assert served.value() == -3.0


def test_when_all_abstain_the_round_ends_without_a_step() -> None:
    momentum = partial(torch.optim.SGD, lr=1.0, momentum=0.9)
    served = Served(2, optimizers=[momentum])
    served.push(0, 1.0, weight=0.0)
    assert served.push(1, 1.0, weight=0.0) == released(1, 0, 1)
    assert served.value() == 0.0


def test_what_an_abstaining_worker_says_of_hyper_parameters_is_heard() -> None:
    served = Served(2)  # a worker tells a change only once
    served.push(0, 1.0, weight=0.0, groups=({"lr": 0.5},))
    served.push(1, 1.0, weight=0.0, groups=({"lr": 0.5},))
    served.push(0, 1.0)
    served.push(1, 1.0)
    assert served.value() == -0.5


def test_clipping_is_that_of_a_worker_that_counts() -> None:
    served = Served(2)
    served.push(0, 0.0, weight=0.0)  # skipped its step, and so has not come to clip
    served.push(1, 7.0, clip=Clip("value", 2.0))
    assert served.value() == -2.0


def test_a_parameter_that_nobody_used_stays() -> None:
    served = Served(2, parameters=[torch.zeros(2), torch.zeros(5)])
    served.push(0, 1.0, absent=(1,))
    served.push(1, 3.0, absent=(0, 1))
    assert (served.value(0), served.value(1)) == (-0.5, 0.0)


def test_several_optimizers_are_stepped_by_number() -> None:
    parameters = [torch.zeros(2), torch.zeros(2)]
    served = Served(
        2, parameters=parameters, optimizers=[lambda p: sgd(p[:1]), lambda p: sgd(p[1:])]
    )
    served.push(0, 1.0, optimizer=1, weight=8.0)
    served.push(1, 1.0, optimizer=1, weight=8.0)
    assert (served.value(0), served.value(1)) == (0.0, -1.0)
    served.push(0, 1.0, weight=8.0, samples=0.0, follows=True)
    served.push(1, 1.0, weight=8.0, samples=0.0, follows=True)
    assert (served.value(0), served.value(1)) == (-1.0, -1.0)
    assert stats(served)["samples"] == 16, "a mini-batch that two optimizers use is counted once"


def test_stepping_different_optimizers_in_one_round_is_refused_for_all() -> None:
    served = Served(3, optimizers=[sgd, sgd])
    served.push(0, 1.0, optimizer=0)
    reasons = refusals(served.push(1, 1.0, optimizer=1))
    assert reasons.keys() == {0, 1}
    assert "worker 1 steps optimizer 1 while others step optimizer 0" in reasons[0]
    assert served.push(2, 1.0) == stopped(2), "and the run is over"
    assert served.value() == 0.0


def test_free_running_workers_may_step_different_optimizers() -> None:
    served = Served(2, OnArrival(), optimizers=[sgd, sgd])
    assert served.push(0, 1.0, optimizer=0) == released(1, 0)
    assert served.push(1, 1.0, optimizer=1) == released(2, 1)


@pytest.mark.parametrize("number", [-1, 1])
def test_an_optimizer_that_nobody_knows_is_refused(number: int) -> None:
    served = Served(2)
    served.push(0, 1.0)
    assert refusals(served.push(1, 1.0, optimizer=number)).keys() == {0, 1}


# ---- groups that change in mid-run --------------------------------------------------------------


def test_a_parameter_joins_its_optimizer_in_mid_run_and_the_others_keep_their_state() -> None:
    served = Served(2, parameters=[torch.zeros(3), torch.zeros(2)], optimizers=[only_first])
    (whole,) = plain(only_first(served.parameters))
    for worker in (0, 1):
        served.push(worker, 1.0)
    for worker in (0, 1):
        served.push(worker, 1.0, groups=(whole, whole | {"lr": 0.1}), members=((0,), (1,)))
    assert served.value(0) == -(1.0 + 1.5), "its momentum was kept"
    assert served.value(1) == pytest.approx(-0.1)


def only_first(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters[:1], lr=1.0, momentum=0.5)


def test_in_lock_step_groups_must_change_in_the_same_step_of_all_workers() -> None:
    served = Served(2, parameters=[torch.zeros(3), torch.zeros(2)], optimizers=[only_first])
    assert served.push(1, 1.0) == []
    reasons = refusals(served.push(0, 1.0, groups=({"lr": 1.0},), members=((0, 1),)))
    assert reasons.keys() == {0, 1}
    assert "optimizer 0 differ between worker 0 and worker 1" in reasons[0]


def test_free_running_workers_may_learn_of_new_groups_one_after_another() -> None:
    served = Served(2, OnArrival(), [torch.zeros(3), torch.zeros(2)], optimizers=[only_first])
    (whole,) = plain(only_first(served.parameters))
    told: dict[str, Any] = {"groups": (whole | {"momentum": 0.0},), "members": ((0, 1),)}
    served.push(0, 1.0, **told)
    assert (served.value(0), served.value(1)) == (-1.0, -1.0)
    served.push(1, 1.0)  # does not know of the second parameter, and has no gradient of it
    assert (served.value(0), served.value(1)) == (-2.0, -1.0)
    served.push(1, 1.0, **told)
    assert (served.value(0), served.value(1)) == (-3.0, -2.0)


# ---- meetings -----------------------------------------------------------------------------------


def test_a_meeting_gives_everybodys_payload_in_the_order_of_workers() -> None:
    served = Served(3)
    assert served.gather(2, payload=b"c") == served.gather(0, payload=b"a") == []
    assert served.gather(1, payload=b"b") == gathered([b"a", b"b", b"c"], 0, 1, 2)


def test_whoever_waits_in_a_meeting_is_not_waited_for_in_a_round() -> None:
    served = Served(2)  # worker 1 has fewer mini-batches
    for step in range(1, 3):
        served.push(0, 1.0)
        assert served.push(1, 1.0) == released(step, 0, 1)
    assert served.gather(1, "end of epoch") == []
    assert served.push(0, 1.0) == released(3, 0)
    assert served.gather(0, "end of epoch") == gathered([b"", b""], 0, 1)
    assert served.push(0, 1.0) == [], "after the meeting worker 1 is expected again"
    assert served.push(1, 3.0) == released(4, 0, 1)
    assert served.value() == -5.0


def test_who_comes_to_the_meeting_last_completes_the_round_of_the_others() -> None:
    served = Served(3)
    served.push(0, 1.0)
    served.push(2, 3.0)
    assert served.gather(1) == released(1, 0, 2)
    assert served.value() == -2.0


def test_waiting_in_different_places_is_refused_for_all_who_wait() -> None:
    served = Served(3)
    served.push(0, 1.0)
    served.gather(1, "barrier")
    reasons = refusals(served.gather(2, "metric"))
    assert reasons.keys() == {0, 1, 2}
    assert "worker 2 waits in 'metric' while worker 1 waits in 'barrier'" in reasons[0]


def test_different_parameters_are_refused_for_all_with_the_worker_named() -> None:
    server = ParameterServer(WaitForAll(), 3)
    layouts = [Layout.of([("w", torch.zeros(n))]) for n in (4, 4, 5)]
    for worker in (2, 0):
        assert server.on(Received(worker, Share(layouts[worker]))) == []
    reasons = refusals(server.on(Received(1, Share(layouts[1]))))
    assert reasons.keys() == {0, 1, 2}
    assert "worker 2 has other parameters than worker 0 (w (5,) torch" in reasons[1]
    assert ", not w (4,) torch.float32)" in reasons[1]


def test_parameters_too_large_for_the_machine_are_refused_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(n_bytes: int, unused: object) -> Arena:
        raise UserError("too large")

    server = ParameterServer(WaitForAll(), 2)
    layout = Layout.of([("w", torch.zeros(4))])
    server.on(Received(0, Share(layout)))
    monkeypatch.setattr(Arena, "create", refuse)
    assert refusals(server.on(Received(1, Share(layout)))) == {0: "too large", 1: "too large"}


def test_an_optimizer_that_must_drive_is_refused_where_workers_run_freely() -> None:
    served = Served(2, OnArrival())
    optimizer = torch.optim.LBFGS(served.parameters)
    payload = dump(optimizer, {id(p): n for n, p in enumerate(served.parameters)})
    served.server.on(Received(0, Install((payload,))))
    reasons = refusals(served.server.on(Received(1, Install())))
    assert reasons.keys() == {0, 1}
    assert "LBFGS" in reasons[0] and "strategy=hybrid" in reasons[0]


def test_a_meeting_that_a_finished_worker_would_have_to_attend_is_refused() -> None:
    served = Served(3)
    served.gather(1)
    assert refusals(served.server.on(Completed(0))).keys() == {1}
    served = Served(3)
    assert served.server.on(Completed(0)) == []
    reason = refusals(served.gather(2))[2]
    assert "worker 0 has finished while worker 2 waits" in reason


# ---- lost workers -------------------------------------------------------------------------------


def test_a_lost_worker_is_not_waited_for_and_its_push_does_not_count() -> None:
    served = Served(3)
    served.push(1, 100.0)
    served.push(0, 1.0)
    assert served.server.on(Removed(1)) == []
    assert served.push(2, 3.0) == released(1, 0, 2)
    assert served.value() == -2.0


def test_the_loss_of_the_last_missing_worker_ends_the_round() -> None:
    served = Served(2)
    served.push(0, 1.0)
    assert served.server.on(Removed(1)) == released(1, 0)


def test_the_loss_of_the_last_missing_worker_ends_the_meeting() -> None:
    served = Served(3)
    served.gather(0, payload=b"a")
    served.gather(2, payload=b"c")
    assert served.server.on(Removed(1)) == gathered([b"a", b"c"], 0, 2)


def test_who_is_lost_in_a_meeting_is_neither_answered_nor_expected_again() -> None:
    served = Served(3)
    served.gather(1, payload=b"b")
    assert served.server.on(Removed(1)) == []
    served.gather(0, payload=b"a")
    assert served.gather(2, payload=b"c") == gathered([b"a", b"c"], 0, 2)
    served.push(0, 1.0)
    assert served.push(2, 1.0) == released(1, 0, 2)


def test_rows_keep_their_workers_numbers_when_one_was_lost_before_sharing() -> None:
    server = ParameterServer(WaitForAll(), 3)
    server.on(Removed(0))
    layout = Layout.of([("w", torch.zeros(4))])
    server.on(Received(1, Share(layout)))
    assert [worker for worker, _ in server.on(Received(2, Share(layout)))] == [1, 2]
    assert server.store is not None
    server.store.gradient(2, layout.slots[0]).fill_(1.0)


def test_all_workers_may_be_lost_without_an_answer_or_an_update() -> None:
    served = Served(2)
    served.push(0, 1.0)
    served.server.on(Removed(0))
    assert served.server.on(Removed(1)) == []
    assert served.value() == 0.0


# ---- stopping -----------------------------------------------------------------------------------


def test_a_stopped_worker_frees_those_who_wait_for_it_in_a_round() -> None:
    served = Served(3)
    served.push(0, 1.0)
    assert served.server.on(Received(2, Stopped())) == stopped(0)
    assert served.push(1, 1.0) == stopped(1), "the round can no longer be a whole one"
    assert served.value() == 0.0


def test_a_stopped_worker_frees_those_who_wait_for_it_in_a_meeting() -> None:
    served = Served(3)
    served.gather(1)
    assert served.server.on(Received(0, Stopped())) == stopped(1)
    assert served.gather(2) == stopped(2)


def test_nothing_is_applied_when_the_stopped_leave_one_after_another() -> None:
    served = Served(3)
    served.push(0, 1.0)
    served.server.on(Received(1, Stopped()))
    assert served.server.on(Removed(1)) == []
    assert served.server.on(Removed(2)) == [], "worker 0's push was given up with the round"
    assert served.server.on(Removed(0)) == []
    assert served.value() == 0.0


def test_free_running_workers_finish_their_step_after_a_stop() -> None:
    served = Served(2, OnArrival())
    assert served.server.on(Received(0, Stopped())) == []
    assert served.push(1, 1.0) == released(1, 1)
    assert served.gather(1) == [(1, Stop(now=True))], "but nobody will come to meet it"


def test_a_worker_that_has_stopped_can_still_save_a_checkpoint() -> None:
    served = Served(2, OnArrival())
    served.server.on(Received(0, Stopped()))
    ((worker, reply),) = served.server.on(Received(0, Snapshot()))
    assert (worker, type(reply)) == (0, OptimizerState)
    assert served.server.on(Received(0, Pull())) == [(0, Released(0))]


# ---- reading ------------------------------------------------------------------------------------


def momentum(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)


@pytest.mark.parametrize("make", [momentum, partial(torch.optim.Adam, lr=0.1)])
def test_a_snapshot_is_what_torch_would_save_with_parameters_of_the_same_version(make: Any) -> None:
    served = Served(1, OnArrival(), [torch.zeros(16), torch.zeros(4, 8)], optimizers=[make])
    alone = [torch.nn.Parameter(p.detach().clone()) for p in served.parameters]
    optimizer = make(alone)
    for gradient in (1.0, -2.0):
        served.push(0, gradient)
        for parameter in alone:
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
    ((_, reply),) = served.server.on(Received(0, Snapshot()))
    assert isinstance(reply, OptimizerState)
    (saved,) = torch.load(io.BytesIO(reply.payload), weights_only=False)
    state = saved.parameters
    fresh = make([torch.nn.Parameter(p.detach().clone()) for p in alone])
    fresh.load_state_dict({**optimizer.state_dict(), "state": state})
    for index, entry in optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            torch.testing.assert_close(state[index][name], value)
    for slot, parameter in zip(served.layout.slots, alone, strict=True):
        torch.testing.assert_close(served.store.parameter(0, slot), parameter.detach())


def test_who_is_released_reads_the_newest_and_nobody_else() -> None:
    served = Served(2, OnArrival())
    (slot,) = served.layout.slots
    served.push(0, 1.0)
    assert served.store.parameter(0, slot)[0] == -1.0
    assert served.store.parameter(1, slot)[0] == 0.0
    served.push(1, 1.0)
    assert served.store.parameter(1, slot)[0] == -2.0
    assert served.store.parameter(0, slot)[0] == -1.0


def test_a_users_write_to_parameters_adds_its_change_to_masters_that_have_moved() -> None:
    served = Served(2, OnArrival())
    (slot,) = served.layout.slots
    served.push(0, 1.0)
    served.store.take(1, {0: torch.full((3,), 5.0).numpy().tobytes()})  # who has read 0
    assert served.value() == 4.0
    assert served.store.parameter(1, slot)[0] == 5.0, "with which it goes on computing"


def test_what_all_write_alike_behind_a_meeting_counts_once_and_behind_the_next_one_again() -> None:
    served = Served(2, OnArrival())
    for value in (5.0, 7.0):
        served.gather(0)
        served.gather(1)
        served.push(0, 1.0)  # the masters are not what the other has read
        written = {0: torch.full((3,), value).numpy().tobytes()}
        for worker in (1, 0):
            served.server.on(Received(worker, Pull(written, alike=True)))
        assert served.value() == value - 1.0


def test_pulling_brings_only_the_own_copy_up_to_date() -> None:
    served = Served(2, OnArrival())
    (slot,) = served.layout.slots
    served.push(0, 1.0)
    assert served.store.parameter(1, slot)[0] == 0.0
    assert served.server.on(Received(1, Pull())) == [(1, Released(1))]
    assert served.store.parameter(1, slot)[0] == -1.0


def test_mini_batches_are_drawn_from_one_queue_and_what_the_lost_left_is_drawn_again() -> None:
    served = Served(2, OnArrival())
    wanted = Draw(LoaderPass(0, 0), ((0, 3),), 3, (1, 1))

    def draw(worker: int) -> Replies:
        return served.server.on(Received(worker, wanted))

    assert draw(1) == [(1, Ticket(((0, 1),)))]
    assert draw(0) == [(0, Ticket(((1, 2),)))]
    served.server.on(Removed(1))
    assert draw(0) == [(0, Ticket(((0, 1),)))]
    assert draw(0) == [(0, Ticket(((2, 3),)))]
    assert draw(0) == [(0, Ticket(()))]


def test_a_mini_batch_that_is_asked_for_with_a_push_comes_with_the_release() -> None:
    """The same as if it were asked for when the release has come."""
    wanted = Draw(LoaderPass(0, 0), ((0, 5),), 5, (1, 1))
    first = (DrawnBatch(wanted.lap, ((0, 1),)),)
    tickets = []
    for ahead in (True, False):
        served = Served(2, OnArrival())
        ask = Received(0, wanted)
        served.server.on(ask)
        push = Push(0, 1.0, covers=first, draws=(wanted,) if ahead else ())
        ((_, reply),) = served.server.on(Received(0, push))
        assert isinstance(reply, Released)
        ((_, apart),) = served.server.on(ask) if not ahead else [(0, None)]
        tickets.append(reply.tickets[0] if ahead else apart)
        unseen = served.server.membership.queue.unseen()
        assert unseen == {wanted.lap: ((1, 5),)}, "drawn, and not trained on"
        served.server.on(Removed(0))
        assert served.server.on(Received(1, wanted)) == [(1, Ticket(((1, 2),)))], "it goes back"
    assert tickets == [Ticket(((1, 2),))] * 2


def test_who_waits_for_its_release_has_drawn_nothing_yet() -> None:
    served = Served(2, WaitForAll())
    wanted = Draw(LoaderPass(0, 0), ((0, 5),), 5, (1, 1))
    assert served.server.on(Received(0, Push(0, 1.0, draws=(wanted,)))) == []
    assert served.server.on(Received(1, wanted)) == [(1, Ticket(((0, 1),)))]
    replies = dict(served.server.on(Received(1, Push(0, 1.0))))
    assert replies == {0: Released(1, tickets=(Ticket(((1, 2),)),)), 1: Released(1)}


def test_a_snapshot_tells_what_of_the_queue_is_not_behind_its_version() -> None:
    served = Served(2, OnArrival())
    lap = LoaderPass(0, 0)
    for worker in (0, 1):
        served.server.on(Received(worker, Draw(lap, ((0, 6),), 6, (2, 2))))
    ((_, state),) = served.server.on(Received(0, Snapshot()))
    assert isinstance(state, OptimizerState) and state.unseen == {lap: ((0, 6),)}
    served.push(1, 1.0, covers=(DrawnBatch(lap, ((2, 4),)),))
    ((_, state),) = served.server.on(Received(0, Snapshot()))
    assert isinstance(state, OptimizerState) and state.version == 1
    assert state.unseen == {lap: ((0, 2), (4, 6))}


def test_a_push_that_waits_for_others_has_not_been_seen_yet() -> None:
    served, lap = Served(2), LoaderPass(0, 0)
    served.server.on(Received(0, Draw(lap, ((0, 4),), 4, (2, 2))))
    served.push(0, 1.0, covers=(DrawnBatch(lap, ((0, 2),)),))
    ((_, state),) = served.server.on(Received(1, Snapshot()))
    assert isinstance(state, OptimizerState) and state.unseen == {lap: ((0, 4),)}
    served.push(1, 1.0)
    ((_, state),) = served.server.on(Received(1, Snapshot()))
    assert isinstance(state, OptimizerState) and state.unseen == {lap: ((2, 4),)}


def test_the_figures_tell_who_waited_for_whom() -> None:
    served = Served(2)
    for at_s in (0.0, 10.0):
        served.now_s = at_s + 2.0
        served.push(0, 1.0, weight=4.0)
        served.now_s = at_s + 8.0
        served.push(1, 1.0, weight=4.0)
        served.server.on(Received(0, Paused()))
        served.now_s = at_s + 10.0
        served.server.on(Received(0, Resumed()))
    figures = stats(served)
    assert figures["updates"] == 2
    assert figures["waiting_share"] == [0.75, 0.0]
    assert figures["samples_per_s"] == 1.0
    assert figures["staleness"] == {"mean": 0.0, "max": 0, "histogram": {0: 4}}


def test_the_figures_tell_how_stale_free_running_gradients_were() -> None:
    served = Served(2, OnArrival())
    for worker in (0, 0, 0, 1):
        served.push(worker, 1.0)
    assert stats(served)["staleness"] == {"mean": 0.75, "max": 3, "histogram": {0: 3, 3: 1}}
    assert stats(served)["waiting_share"] == [0.0, 0.0]


# ---- the example of DeepSpeech's document -------------------------------------------------------


def half_h_w_squared(policy: Any) -> Served:
    w = torch.tensor([1.25, -3.0, 0.5], dtype=torch.float64)
    make = partial(torch.optim.SGD, lr=0.125)
    return Served(2, policy, [w], optimizers=[make])


def push_gradient(served: Served, worker: int, at: torch.Tensor, h: float) -> None:
    """The gradient of f(W) = ½hW², as the worker sees W."""
    (slot,) = served.layout.slots
    served.store.gradient(worker, slot).copy_(h * at)
    assert served.server.on(Received(worker, Push(0, 1.0))) != []


def test_two_overlapping_async_batches_add_the_second_change_at_the_wrong_point() -> None:
    eta, h = 0.125, 0.5  # powers of two: float64 is exact here
    served = half_h_w_squared(OnArrival())
    (slot,) = served.layout.slots
    w = served.store.master(slot).clone()
    seen = [served.store.parameter(worker, slot).clone() for worker in range(2)]  # both read W
    for worker in (1, 0):
        push_gradient(served, worker, seen[worker], h)
    delta = -eta * h * w
    overlapping = served.store.master(slot)
    assert torch.equal(overlapping, w + delta + delta)
    sequential = w * (1 - eta * h) ** 2
    assert torch.equal(sequential - overlapping, (eta * h) ** 2 * w)


def test_one_device_at_a_time_gives_the_sequential_result() -> None:
    eta, h = 0.125, 0.5
    served = half_h_w_squared(OnArrival())
    (slot,) = served.layout.slots
    w = served.store.master(slot).clone()
    for worker in (0, 1):  # worker 1 reads after worker 0 has been applied
        served.server.on(Received(worker, Pull()))
        push_gradient(served, worker, served.store.parameter(worker, slot), h)
    assert torch.equal(served.store.master(slot), w * (1 - eta * h) ** 2)


def test_nobody_is_blocked_by_a_worker_that_has_stopped_where_workers_run_freely() -> None:
    run = Served(2, BoundedStaleness(lead=1))
    for _ in range(2):
        replies = run.push(0, 1.0)
    assert replies == [], "too far ahead"
    assert run.server.on(Received(1, Stopped(broke=True))) == released(2, 0)
    assert run.push(1, 1.0) == stopped(1), "too late"


def test_the_turn_of_a_worker_that_has_stopped_goes_to_the_next() -> None:
    run = Served(2, RoundRobin())
    assert run.server.on(Received(0, Begin())) == released(0, 0)
    assert run.server.on(Received(1, Begin())) == []
    assert run.server.on(Received(0, Stopped())) == released(0, 1)


@pytest.mark.parametrize("policy", [WaitForAll(), BoundedStaleness(lead=1)])
def test_no_worker_is_waited_for_once_the_end_of_a_run_is_broken_off(policy: Any) -> None:
    run = Served(2, policy)
    for _ in range(2):
        replies = run.push(0, 1.0)
        if not replies:
            break
    assert run.server.on(BrokenOff()) == stopped(0)
    assert run.push(1, 1.0) == stopped(1) and run.gather(1) == stopped(1)


def test_the_others_hear_of_a_removed_worker_where_that_is_announced() -> None:
    def news(**how: bool) -> Replies:
        return Served(3).server.on(Removed(1, **how))

    assert news() == []
    assert news(announced=True) == [(0, Gone(1, 0)), (2, Gone(1, 0))]
    for_now = Gone(1, 0, for_now=True)
    assert news(announced=True, returns=True) == [(0, for_now), (2, for_now)]
