"""An optimizer travels whole: groups, state, own attributes; parameters only as numbers."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from hybridtrain.engine.updates.serialize import dump, load
from hybridtrain.errors import UserError


def parameters(n: int) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(2, 3)) for _ in range(n)]


def carry(
    optimizer: torch.optim.Optimizer, numbered: list[torch.nn.Parameter]
) -> tuple[torch.optim.Optimizer, list[int], list[torch.nn.Parameter]]:
    """To another process and back, as far as memory is concerned."""
    payload = dump(optimizer, {id(p): n for n, p in enumerate(numbered)})
    others = [torch.nn.Parameter(p.detach().clone()) for p in numbered]
    loaded, numbers = load(payload, others.__getitem__)
    return loaded, numbers, others


def step(optimizer: torch.optim.Optimizer, among: list[torch.nn.Parameter]) -> None:
    for number, parameter in enumerate(among):
        parameter.grad = torch.full_like(parameter, number - 1.5)
    optimizer.step()


def test_groups_keep_their_order_and_hyper_parameters() -> None:
    a, b, c = own = parameters(3)
    original = torch.optim.SGD([{"params": [c, a]}, {"params": [b], "lr": 0.5}], lr=0.1)
    loaded, numbers, others = carry(original, own)
    assert numbers == [2, 0, 1]
    assert type(loaded) is torch.optim.SGD
    assert [group["lr"] for group in loaded.param_groups] == [0.1, 0.5]
    assert loaded.param_groups[0]["params"][0] is others[2]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
def test_state_travels_and_steps_go_on_as_if_nothing_had_happened(kind: Any) -> None:
    own = parameters(3)
    options = {"momentum": 0.9} if kind is not torch.optim.Adam else {"amsgrad": True}
    original = kind([{"params": own[:1]}, {"params": own[1:], "lr": 0.3}], lr=0.1, **options)
    step(original, own)
    loaded, _, others = carry(original, own)
    for _ in range(3):
        step(original, own)
        step(loaded, others)
    assert all(map(torch.equal, own, others))


def test_no_parameter_data_travels() -> None:
    big = torch.nn.Parameter(torch.zeros(1 << 20))
    assert len(dump(torch.optim.SGD([big], lr=0.1), {id(big): 0})) < 4096


def test_a_view_in_the_state_travels_without_the_rest_of_its_storage() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    optimizer.state[parameter]["momentum_buffer"] = torch.ones(1 << 20)[:4]
    payload = dump(optimizer, {id(parameter): 0})
    assert len(payload) < 8192
    loaded, _ = load(payload, lambda _: parameter)
    assert loaded.state[parameter]["momentum_buffer"].tolist() == [1.0] * 4


def double(x: float) -> float:
    return 2 * x


class Restless(torch.optim.SGD):
    """An optimizer with attributes of its own, of the kinds that pickling one would lose."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.calls = 3
        self.average = [torch.ones(2, 3)]
        self.watched = self.param_groups[0]["params"][0]
        self.rule = double

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        self.average[0] += self.watched.detach()
        self.param_groups[0]["lr"] = self.rule(self.param_groups[0]["lr"])
        return super().step(closure)


def test_own_attributes_travel_and_refer_to_the_new_parameters() -> None:
    own = parameters(2)
    loaded, _, others = carry(Restless(own, lr=0.1), own)
    assert isinstance(loaded, Restless)
    step(loaded, others)
    assert loaded.calls == 4
    assert loaded.watched is others[0]
    assert loaded.param_groups[0]["lr"] == 0.2


def test_what_cannot_be_pickled_is_an_error_not_a_loss() -> None:
    own = parameters(1)
    optimizer = Restless(own, lr=0.1)
    optimizer.rule = lambda x: x
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        dump(optimizer, {id(own[0]): 0})


def local_class(factor: int) -> type[torch.optim.SGD]:
    class Local(torch.optim.SGD):
        FACTOR = factor

    return Local


def test_a_class_made_in_a_function_is_found_and_the_latest_of_its_name_is_meant() -> None:
    kinds = [local_class(n) for n in range(3)]
    own = parameters(1)
    loaded, _, _ = carry(kinds[-1](own, lr=0.1), own)
    assert type(loaded) is kinds[-1]


def test_a_class_that_only_the_worker_knows_is_a_user_error() -> None:
    own = parameters(1)
    optimizer = local_class(0)(own, lr=0.1)
    type(optimizer).__qualname__ = "configure_optimizers.<locals>.Mine"
    payload = dump(optimizer, {id(own[0]): 0})
    type(optimizer).__qualname__ = "Forgotten"
    with pytest.raises(UserError, match=r"Mine exists only in the worker.*top level"):
        load(payload, own.__getitem__)


def test_a_scheduler_leaves_nothing_behind_that_could_not_travel() -> None:
    own = parameters(1)
    optimizer = torch.optim.Adam(own, lr=torch.tensor(0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step(optimizer, own)
    scheduler.step()
    loaded, _, others = carry(optimizer, own)
    assert float(loaded.param_groups[0]["lr"]) == pytest.approx(0.05)
    assert float(loaded.param_groups[0]["initial_lr"]) == pytest.approx(0.1)
    step(loaded, others)
    step(optimizer, own)
    assert all(map(torch.equal, own, others))


def test_an_optimizer_that_wraps_another_travels_with_it() -> None:
    class Outer(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    own = parameters(2)
    original = Outer(torch.optim.SGD(own, lr=0.1, momentum=0.9))
    step(original, own)
    loaded, numbers, others = carry(original, own)
    assert numbers == [0, 1]
    step(original, own)
    step(loaded, others)
    assert all(map(torch.equal, own, others))
