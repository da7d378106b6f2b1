"""A policy that breaks what it has promised in its ``Needs`` is named in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from hybridtrain import HybridStrategy
from hybridtrain.engine.exchanges import begin_policy
from hybridtrain.engine.exchanges.gradient import Gradient
from hybridtrain.engine.policies import Needs
from hybridtrain.engine.protocol.events import Received
from hybridtrain.engine.protocol.facts import (
    Accumulate,
    Apply,
    Drop,
    Fact,
    Order,
    Pushed,
    Ready,
    Release,
)
from hybridtrain.engine.protocol.messages import Begin
from hybridtrain.errors import UserError
from tests.lightning.toys import fit
from tests.picking import by_default
from tests.support.served import Served, refusals, released


@dataclass
class Ordering:
    """Promises ``needs``; each contribution is answered with ``orders`` for its worker."""

    needs: Needs
    orders: Sequence[type] = (Apply, Release)
    only: Sequence[int] | None = None  # answers these workers alone
    seen: list[Fact] = field(default_factory=list)

    def begin(self, n_workers: int) -> Needs:
        return self.needs

    def on(self, fact: Fact) -> Sequence[Order]:
        if isinstance(fact, Ready):
            return [Release((fact.worker,))]
        answers = isinstance(fact, Pushed) and (self.only is None or fact.worker in self.only)
        return [each((fact.worker,)) for each in self.orders] if answers else []


def test_an_update_of_some_under_whole_rounds_is_named_with_those_it_lacks() -> None:
    served = Served(3, Ordering(Needs(whole_rounds=True)))
    (reason,) = refusals(served.push(1, 1.0)).values()
    assert "has promised whole_rounds=True in its Needs, but ordered Apply(workers=(1,))" in reason
    assert "also of [0, 2]" in reason


def test_a_worker_in_a_meeting_is_no_part_of_a_whole_round() -> None:
    served = Served(2, Ordering(Needs(whole_rounds=True)))
    served.gather(0)
    assert served.push(1, 1.0) == released(1, 1)


@pytest.mark.parametrize(
    ("needs", "orders", "words"),
    [
        (Needs(), (Accumulate, Release), "promised no holds=True in its Needs, but ordered Accum"),
        (Needs(), (Drop, Release), "promised no drops_late=True in its Needs, but ordered Drop"),
        (Needs(free=True), (), "promised free=True in its Needs, but did not return [Apply((0,))"),
        (Needs(free=True), (Drop, Release), "promised no drops_late=True"),
        (Needs(True), (Accumulate, Release), "promised no holds=True"),
        (Needs(True), (Drop, Release), "promised no drops_late=True"),
    ],
    ids=["holds", "drops_late", "free", "free drops", "rounds hold", "rounds drop"],
)
def test_an_order_that_was_not_promised_is_named(
    needs: Needs, orders: Sequence[type], words: str
) -> None:
    reasons = refusals(Served(2, Ordering(needs, orders)).push(0, 1.0))
    assert reasons and all(words in reason for reason in reasons.values())


def test_two_workers_at_a_time_under_turns_are_named() -> None:
    served = Served(2, Ordering(Needs(turns=True)))
    assert served.server.on(Received(0, Begin({}))) == released(0, 0)
    (reason,) = refusals(served.server.on(Received(1, Begin({})))).values()
    assert "promised turns=True" in reason and "workers [0, 1] would compute at the same" in reason


@pytest.mark.parametrize(
    "needs",
    [
        {"whole_rounds": True, "turns": True},
        {"whole_rounds": True, "free": True},
        {"whole_rounds": True, "holds": True},
        {"whole_rounds": True, "drops_late": True},
        {"free": True, "turns": True},
        {"free": True, "holds": True},
        {"free": True, "drops_late": True},
        {"everyone": True},
        {"backs_up": True},
        {"gathers": 0},
        {"gathers": 1, "later": (5, 0)},
    ],
    ids=lambda needs: " and ".join(needs),
)
def test_promises_that_contradict_each_other_are_refused_before_the_run(
    needs: dict[str, Any],
) -> None:
    with pytest.raises(
        UserError, match=rf"Ordering.*: begin\(\) returned Needs with {next(iter(needs))}"
    ):
        begin_policy(Ordering(Needs(**needs)), Gradient(), 2)


@pytest.mark.parametrize(
    ("needs", "orders", "words"),
    by_default(
        [
            (Needs(whole_rounds=True), (Apply, Release), "whole_rounds=True"),
            (Needs(), (Accumulate, Release), "no holds=True"),
            (Needs(), (Drop, Release), "no drops_late=True"),
            (Needs(free=True), (), "free=True"),
        ],
        (Needs(whole_rounds=True), (Apply, Release), "whole_rounds=True"),
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_training_ends_with_that_line(needs: Needs, orders: Any, words: str) -> None:
    with pytest.raises(UserError, match=f"has promised {words} in its Needs"):
        fit(HybridStrategy(Ordering(needs, orders)), 2, 4, max_epochs=1)


@pytest.mark.parametrize("promise", ["watches_loss", "asks", "drops_late", "holds"])
def test_a_promise_that_is_not_made_use_of_is_harmless(promise: str) -> None:
    _, trainer = fit(HybridStrategy(Ordering(Needs(**{promise: True}))), 2, 4, max_epochs=1)
    assert trainer.global_step == 12


@pytest.mark.parametrize("gathers", [{"gathers": 3}, {"gathers": 2, "later": (4, 3)}], ids=str)
def test_another_number_of_contributions_changes_the_estimate_alone(gathers: Any) -> None:
    _, trainer = fit(HybridStrategy(Ordering(Needs(**gathers))), 2, 4, max_epochs=1)
    assert trainer.global_step == 12 and trainer.estimated_stepping_batches < 12
