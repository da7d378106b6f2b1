"""What a policy orders when a worker joins is done, and what cannot be done is said."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hybridtrain.errors import UserError
from hybridtrain.policies import Needs
from hybridtrain.protocol.events import Admitted, Removed
from hybridtrain.protocol.facts import Apply, Fact, Joined, Order, Pushed, Release, SetTimer
from hybridtrain.protocol.messages import Released
from hybridtrain.server.server import Server
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


def test_what_follows_from_a_workers_coming_back_happens() -> None:
    served = Served(2, Company())
    assert served.server.wake_at_s == 7.0
    assert served.push(0, 1.0) == []
    served.server.on(Removed(1))
    replies = dict(served.server.on(Admitted(1)))
    assert set(replies) == {0, 1}
    assert all(isinstance(reply, Released) for reply in replies.values())


def test_nobody_can_be_released_before_training_begins() -> None:
    with pytest.raises(UserError, match=r"Company.*Release.*when worker 0 joined"):
        Server(Company((Release((0,)),)), 2)
