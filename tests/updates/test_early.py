"""What has arrived of all is stepped before the push; the bits are those of one whole step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from hybridtrain.errors import UserError
from hybridtrain.policies import WaitForAll
from hybridtrain.protocol.early_gradients import GradientsReady
from hybridtrain.protocol.messages import Clip, OptimizerState, Push, Refused, Snapshot
from hybridtrain.protocol.server_events import Received
from hybridtrain.server.server import Server
from hybridtrain.updates import Optimizers
from hybridtrain.updates.thread_pool import Pool
from tests.support.rows import Pair, make_pair

SHAPES = [[(40, 3), (7,)], [(5, 5)]]
ALL = (0, 1, 2)
WEIGHTS = (3.0, 5.0)
MAKE: dict[str, Any] = {
    "adam": partial(torch.optim.Adam, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def make(name: str) -> tuple[Pair, Optimizers]:
    def optimizer(groups: list[list[torch.nn.Parameter]]) -> torch.optim.Optimizer:
        return MAKE[name]([{"params": group} for group in groups])

    pair = make_pair(optimizer, SHAPES, shares=(3 / 8, 5 / 8))
    return pair, Optimizers([pair.update], pair.store, Pool(1))


def fill(pair: Pair, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for worker in (0, 1):
        for slot in pair.store.layout.slots:
            pair.store.gradient(worker, slot).copy_(torch.randn(slot.shape, generator=generator))


def pushes(**said: Any) -> dict[int, Push]:
    return {worker: Push(0, weight, **said) for worker, weight in enumerate(WEIGHTS)}


def say(optimizers: Optimizers, worker: int, *numbers: int, **other: Any) -> None:
    optimizers.arrived(worker, replace(GradientsReady(0, numbers, WEIGHTS[worker]), **other))


@pytest.mark.parametrize("name", MAKE)
def test_step_by_step_in_any_order_it_gives_the_bits_of_whole_steps(name: str) -> None:
    (pair, early), (whole, late) = make(name), make(name)
    orders = [[(0, 2), (1, 0, 1), (0, 1), (1, 2), (0, 0)], [(1, 2), (0, 2)], [(0, 0, 1, 2)]]
    for seed, order in enumerate(orders):
        for each in (pair, whole):
            fill(each, seed)
        for worker, *numbers in order:
            say(early, worker, *numbers)
        if seed == 0:
            assert early.early.stepped
        early.step(pushes())
        late.step(pushes())
        assert not early.early.stepped
        assert all(map(torch.equal, pair.masters(), whole.masters()))


def test_nothing_moves_before_all_have_come() -> None:
    pair, optimizers = make("adam")
    fill(pair, 0)
    before = pair.masters()
    say(optimizers, 0, *ALL)
    assert all(map(torch.equal, pair.masters(), before))
    say(optimizers, 1, 0)
    moved = [not torch.equal(a, b) for a, b in zip(pair.masters(), before, strict=True)]
    assert moved == [True, False, False]


def test_what_is_absent_of_one_is_stepped_with_the_push() -> None:
    (pair, early), (whole, late) = make("adam"), make("adam")
    for each in (pair, whole):
        fill(each, 0)
    say(early, 0, 0, 1)
    say(early, 1, 0, 2)
    assert early.early.stepped
    absent = {0: Push(0, 3.0, absent=(2,)), 1: Push(0, 5.0, absent=(1,))}
    early.step(absent)
    late.step(absent)
    assert all(map(torch.equal, pair.masters(), whole.masters()))


class Own(torch.optim.SGD):
    """A user's, which may keep figures of all parameters together."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_of_an_optimizer_that_may_look_at_all_parameters_nothing_is_stepped_early() -> None:
    MAKE["own"] = partial(Own, lr=0.1)
    pair, optimizers = make("own")
    del MAKE["own"]
    fill(pair, 0)
    before = pair.masters()
    for worker in (0, 1):
        say(optimizers, worker, *ALL)
    assert all(map(torch.equal, pair.masters(), before))
    optimizers.step(pushes())
    assert not any(map(torch.equal, pair.masters(), before))
    optimizers.close()


def test_rates_that_come_with_the_first_announcement_count() -> None:
    (pair, early), (whole, late) = make("sgd"), make("sgd")
    for each in (pair, whole):
        fill(each, 0)
    groups = ({"lr": 0.01}, {"lr": 0.02})
    for worker in (0, 1):
        say(early, worker, *ALL, groups=groups)
    early.step(pushes())
    late.step(pushes(groups=groups))
    assert all(map(torch.equal, pair.masters(), whole.masters()))


BROKEN: list[dict[int, Push]] = [
    {0: Push(0, 3.0), 1: Push(0, 4.0)},
    {0: Push(0, 3.0), 1: Push(0, 0.0)},
    {0: Push(0, 3.0)},
    pushes(clip=Clip("norm", 1.0)),
    pushes(veto=True),
    pushes(writes={0: b""}),
    pushes(groups=({"lr": 1.0}, {})),
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_promise_ends_the_run(broken: dict[int, Push]) -> None:
    pair, optimizers = make("adam")
    fill(pair, 0)
    for worker in (0, 1):
        say(optimizers, worker, 0)
    with pytest.raises(UserError, match=r"worker \d has announced gradients.*overlap_update=false"):
        optimizers.step(broken)


def test_a_promise_that_moved_nothing_may_be_broken() -> None:
    pair, optimizers = make("adam")
    fill(pair, 0)
    say(optimizers, 0, *ALL)
    optimizers.step({0: Push(0, 3.0), 1: Push(0, 0.0)})


def test_a_gradient_that_comes_twice_is_refused() -> None:
    pair, optimizers = make("adam")
    fill(pair, 0)
    say(optimizers, 0, 1)
    with pytest.raises(UserError, match="one gradient twice"):
        say(optimizers, 0, 1)


def test_in_the_middle_of_a_step_there_is_nothing_to_save() -> None:
    pair, optimizers = make("adam")
    server = Server(WaitForAll(), 2)
    server.adopt(pair.store, optimizers)
    fill(pair, 0)

    def answer() -> Any:
        ((_, reply),) = server.on(Received(0, Snapshot(refresh=False)))
        return reply

    assert isinstance(answer(), OptimizerState)
    for worker in (0, 1):
        assert server.on(Received(worker, GradientsReady(0, (0,), WEIGHTS[worker]))) == []
    assert isinstance(answer(), Refused)
    for worker, push in pushes().items():
        server.on(Received(worker, push))
    assert isinstance(answer(), OptimizerState)
    server.close()
