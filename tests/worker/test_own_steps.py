"""Steps that a worker makes without asking, and mini-batches that it draws several at a time."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hybridtrain.engine.exchanges import begin_policy, make_exchange
from hybridtrain.engine.memory.counters import MadeSteps
from hybridtrain.engine.policies import make_policy
from hybridtrain.engine.protocol.messages import (
    Draw,
    DrawnBatch,
    LoaderPass,
    MadeStep,
    Push,
    StepRequest,
    Ticket,
)
from hybridtrain.engine.protocol.spans import Spans
from hybridtrain.engine.server.batch_queue import BatchQueue
from hybridtrain.engine.worker.makers import in_place
from hybridtrain.engine.worker.makers.in_place import InPlaceMaker
from hybridtrain.engine.worker.tickets import Tickets

LAP = LoaderPass(0, 0)


def made_steps(n_workers: int) -> MadeSteps:
    return MadeSteps(memoryview(bytearray(8 * MadeSteps.n_words(n_workers))).cast("q"), n_workers)


def counting(worker: int, made: MadeSteps) -> InPlaceMaker:
    store: Any = SimpleNamespace(step_counts=made, private_parameters=False)
    return InPlaceMaker(worker, store)


def cover(n: int, lap: LoaderPass = LAP) -> DrawnBatch:
    return DrawnBatch(lap, ((n, n + 1),))


def draw(n: int, most: int = 1, workers: int = 1, begins: bool = False) -> Draw:
    return Draw(LAP, ((0, n),), n, (1,) * workers, most=most, begins=begins)


def drawn(ticket: Ticket) -> list[Spans]:
    return [ticket.spans, *ticket.more]


# ---- counting -----------------------------------------------------------------------------------


def test_the_total_is_that_of_all_workers_and_the_server() -> None:
    made = made_steps(3)
    made.begin(7)
    made.make(2, covered=1)
    made.make(2, covered=3)
    made.make(0, covered=1)
    made.count()
    assert made.total == 7 + 4
    assert [made.covered(worker) for worker in range(3)] == [1, 0, 3]
    made.begin(100)
    assert made.total == 100 and made.covered(2) == 3


def test_a_step_is_as_old_as_the_others_have_made_it() -> None:
    made = made_steps(2)
    made.begin(5)
    first, second = counting(0, made), counting(1, made)
    for own in (first, second):
        own.asked(covers=1, version=5)
    pushes = []
    for own in (first, first, second):
        assert own.count(StepRequest(0, 1.0), [cover(0)], lambda released: None) == made.total
        pushes.append(own.untold[-1].age)
    assert pushes == [0, 0, 2]
    assert made.total == 8 and made.covered(0) == 3 and made.covered(1) == 2


def test_all_untold_steps_are_told_of_at_once_in_their_order() -> None:
    own = counting(0, made_steps(1))
    for n in range(3):
        own.count(StepRequest(0, 1.0, loss=float(n)), [cover(n)], lambda released: None)
    asked = draw(10)
    push, pending = own.tell((asked,))
    assert [each.loss for each in (*push.former, push)] == [0.0, 1.0, 2.0]
    assert push.draws == pending.draws == (asked,) and pending.made and pending.later
    assert not own.untold


def test_steps_are_told_of_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = counting(0, made_steps(1))
    own.count(Push(0, 1.0), [cover(0)], lambda released: None)
    own.tell(())
    monkeypatch.setattr(in_place, "_TELL_S", 1e9)
    own.count(Push(0, 1.0), [cover(1)], lambda released: None)
    assert own.may_wait and not own.must_tell
    monkeypatch.setattr(in_place, "_TELL_S", 0.0)
    assert not own.may_wait


@pytest.mark.parametrize(
    ("policy", "first"),
    [("hogwild", True), ("async", True), ({"name": "async", "warm_start": 5}, False)],
)
def test_who_counts_what_is_pushed_hears_of_each_step_before_it_is_made(
    policy: Any, first: bool
) -> None:
    """Or worker 0 would make more updates alone than were wanted."""
    wants = begin_policy(make_policy(policy), make_exchange("in_place"), 2)
    assert wants.steps_unasked == first


# ---- drawing ------------------------------------------------------------------------------------


def test_more_is_asked_for_when_half_of_what_came_together_is_begun() -> None:
    tickets, ask = Tickets(0), draw(100)
    tickets.most = 8
    tickets.add(LAP, Ticket(((0, 1),), more=tuple(((n, n + 1),) for n in range(1, 5))))
    wanted = []
    for n in range(5):
        ticket = tickets.take(ask)
        assert ticket is not None and ticket.spans == ((n, n + 1),)
        wanted.append(tickets.wanted)
    assert wanted == [False, False, True, True, True]
    assert tickets.ask() == (replace(ask, most=8),)
    assert tickets.is_under_way(LAP) and not tickets.wanted and tickets.take(ask) is None


def test_behind_the_end_of_a_pass_nothing_is_asked_for() -> None:
    tickets = Tickets(0)
    tickets.add(LAP, Ticket(((0, 1),)))
    tickets.add(LAP, Ticket(()))
    assert tickets.take(draw(1)) == Ticket(((0, 1),)) and not tickets.wanted
    assert tickets.take(draw(1)) == Ticket(()) and not tickets.wanted


def test_a_new_pass_knows_nothing_of_the_former() -> None:
    tickets = Tickets(0)
    tickets.add(LAP, Ticket(((0, 1),), more=(((1, 2),),)))
    tickets.take(draw(9))
    tickets.begin(LoaderPass(0, 1))
    assert not tickets.wanted and tickets.take(draw(9)) is None


def test_a_worker_draws_a_part_of_what_it_would_do_of_the_rest() -> None:
    queue = BatchQueue({0, 1})
    for worker, n_done in ((0, 3), (1, 1)):  # the first is three times as fast
        for n in range(n_done):
            spans = queue.draw(worker, draw(200, workers=2, begins=n == 0)).spans
            queue.settle(worker, (DrawnBatch(LAP, spans),))
    counts = [len(drawn(queue.draw(w, draw(200, most=32, workers=2)))) for w in (0, 1)]
    assert counts == [32, 1 + 164 // 16], "all that it wants, and a quarter of its quarter"


@pytest.mark.parametrize("n", [1, 2, 7, 100, 333])
def test_blocks_become_single_mini_batches_and_nothing_is_drawn_twice(n: int) -> None:
    queue, found, sizes, begins = BatchQueue({0}), [], [], True
    while spans := drawn(queue.draw(0, draw(n, most=32, begins=begins))):
        begins = False
        if spans == [()]:
            break
        for each in spans:
            queue.settle(0, (DrawnBatch(LAP, each),))
        found += spans
        sizes.append(len(spans))
    assert found == [((k, k + 1),) for k in range(n)]
    assert max(sizes) <= 32 and sizes[-1] == 1
    assert n < 300 or sizes.count(32) > 3


def test_what_is_made_and_not_told_of_is_behind_the_parameters() -> None:
    covered = {0: 0, 1: 0}
    queue = BatchQueue({0, 1}, covered=covered.__getitem__)
    spans = [queue.draw(0, draw(9, workers=2, begins=n == 0)).spans for n in range(4)]
    queue.draw(1, draw(9, workers=2, begins=True))
    own = MadeStep(0, 1.0, covers=(DrawnBatch(LAP, spans[0]),))
    covered[0] = 3
    assert [each.spans for each in queue.untold(0)] == spans[:3]
    queue.done(0, own, 1.0)
    assert [each.spans for each in queue.untold(0)] == spans[1:3]
    left = queue.unseen()[LAP]
    assert all(s not in left for s in spans[:3]) and sum(b - a for a, b in left) == 6
    queue.lost(0)
    covered[0] = 0
    assert queue.untold(0) == []


def test_what_was_asked_and_made_is_not_taken_for_what_is_untold() -> None:
    covered = {0: 0}
    queue = BatchQueue({0}, covered=covered.__getitem__)
    spans = [queue.draw(0, draw(9, begins=n == 0)).spans for n in range(3)]
    queue.done(0, StepRequest(0, 1.0, covers=(DrawnBatch(LAP, spans[0]),)), 1.0)
    covered[0] = 2  # the one it has asked for, and another
    assert [each.spans for each in queue.untold(0)] == spans[1:2]
