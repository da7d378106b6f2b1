"""Optimizers that move the masters with what workers bring who train on their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridtrain.engine.updates.named import DelayedNesterov

DRAWN = torch.Generator().manual_seed(11)
MOVEMENTS = [torch.randn(3, dtype=torch.float64, generator=DRAWN) for _ in range(12)]


def moved(optimizer: Any, parameter: torch.nn.Parameter, movements: list[torch.Tensor]) -> Any:
    for movement in movements:
        parameter.grad = movement
        optimizer.step()
    return parameter.detach()


def start() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("buffer", [1, 2, 4])
def test_a_buffer_full_is_one_nesterov_step_with_the_mean(buffer: int) -> None:
    one, other = start(), start()
    delayed = DelayedNesterov([one], lr=0.7, momentum=0.9, buffer=buffer)
    plain = torch.optim.SGD([other], lr=0.7, momentum=0.9, nesterov=True)
    rounds = [MOVEMENTS[n : n + buffer] for n in range(0, 12, buffer)]
    wanted = moved(plain, other, [torch.stack(each).mean(0) for each in rounds])
    torch.testing.assert_close(moved(delayed, one, MOVEMENTS), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("activation", [0.0, 0.1, 0.25])
def test_delayed_nesterov_is_the_rule_as_it_is_published(activation: float) -> None:
    """The momentum of a round comes in with a weight of 1 in all, whatever the activation."""
    rate, beta, n = 0.3, 0.8, 4
    w, m, gathered = (torch.ones(3, dtype=torch.float64), 0.0 * MOVEMENTS[0], 0.0 * MOVEMENTS[0])
    for t, g in enumerate(MOVEMENTS):
        gathered = gathered + g
        if (t + 1) % n == 0:
            m = beta * m + gathered / n
            w = w - rate * ((1 - activation * n + activation) * beta * m + g / n)
            gathered = 0.0 * g
        else:
            w = w - rate * (activation * beta * m + g / n)
    one = start()
    made = DelayedNesterov([one], rate, beta, n, activation)
    torch.testing.assert_close(moved(made, one, MOVEMENTS), w, rtol=0, atol=1e-12)


def test_delayed_nesterov_goes_on_from_a_checkpoint() -> None:
    one, other = start(), start()
    whole = moved(DelayedNesterov([one], buffer=4), one, MOVEMENTS)
    first = DelayedNesterov([other], buffer=4)
    moved(first, other, MOVEMENTS[:6])
    second = DelayedNesterov([other], buffer=4)
    second.load_state_dict(first.state_dict())
    assert torch.equal(moved(second, other, MOVEMENTS[6:]), whole)


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"momentum": 1.0}, {"buffer": 0}, {"buffer": 2.0}, {"activation": 0.5}],
)
def test_options_of_delayed_nesterov_that_make_no_sense_are_refused(
    options: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        DelayedNesterov([start()], **options)
