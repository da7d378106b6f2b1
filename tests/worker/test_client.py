"""The worker's side: a request waits for its answer, a stop for the next boundary."""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import replace

import pytest

from hybridtrain.engine.protocol.messages import (
    Done,
    Draw,
    ExchangePush,
    Gathered,
    LoaderPass,
    Note,
    Paused,
    Push,
    Refused,
    Released,
    Reply,
    Request,
    Row,
    Stop,
    Ticket,
)
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worker.inbox import StopRequested
from hybridtrain.errors import UserError


class Script:
    """A line whose replies are written beforehand."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = deque(replies)
        self.sent: list[Request | Note] = []

    def send(self, message: Request | Note) -> None:
        self.sent.append(message)

    def receive(self) -> tuple[Reply, int | None]:
        return self.replies.popleft(), None

    def ready(self) -> bool:
        return bool(self.replies)


def client(*replies: Reply, n_workers: int = 2) -> tuple[Client, Script]:
    line = Script(*replies)
    return Client(0, n_workers, line), line


def test_a_push_waits_for_its_release_and_brings_the_version() -> None:
    speaker, line = client(Released(7))
    assert speaker.push(Push(0, 4.0, Row((1,)))) == Released(7)
    assert line.sent == [Push(0, 4.0, Row((1,)))]


def test_an_offer_waits_for_the_release_of_the_one_before() -> None:
    speaker, line = client(Released(1), Released(2))
    taken: list[Released] = []
    speaker.pushes.offer(Push(0, 1.0), taken.append)
    assert taken == [] and len(line.sent) == 1, "meanwhile the worker goes on"
    speaker.pushes.offer(Push(0, 2.0), taken.append)
    assert taken == [Released(1)], "its row was not its own before"
    speaker.pushes.settle()
    assert taken == [Released(1), Released(2)]


def test_a_refusal_is_the_users_error() -> None:
    speaker, _ = client(Refused("two of a kind"))
    with pytest.raises(UserError, match="two of a kind"):
        speaker.push(Push(0, 1.0))


def test_a_stop_that_comes_while_waiting_lets_the_step_end_first() -> None:
    speaker, _ = client(Stop(), Released(3))
    assert speaker.push(Push(0, 1.0)) == Released(3)
    with pytest.raises(StopRequested):
        speaker.check_stop()


def test_a_stop_now_means_that_the_answer_will_not_come() -> None:
    speaker, _ = client(Stop(), Stop(now=True))
    with pytest.raises(StopRequested):
        speaker.push(Push(0, 1.0))


def test_a_stop_between_mini_batches_is_found_at_the_boundary_again_and_again() -> None:
    speaker, _ = client(Stop())
    for _ in range(2):
        with pytest.raises(StopRequested):
            speaker.check_stop()


def test_without_a_stop_a_boundary_is_nothing() -> None:
    speaker, _ = client()
    speaker.check_stop()


def test_user_code_that_catches_exceptions_does_not_swallow_a_stop() -> None:
    assert not issubclass(StopRequested, Exception)


def test_a_gathering_brings_all_items_in_order() -> None:
    speaker, _ = client(Gathered((pickle.dumps("a"), pickle.dumps({"b": 1})), (0, 1)))
    assert speaker.gather("t", "a") == ["a", {"b": 1}]


@pytest.mark.parametrize("alone", ["one worker", "the last one"])
def test_a_lone_worker_meets_itself_without_asking(alone: str) -> None:
    speaker, line = client(n_workers=1 if alone == "one worker" else 3)
    if alone != "one worker":
        speaker.group.go_alone()
    assert speaker.gather("t", 5) == [5]
    assert line.sent == []


def test_the_last_worker_is_not_stopped_again_while_it_tidies_up() -> None:
    speaker, _ = client(Stop(), Stop())
    speaker.group.go_alone()
    speaker.check_stop()


def test_a_note_needs_no_answer() -> None:
    speaker, line = client(Done())
    speaker.note(Paused())
    assert line.sent == [Paused()]
    assert len(line.replies) == 1


class Slow(Script):
    """Its reply is there after so many looks."""

    def __init__(self, looks: int, *replies: Reply) -> None:
        super().__init__(*replies)
        self.looks = looks

    def ready(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize(("looks", "wants", "asked"), [(0, 9, 0), (3, 9, 3), (3, 1, 1)])
def test_a_worker_does_what_it_is_given_while_it_waits_for_its_release(
    looks: int, wants: int, asked: int
) -> None:
    times: list[int] = []

    def meanwhile() -> float | None:
        times.append(len(times))
        return 1e-4 if len(times) < wants else None

    speaker = Client(0, 2, Slow(looks, Released(7)))
    speaker.listeners.while_waiting(meanwhile)
    assert speaker.push(Push(0, 4.0)) == Released(7)
    assert len(times) == asked


def ask_of(begins: bool = False, number: int = 0) -> Draw:
    return Draw(LoaderPass(0, 0, number), ((0, 6),), 6, (2, 2), begins=begins)


def test_the_next_mini_batch_is_asked_for_with_a_push_and_not_again() -> None:
    """One conversation a step; the pass ends with a ticket that came with a release, too."""
    first, second, end = Ticket(((0, 2),)), Ticket(((2, 4),)), Ticket(())
    speaker, line = client(first, Released(1, tickets=(second,)), Released(2, tickets=(end,)))
    assert speaker.queue.draw(ask_of(begins=True)) == first
    speaker.push(Push(0, 2.0))
    assert speaker.queue.draw(ask_of()) == second
    speaker.push(Push(0, 2.0))
    assert speaker.queue.draw(ask_of()) == end
    with_next = Push(0, 2.0, draws=(ask_of(),))
    assert line.sent == [ask_of(begins=True), with_next, with_next]


def test_no_mini_batch_is_asked_for_ahead_that_will_not_be_drawn() -> None:
    """After the last, smaller mini-batch; twice for one."""
    speaker, line = client(Ticket(((0, 1),)), Released(1), Released(2))
    speaker.queue.draw(ask_of())
    speaker.push(Push(0, 1.0))
    assert line.sent[-1] == Push(0, 1.0)

    speaker, line = client(
        Ticket(((0, 2),)), Released(1, tickets=(Ticket(((2, 4),)),)), Released(2)
    )
    speaker.queue.draw(ask_of())
    speaker.push(Push(0, 2.0))
    speaker.push(Push(1, 2.0))  # another optimizer, of the same mini-batch
    assert line.sent[-1] == Push(1, 2.0)


def test_a_pass_that_begins_anew_forgets_what_came_ahead() -> None:
    ahead, again = Ticket(((2, 4),)), Ticket(((0, 2),))
    speaker, line = client(Ticket(((0, 2),)), Released(1, tickets=(ahead,)), again)
    speaker.queue.draw(ask_of(begins=True))
    speaker.push(Push(0, 2.0))
    assert speaker.queue.draw(ask_of(begins=True)) == again
    assert line.sent[-1] == ask_of(begins=True)


def test_an_epoch_that_is_left_early_keeps_nothing() -> None:
    """With ``limit_train_batches``, say: neither what came ahead, nor what was to be asked for."""
    ahead = Ticket(((2, 4),))
    speaker, line = client(Ticket(((0, 2),)), Released(1, tickets=(ahead,)), Ticket(((0, 2),)))
    speaker.queue.draw(ask_of(begins=True))
    speaker.push(Push(0, 2.0))
    speaker.queue.draw(ask_of())  # fetched ahead, and never trained on
    line.replies.append(Released(2))
    following = replace(ask_of(begins=True), lap=LoaderPass(0, 1))
    speaker.queue.draw(following)
    speaker.push(Push(0, 2.0))
    assert line.sent[-1] == Push(0, 2.0, draws=(replace(following, begins=False),))


def test_each_of_several_passes_has_its_own_next_mini_batch() -> None:
    one, other = Ticket(((0, 2),)), Ticket(((4, 6),))
    speaker, line = client(one, one, Released(1, tickets=(one, other)))
    speaker.queue.draw(ask_of())
    speaker.queue.draw(ask_of(number=1))
    speaker.push(Push(0, 2.0))
    assert line.sent[-1] == Push(0, 2.0, draws=(ask_of(), ask_of(number=1)))
    assert speaker.queue.draw(ask_of(number=1)) == other
    assert speaker.queue.draw(ask_of()) == one


# ---- what nobody waits for yet ------------------------------------------------------------------


class Slowly(Script):
    """Replies arrive when they are let in."""

    def __init__(self, *replies: Reply) -> None:
        super().__init__(*replies)
        self.there = 0

    def ready(self) -> bool:
        return self.there > 0

    def receive(self) -> tuple[Reply, int | None]:
        self.there -= 1
        return super().receive()


def computing_on(*replies: Reply) -> tuple[Client, Slowly, list[Released], list[str]]:
    """A worker that has offered something, and computes on."""
    line, taken, undone = Slowly(*replies), list[Released](), list[str]()
    speaker = Client(0, 2, line)
    speaker.pushes.offer(
        ExchangePush(0, 1.0, later=True), taken.append, lambda: undone.append("undone")
    )
    return speaker, line, taken, undone


def test_at_a_boundary_a_release_for_later_is_not_waited_for_but_taken() -> None:
    speaker, line, taken, undone = computing_on(Released(4))
    speaker.check_stop()
    assert taken == [] and speaker.steps.offered is not None
    line.there = 1
    speaker.check_stop()
    assert taken == [Released(4)] and speaker.steps.version == 4 and speaker.steps.offered is None
    speaker.pushes.settle()
    assert undone == []


def test_mini_batches_are_drawn_while_a_release_is_under_way() -> None:
    ticket = Ticket(((0, 4),))
    speaker, _, taken, _ = computing_on(ticket)
    draw = Draw(LoaderPass(0, 0), ((0, 8),), 8, (4, 4))
    assert speaker.queue.draw(draw) == ticket and taken == []
    speaker, _, taken, _ = computing_on(Released(1), ticket)
    assert speaker.queue.draw(draw) == ticket and taken == [Released(1)]


@pytest.mark.parametrize(
    ("reply", "error"), [(Stop(now=True), StopRequested), (Refused("no"), UserError)]
)
def test_a_step_whose_release_never_comes_is_undone_at_the_boundary(
    reply: Reply, error: type[BaseException]
) -> None:
    speaker, line, taken, undone = computing_on(reply)
    line.there = 1
    with pytest.raises(error):
        speaker.check_stop()
    assert (taken, undone) == ([], ["undone"])


def test_a_worker_that_stops_waits_for_a_step_that_others_may_have_made() -> None:
    speaker, line, taken, undone = computing_on(Stop(), Released(2))
    line.there = 1
    with pytest.raises(StopRequested):
        speaker.check_stop()
    assert (taken, undone) == ([Released(2)], [])
