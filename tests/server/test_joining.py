"""What a policy orders when a worker joins is done, and what cannot be done is said."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hybridtrain.engine.policies import Needs
from hybridtrain.engine.protocol.events import Admitted, Received, Removed, Restarted
from hybridtrain.engine.protocol.facts import Apply, Fact, Joined, Order, Pushed, Release, SetTimer
from hybridtrain.engine.protocol.messages import Gather, Gathered, Gone, Install, Released
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.errors import UserError
from tests.support.served import Served


class Company:
    """Nobody goes on before another one joins; wants to be woken from the beginning."""

    def __init__(self, at_first: Sequence[Order] = (SetTimer(7.0),)) -> None:
        self.at_first, self.waiting = at_first, list[int]()

    def begin(self, n_workers: int) -> Needs:
        return Needs(whole_rounds=False)

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Pushed(worker):
                self.waiting.append(worker)
                return (Apply((worker,)),)
            case Joined() if self.waiting:
                free, self.waiting = tuple(self.waiting), []
                return (Release(free),)
            case Joined():
                return self.at_first
        return ()


def test_what_a_policy_orders_when_a_worker_comes_back_is_carried_out() -> None:
    served = Served(2, Company())
    assert served.server.wake_at_s == 7.0
    assert served.push(0, 1.0) == []
    served.server.on(Removed(1))
    replies = dict(served.server.on(Admitted(1)))
    assert set(replies) == {0, 1}
    assert all(isinstance(reply, Released) for reply in replies.values())


def test_nobody_can_be_released_before_training_begins() -> None:
    with pytest.raises(UserError, match=r"Company.*Release.*worker 0 does not wait"):
        ParameterServer(Company((Release((0,)),)), 2)


def test_in_lock_step_a_worker_that_comes_is_waited_for_from_the_next_meeting_that_admits() -> None:
    served = Served(2)
    server, meets = served.server, Received(0, Gather("who begins", b"", admits=True))
    server.on(Removed(1, announced=True))
    server.on(Removed(1, returns=True))
    assert dict(served.push(0, 1.0)) == {0: Released(1)}  # in the middle of an epoch
    assert server.on(meets) == [(0, Gone(1, 1, for_now=True)), (0, Gathered((b"",), (0,), False))]
    assert served.push(0, 1.0) == []
    server.on(Restarted(1))
    server.on(Received(1, Install()))
    assert dict(served.push(1, 3.0)) == {0: Released(2), 1: Released(2)}
    assert served.value() == -3.0  # -1, then the mean -2


def test_a_worker_that_is_lost_before_a_meeting_admits_it_is_not_waited_for() -> None:
    served = Served(2)
    for event in (Removed(1, announced=True), Removed(1, returns=True), Removed(1)):
        served.server.on(event)
    served.server.on(Received(0, Gather("who begins", b"", admits=True)))
    assert dict(served.push(0, 1.0)) == {0: Released(1)}


def test_who_comes_back_hears_who_is_away() -> None:
    served = Served(3)
    for worker in (1, 2):  # worker 1 is not there to be told of worker 2
        served.server.on(Removed(worker, announced=True, returns=True))
    served.server.on(Restarted(1))
    replies = served.server.on(Received(1, Install()))
    assert [reply for worker, reply in replies if worker == 1 and isinstance(reply, Gone)] == [
        Gone(2, 0, for_now=True)
    ]
