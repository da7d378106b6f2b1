"""What does not go with ``pipe_sgd`` is one line, before a process is started if it can be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridtrain import HybridStrategy
from hybridtrain.engine.policies import OnArrival, PipeSGD, Switch, WaitForAll
from hybridtrain.errors import UserError
from tests.lightning.preflight.test_bad_input import refused
from tests.lightning.toys import Regression, fit

OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a larger delay": (
        {"policy": {"name": "pipe_sgd", "delay": 2}},
        r"pipe_sgd: delay=2 was given; it is 1 .*no device would wait less.*use 1, or policy=ssp",
    ),
    "a negative warm-up": (
        {"policy": {"name": "pipe_sgd", "warm_up": -1}},
        r"warm_up=-1 was given.*whole number from 0 on",
    ),
    "another option": (
        {"policy": {"name": "pipe_sgd", "warmup": 5}},
        r"warmup was given.*did you mean warm_up",
    ),
    "an unknown codec": (
        {"policy": {"name": "pipe_sgd", "compress": "int2"}},
        r"compress='int2' was given.*int8, int4",
    ),
    "a correction": (
        {"policy": "pipe_sgd", "correction": "gap_aware"},
        r"correction=gap_aware was given, but under policy=pipe_sgd.*extrapolate=true, or leave",
    ),
    "writing in place": (
        {"policy": "pipe_sgd", "exchange": "in_place"},
        r"exchange=in_place.* was given with policy=pipe_sgd.*use exchange=gradient, or policy=",
    ),
    "own steps": (
        {"policy": "pipe_sgd", "exchange": "movement"},
        r"exchange=movement.* was given with policy=pipe_sgd.*use exchange=gradient, or policy=",
    ),
    "an update by line searches": (
        {"policy": "pipe_sgd", "update": "lbfgs"},
        r"update=lbfgs was given with exchange=gradient.*use strategy=sandblaster, or let the",
    ),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_an_option_that_does_not_go_with_it_is_refused_before_a_process_starts(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, said = OPTIONS[what]
    with refused(said, monkeypatch):
        fit(HybridStrategy(**given), 2, 4, Regression)


@pytest.mark.parametrize(
    "parts", [(PipeSGD(), OnArrival()), (WaitForAll(), PipeSGD())], ids=["first", "then"]
)
def test_it_is_no_part_of_a_switch(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(r"switch: (first|then)=.*cannot be a part: choose .*hybrid, backup", monkeypatch):
        fit(HybridStrategy(Switch(*parts, at_update=5)), 2, 4, Regression)


class ByHand(Regression):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_a_module_that_steps_by_hand_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    told = r"ByHand has automatic_optimization=False, with policy=pipe_sgd.*or policy=hybrid"
    with refused(told, monkeypatch):
        fit("pipe_sgd", 2, 4, ByHand)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_optimizer_that_evaluates_a_closure_is_refused_before_the_first_step(
    workers: int,
) -> None:
    """Only workers make optimizers, so they have to be started to know."""

    class Searches(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

        def on_train_start(self) -> None:
            raise AssertionError("training has begun")

    with pytest.raises(UserError, match=r"^[^\n]*LBFGS was given.*one update behind.*SGD or Adam"):
        fit("pipe_sgd", workers, 4, Searches)
