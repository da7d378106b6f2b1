"""Updates that begin while rows of other hosts are still arriving."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybridtrain.engine.policies import FirstK, WaitForAll
from hybridtrain.engine.protocol.events import Announced, NotArrived, Received, Removed
from hybridtrain.engine.protocol.messages import Clip, Pull
from tests.support.served import Make, Served, push_of, refusals, released

SIZE = 700_000  # elements: several chunks
PATIENCE_S = 60.0


class Rows:
    """Arrive when the test says so."""

    def __init__(self) -> None:
        self.here, self.over = 0, False
        self.asked: set[int] = set()
        self._changed = threading.Condition()

    def wait(self, element: int) -> None:
        with self._changed:
            self.asked.add(element)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.here >= element or self.over, PATIENCE_S)
            if self.here < element:
                raise NotArrived

    def give_up(self) -> None:
        with self._changed:
            self.over = True
            self._changed.notify_all()

    def arrive(self, here: int = SIZE + 64) -> None:
        with self._changed:
            self.here = here
            self._changed.notify_all()

    def until_asked(self) -> None:
        """An update has begun and waits."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.asked, PATIENCE_S)


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def served(optimizer: Make = adam, **options: Any) -> Served:
    torch.manual_seed(0)
    return Served(2, parameters=(torch.randn(SIZE),), optimizers=(optimizer,), **options)


def fill(each: Served, step: int) -> None:
    for worker in (0, 1):
        draw = torch.Generator().manual_seed(10 * step + worker)
        each.store.gradients[worker][torch.float32][:SIZE] = torch.randn(SIZE, generator=draw)


def usual(each: Served, steps: int) -> None:
    for step in range(steps):
        fill(each, step)
        for worker in (0, 1):
            each.server.on(Received(worker, push_of(1.0 + worker)))


def state(each: Served) -> list[torch.Tensor]:
    saved = each.server.optimizers.updates[0].state().parameters
    masters = each.store.masters[torch.float32][:SIZE].clone()
    return [masters, *(saved[0][name] for name in sorted(saved[0]))] if saved else [masters]


def assert_same(one: Served, other: Served) -> None:
    for a, b in zip(state(one), state(other), strict=True):
        assert torch.equal(a, b)


def begun(each: Served, step: int, rows: Rows) -> Any:
    """Worker 0 has pushed, and the row of worker 1 is on its way; returns its push."""
    fill(each, step)
    coming = push_of(2.0)
    each.server.on(Received(0, push_of(1.0)))
    each.server.on(Announced({1: coming}, rows))
    rows.until_asked()
    return coming


def test_an_update_that_begins_early_is_the_same() -> None:
    early, plain = served(), served()
    usual(plain, 3)
    for step in range(3):
        rows = Rows()
        coming = begun(early, step, rows)
        assert early.server.version == step
        rows.arrive()
        assert early.server.on(Received(1, coming)) == released(step + 1, 0, 1)
    assert_same(early, plain)


