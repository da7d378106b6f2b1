"""Gradients that are rounded to bf16 on their way."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from hybridtrain import HybridStrategy
from hybridtrain.engine.memory import Layout, Store
from hybridtrain.errors import UserError
from tests.lightning.toys import Regression, distance, fit, flat, regression_data
from tests.picking import by_default


class Rounds(Regression):
    """Rounds its own gradients, each as soon as it is there."""

    def on_fit_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(rounded)


def rounded(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.bfloat16().float()


ADAM = partial(torch.optim.Adam, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.02, momentum=0.9)


def narrow(**options: Any) -> HybridStrategy:
    return HybridStrategy(transport_dtype="bf16", **options)


@pytest.mark.parametrize("make", by_default([ADAM, SGD], ADAM))
def test_bf16_transport_equals_rounding_gradients_where_they_are_made(make: Any) -> None:
    plain, _ = fit("hybrid", 2, 6, partial(Rounds, make))
    shared, _ = fit(narrow(), 2, 6, partial(Regression, make))
    assert torch.equal(flat(shared), flat(plain))
    wide, _ = fit("hybrid", 2, 6, partial(Regression, make))
    assert 0 < distance(shared, wide) < 0.05


@pytest.mark.parametrize(
    "policy", by_default(["k_batch_sync", "async", {"name": "backup", "k": 1}], "async")
)
def test_bf16_transport_goes_with_every_way_of_waiting(policy: Any) -> None:
    shared, _ = fit(narrow(policy=policy), 1, 6, partial(Regression, ADAM))
    plain, _ = fit(HybridStrategy(policy=policy), 1, 6, partial(Rounds, ADAM))
    assert torch.equal(flat(shared), flat(plain))


class Looks(Regression):
    """Sees the mean, which every worker hands back."""

    def on_after_backward(self) -> None:
        weight = self.net[0].weight.grad
        assert not torch.equal(weight, weight.bfloat16().float())


def test_bf16_transport_rounds_nothing_where_hooks_look_at_the_mean() -> None:
    seen, _ = fit(narrow(), 2, 6, partial(Looks, ADAM))
    plain, _ = fit("hybrid", 2, 6, partial(Looks, ADAM))
    assert torch.equal(flat(seen), flat(plain))


def test_masters_stay_float32() -> None:
    shared, _ = fit(narrow(), 2, 6, partial(Regression, ADAM))
    assert not torch.equal(flat(shared), flat(shared).bfloat16().double())


def test_float64_travels_as_it_is() -> None:
    data = regression_data(48, torch.float64)
    options: dict[str, Any] = {"precision": "64-true"}
    shared, _ = fit(narrow(), 2, 6, partial(Regression, ADAM), data, **options)
    plain, _ = fit("hybrid", 2, 6, partial(Regression, ADAM), data, **options)
    assert torch.equal(flat(shared), flat(plain))


def test_rows_take_half_the_memory_and_all_else_stays() -> None:
    weight = torch.zeros(1000, 1000)
    sizes = [
        Store(Layout.of([("weight", weight)], transport=dtype), 3, True, holding=True).arena.n_bytes
        for dtype in (None, torch.bfloat16)
    ]
    assert sizes[0] - sizes[1] == pytest.approx(3 * 1000 * 1000 * 2, rel=0.01)


class Words(Regression):
    def __init__(self) -> None:
        super().__init__(partial(torch.optim.SparseAdam, lr=0.01))
        self.net = torch.nn.Sequential(torch.nn.Embedding(10, 1, sparse=True))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0].abs().long().clamp(max=9)).square().mean()


def test_unknown_values_and_impossible_combinations_of_transport_dtype_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"transport_dtype='fp8' was given; it must be bf16 or null"
    ):
        HybridStrategy(transport_dtype="fp8")
    with pytest.raises(UserError, match=r"transport_dtype=bf16 was given with correction"):
        fit(narrow(policy="async", correction="dc_asgd"), 2, 6)
    with pytest.raises(UserError, match="workers without a lock send no gradients"):
        fit(narrow(policy="hogwild"), 2, 6)
    with pytest.raises(UserError, match=r"has a sparse gradient.*transport_dtype"):
        fit(narrow(), 2, 6, Words)
