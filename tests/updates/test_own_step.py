"""A worker's own optimizer steps with the engine that the masters have, and looks as it did."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from hybridtrain.engine.updates.kernels.choice import own_step

OPTIM = torch.optim
Make = Callable[..., OPTIM.Optimizer]
MOMENTUM = partial(OPTIM.SGD, lr=0.1, momentum=0.9, nesterov=True)


class Seen:
    """Which engine was asked for, step by step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[OPTIM.Optimizer]) -> None:
        self.engines: list[Any] = []
        step: Any = kind.step

        def watched(optimizer: Any, closure: Any = None) -> Any:
            self.engines.append(optimizer.param_groups[0]["fused"])
            return step.__wrapped__(optimizer, closure)

        watched.hooked = True  # type: ignore[attr-defined]
        watched.__wrapped__ = watched  # type: ignore[attr-defined]
        monkeypatch.setattr(kind, "step", watched)


def parameters() -> list[torch.nn.Parameter]:
    drawn = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(n, 16, generator=drawn)) for n in (40, 1)]


def stepped(make: Make, step: Callable[[Any], None], gradients: Any) -> Any:
    """Three steps; the parameters, and what the optimizer would save."""
    made = parameters()
    optimizer = make(made)
    for number in range(3):
        for parameter, gradient in zip(made, gradients(number), strict=True):
            parameter.grad = gradient
        step(optimizer)
    return made, optimizer.state_dict()


def dense(number: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(number)
    return [torch.randn(n, 16, generator=drawn) for n in (40, 1)]


def other_order(number: int) -> list[torch.Tensor]:
    return [gradient.t().contiguous().t() for gradient in dense(number)]


def sparse(number: int) -> list[torch.Tensor]:
    return [gradient.to_sparse(1) for gradient in dense(number)]


def late(number: int) -> list[torch.Tensor | None]:
    """The second parameter has no gradient in the first step."""
    first, second = dense(number)
    return [first, second if number else None]


def check_equal(one: Any, other: Any) -> None:
    assert all(map(torch.equal, one[0], other[0]))
    assert one[1]["param_groups"] == other[1]["param_groups"]
    states = one[1]["state"], other[1]["state"]
    assert states[0].keys() == states[1].keys()
    for mine, wanted in zip(states[0].values(), states[1].values(), strict=True):
        assert list(mine) == list(wanted)
        assert all(map(torch.equal, mine.values(), wanted.values()))


@pytest.mark.parametrize("make", [partial(OPTIM.Adam, lr=0.1), partial(OPTIM.AdamW, lr=0.1)])
def test_an_optimizer_without_a_chosen_engine_has_the_bits_of_fused_and_saves_no_choice(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, saved = stepped(partial(make, fused=True), lambda o: o.step(), dense)
    for group in saved["param_groups"]:
        group["fused"] = None
    kind: Any = make.func  # type: ignore[attr-defined]
    seen = Seen(monkeypatch, kind)
    check_equal(stepped(make, own_step, dense), (params, saved))
    assert seen.engines == [True] * 3


@pytest.mark.parametrize(
    ("make", "gradients", "engines"),
    [
        (MOMENTUM, dense, [True] * 3),
        (MOMENTUM, late, [True, None, True]),  # torch's own fails in the second step
        (MOMENTUM, other_order, [None] * 3),  # ... and here it would be wrong
        (partial(OPTIM.SGD, lr=0.1), sparse, [None] * 3),
        (partial(OPTIM.Adam, lr=0.1), other_order, [None] * 3),
        (partial(OPTIM.Adam, lr=0.1, fused=False), dense, [False] * 3),
        (partial(OPTIM.Adam, lr=0.1, foreach=True), dense, [None] * 3),
    ],
    ids=["sgd", "later", "order", "sparse", "adam order", "chosen", "foreach"],
)
def test_every_other_optimizer_has_the_bits_of_torchs_own_engine(
    make: Make, gradients: Any, engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stepped(make, lambda o: o.step(), gradients)
    kind: Any = make.func  # type: ignore[attr-defined]
    seen = Seen(monkeypatch, kind)
    check_equal(stepped(make, own_step, gradients), expected)
    assert seen.engines == engines


def test_double_precision_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the masters are: there is no fused pass over them, either."""
    seen = Seen(monkeypatch, OPTIM.Adam)
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    parameter.grad = torch.ones_like(parameter)
    own_step(OPTIM.Adam([parameter]))
    assert seen.engines == [None]


def test_a_step_that_raises_leaves_the_groups_as_they_were() -> None:
    made = parameters()
    optimizer = OPTIM.Adam(made, lr=0.1)
    made[0].grad = torch.ones(40, 16)
    optimizer.state[made[0]] = {"step": "none"}
    with pytest.raises(KeyError):
        own_step(optimizer)
    assert optimizer.param_groups[0]["fused"] is None
