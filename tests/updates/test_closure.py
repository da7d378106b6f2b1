"""Who drives the evaluation, and how a step of several rounds goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridtrain.engine.memory import Layout, Store
from hybridtrain.engine.protocol.events import Received
from hybridtrain.engine.protocol.messages import ReadStats, Released, Snapshot, Stats
from hybridtrain.engine.updates import build_update
from hybridtrain.engine.updates.base import Again, Contribution, Evaluation, StepInput
from hybridtrain.engine.updates.groups import calls_closure, is_torchs, needs_closure
from hybridtrain.engine.updates.per_tensor import ClosureOptimizer
from hybridtrain.engine.updates.thread_pool import Pool
from tests.support.served import Served, refusals

OPTIM = torch.optim


class Plain(OPTIM.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})


class WithoutClosure(Plain):
    def step(self) -> None: ...  # type: ignore[override]


class Ignoring(Plain):
    def step(self, closure: Any = None) -> None: ...


class Calling(Plain):
    def step(self, closure: Any = None) -> None:
        closure()


class Passing(Plain):
    def step(self, *args: Any, **kwargs: Any) -> None:
        Calling.step(self, *args, **kwargs)


class Needing(Plain):
    def step(self, closure: Any) -> None: ...  # type: ignore[override]


class Inheriting(OPTIM.Adam):
    """Torch's arithmetic under another name."""


@pytest.mark.parametrize(
    ("kind", "torchs", "calls", "needs"),
    [
        (OPTIM.LBFGS, True, True, True),
        (OPTIM.SGD, True, False, False),
        (OPTIM.Adam, True, False, False),
        (Inheriting, True, False, False),
        (WithoutClosure, False, False, False),
        (Ignoring, False, False, False),
        (Calling, False, True, False),
        (Passing, False, True, False),
        (Needing, False, True, True),
    ],
)
def test_who_may_call_its_closure_is_seen_from_its_code(
    kind: Any, torchs: bool, calls: bool, needs: bool
) -> None:
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))])
    OPTIM.lr_scheduler.StepLR(optimizer, 1)  # which wraps ``step`` on the instance
    assert is_torchs(optimizer) == torchs
    assert calls_closure(optimizer) == calls
    assert needs_closure(optimizer) == needs


class Thrice(Plain):
    """Steps by the mean of three gradients; writes down the losses."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (p,) = self.param_groups[0]["params"]
        losses = self.state[p]["losses"] = []
        total = torch.zeros_like(p)
        for _ in range(3):
            losses.append(None if (loss := closure()) is None else float(loss))
            total += p.grad
            p.sub_(p.grad)
        p.add_(total * (2 / 3))


def thrice(parameters: list[torch.nn.Parameter]) -> OPTIM.Optimizer:
    return Thrice(parameters)


def again(*workers: int) -> Any:
    return [(worker, Released(0, again=True)) for worker in workers]


def test_a_step_of_several_rounds_counts_once_and_only_at_its_end() -> None:
    served = Served(2, optimizers=[thrice])
    for gradient, expected in ((3.0, -3.0), (6.0, -9.0)):
        assert served.push(0, gradient, loss=1.0, repeatable=True, weight=2.0) == []
        assert served.push(1, gradient, loss=4.0, repeatable=True, weight=1.0) == again(0, 1)
        assert served.value() == expected, "workers evaluate at the point that is tried"
    reason = "an optimizer is in the middle of its step"
    assert refusals(served.server.on(Received(0, Snapshot()))) == {0: reason}
    served.push(0, 9.0, loss=1.0, repeatable=True, weight=2.0)
    assert served.push(1, 9.0, repeatable=True, weight=1.0) == [(w, Released(1)) for w in (0, 1)]
    assert served.value() == -6.0
    (state,) = served.server._rounds.optimizers._updates[0].state().parameters.values()
    assert state["losses"] == [2.0, 2.0, 1.0], "weighted by samples, of those who have one"
    ((_, stats),) = served.server.on(Received(0, ReadStats()))
    assert isinstance(stats, Stats)
    assert (stats.values["samples"], stats.values["updates"]) == (3, 1)
    served.server.close()


def test_no_step_begins_when_all_workers_abstain() -> None:
    served = Served(1, optimizers=[thrice])
    assert served.push(0, 1.0, weight=0.0, repeatable=True) == [(0, Released(1))]
    assert served.value() == 0.0


def test_another_optimizer_cannot_step_in_the_middle() -> None:
    served = Served(1, optimizers=[thrice, thrice])
    assert served.push(0, 1.0, loss=1.0, repeatable=True) == again(0)
    (reason,) = refusals(served.push(0, 1.0, optimizer=1)).values()
    assert "optimizer 1 while optimizer 0 evaluates its closure" in reason
    served.server.close()


def test_gradients_without_a_loss_are_no_evaluation() -> None:
    served = Served(1, optimizers=[thrice])
    assert served.push(0, 99.0, repeatable=True) == again(0)
    assert served.value() == 0.0
    served.server.close()


def test_where_nothing_can_be_repeated_the_closure_returns_what_there_is() -> None:
    served = Served(1, optimizers=[thrice])
    assert served.push(0, 3.0) == [(0, Released(1))]
    served.server.close()


class Moving(Plain):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (p,) = self.param_groups[0]["params"]
        p.data.add_(1.0)  # torch's version counter does not see this
        self.zero_grad()
        closure()
        p.data.sub_(p.grad)


def test_an_optimizer_that_moves_before_it_evaluates_is_given_the_gradient_from_there() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    store = Store(Layout.of([("p", parameter)]), 1, False)
    master = torch.nn.Parameter(store.masters[torch.float32][:3])
    update = build_update(Moving([master]), [0], store, Pool(1))
    assert isinstance(update, ClosureOptimizer)
    store.gradients[0][torch.float32].fill_(5.0)
    own = [Contribution(0, 1.0)]
    first = update.step(StepInput(own, evaluation=Evaluation(1.0, repeatable=True)))
    assert first == Again(cleared=True)
    assert master.tolist() == [1.0] * 3
    store.gradients[0][torch.float32].fill_(2.0)
    assert update.step(StepInput(own, evaluation=Evaluation(0.5, repeatable=True))) is None
    assert master.tolist() == [-1.0] * 3
    update.close()


def test_a_gradient_that_was_kept_does_not_change_with_the_next_evaluation() -> None:
    class Keeping(Plain):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            (p,) = self.param_groups[0]["params"]
            closure()
            first = p.grad
            closure()
            p.sub_(first)

    served = Served(1, optimizers=[lambda parameters: Keeping(parameters)])
    assert served.push(0, 1.0, loss=1.0, repeatable=True) == again(0)
    served.push(0, 7.0, loss=1.0, repeatable=True)
    assert served.value() == -1.0
    served.server.close()