@pytest.mark.few(2)
@pytest.mark.parametrize("here", [0, SIZE // 2, SIZE + 64])
@pytest.mark.parametrize("step", [0, 2])
def test_an_early_update_is_undone_if_anything_else_happens(step: int, here: int) -> None:
    early, plain = served(), served()
    for each in (early, plain):
        usual(each, step)
    rows = Rows()
    begun(early, step, rows)
    rows.arrive(here)
    assert early.server.on(Received(1, Pull({}))) == released(step, 1)
    assert_same(early, plain)
    for each in (early, plain):
        fill(each, step)
    early.server.on(Received(1, push_of(2.0)))
    for worker in (0, 1):
        plain.server.on(Received(worker, push_of(1.0 + worker)))
    assert_same(early, plain)


def test_a_lost_worker_has_no_part_in_an_early_update() -> None:
    early, plain = served(), served()
    rows = Rows()
    begun(early, 0, rows)
    fill(plain, 0)
    plain.server.on(Received(0, push_of(1.0)))
    rows.arrive(SIZE // 2)
    for each in (early, plain):
        assert each.server.on(Removed(1))[-1:] == released(1, 0)
    assert_same(early, plain)


def test_state_that_is_kept_since_is_undone_as_well() -> None:
    early, plain = served(sgd), served(sgd)
    for step in range(2):  # the second one has momentum
        rows = Rows()
        fill(plain, step)
        begun(early, step, rows)
        rows.arrive()
        early.server._rounds._early._thread.join()  # type: ignore[union-attr]
        early.server.on(Received(1, Pull({})))
        assert_same(early, plain)
        early.server.on(Received(1, push_of(2.0)))
        for worker in (0, 1):
            plain.server.on(Received(worker, push_of(1.0 + worker)))
        for each in (early, plain):
            for worker in (0, 1):
                each.server.on(Received(worker, push_of(1.0, groups=({"momentum": 0.9},))))


@pytest.mark.parametrize("here", [SIZE // 2, SIZE + 64])
def test_masters_that_were_sent_early_and_undone_are_known_to_have_changed(here: int) -> None:
    early = served()
    heard: list[int] = []
    early.store.progress.listen(heard.append)
    rows = Rows()
    begun(early, 0, rows)
    before, number = early.store.moves.n_changes, early.store.progress.read().number
    rows.arrive(here)
    if here > SIZE:
        early.server._rounds._early._thread.join()  # type: ignore[union-attr]
    early.server.on(Received(1, Pull({})))
    assert heard[0] == 0 and early.store.moves.n_changes != before + 1
    assert early.store.progress.read().number != number


CHANGED: dict[str, dict[str, Any]] = {
    "clipping by norm": {"clip": Clip("norm", 1.0)},
    "a veto": {"veto": True},
    "no weight": {"weight": 0.0},
    "writes": {"writes": {0: b"\0" * 4 * SIZE}},
    "averaged": {"averaged": True},
    "encoded": {"encoded": 4},
    "other groups": {"members": ((0,),)},
}


@pytest.mark.parametrize("name", CHANGED)
def test_an_update_that_cannot_be_undone_does_not_begin_before_all_rows_are_here(name: str) -> None:
    each, given = served(), dict(CHANGED[name])
    each.server.on(Received(0, push_of(1.0)))
    each.server.on(Announced({1: push_of(given.pop("weight", 2.0), **given)}, Rows()))
    assert each.server._rounds._early is None


@pytest.mark.parametrize("policy", [lambda: FirstK(1), WaitForAll])
def test_no_update_begins_early_before_all_workers_have_pushed(policy: Callable[[], Any]) -> None:
    each = Served(3, policy(), parameters=(torch.zeros(4),))
    each.server.on(Received(0, push_of(1.0)))
    each.server.on(Announced({1: push_of(2.0)}, Rows()))
    assert each.server._rounds._early is None


def test_the_server_closes_while_rows_are_missing() -> None:
    early, plain = served(), served()
    rows = Rows()
    begun(early, 0, rows)
    early.server.close()
    assert rows.over
    assert torch.equal(state(early)[0], state(plain)[0])


# ---- one row for several workers ----------------------------------------------------------------


@pytest.mark.parametrize("absent", [(), (1,)])
def test_gradients_within_a_mean_have_their_part_in_the_update(absent: tuple[int, ...]) -> None:
    parameters = (torch.zeros(3), torch.zeros(2))
    apart, together = (Served(3, parameters=parameters) for _ in range(2))
    for worker, gradient in enumerate((1.0, 5.0, 2.0)):
        apart.push(worker, gradient, weight=1.0 + worker, absent=() if worker else absent)
    together.push(0, 1.0, absent=absent)
    together.push(1, (2 * 5.0 + 3 * 2.0) / 5, weight=2.0, within=1)
    assert together.push(2, 100.0, weight=3.0, within=1) == released(1, 0, 1, 2)
    for number in (0, 1):
        assert together.value(number) == pytest.approx(apart.value(number))
    counts = [each.server.statistics.stats()["handed_over"] for each in (apart, together)]
    whole, first = 4 * (3 + 2), 4 * (3 + 2 * (not absent))
    assert [each["sent_bytes"] for each in counts] == [first + 2 * whole, first + whole]


def test_a_rule_that_needs_each_gradient_refuses_means() -> None:
    each = Served(2)
    each.server.optimizers.updates[0].merge = object()  # type: ignore[assignment]
    each.push(0, 1.0, within=0)
    reasons = refusals(each.push(1, 1.0, within=0))
    assert all("host_sums was given" in reason for reason in reasons.values())


def test_an_update_that_begins_early_follows_the_first_worker() -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    run, rows = Served(2, parameters=(torch.zeros(64),), optimizers=(sgd,)), Rows()
    coming = push_of(1.0, groups=({"lr": 0.5},))  # worker 1's own plateau
    for worker in (0, 1):
        run.store.gradients[worker][torch.float32].fill_(1.0)
    rows.arrive()
    run.server.on(Received(0, push_of(1.0)))
    run.server.on(Announced({1: coming}, rows))
    run.server.on(Received(1, coming))
    assert run.value() == pytest.approx(-0.1)
    for worker in (0, 1):
        run.push(worker, 1.0)
    assert run.value() == pytest.approx(-0.2)
    run.server.close()
