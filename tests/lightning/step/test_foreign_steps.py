"""Optimizers and writes that Lightning does not know of, in the midst of a mini-batch."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from hybridtrain.errors import UserError
from tests.lightning.toys import Manual, Regression, distance, fit, make_trainer, regression_data
from tests.picking import by_default


class Hooked(Regression):
    """Hooks of backward step an optimizer for each parameter, or write to it."""

    def __init__(self, writes: str = "step", arms: str = "on_fit_start") -> None:
        super().__init__()
        self.writes = writes
        if arms == "__init__":
            self.arm()
        else:
            setattr(self, arms, self.arm)

    def arm(self) -> None:
        made = {p: torch.optim.SGD([p], lr=0.01) for p in self.parameters()}

        def act(parameter: torch.Tensor) -> None:
            if self.writes == "step":
                made[parameter].step()  # type: ignore[index]
            elif self.writes == "data":
                parameter.data.sub_(0.01 * parameter.grad)  # type: ignore[operator]
            else:
                with torch.no_grad():
                    parameter -= 0.01 * parameter.grad  # type: ignore[operator]
            parameter.grad = None

        for each in self.parameters():
            each.register_post_accumulate_grad_hook(act)

    def configure_optimizers(self) -> None:
        """None: the hooks step."""


class Second(Regression):
    """``training_step`` steps an optimizer that Lightning does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.second = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.net(batch[0]).square().mean().backward()
        self.second.step()
        self.second.zero_grad()
        return super().training_step(batch, batch_idx)


class SecondByHand(Manual, Second):
    """The same, with manual optimization."""


STRATEGIES = ("hybrid", "synchronous", "async", "backup", "ssp", "k_async", "hogwild")
KINDS: dict[str, Any] = {
    "stepped in a hook": Hooked,
    "stepped in a hook of a constructor": lambda: Hooked("step", "__init__"),
    "written in a hook": lambda: Hooked("write"),
    "data written in a hook": lambda: Hooked("data", "__init__"),
    "stepped in training_step": Second,
    "stepped by hand": SecondByHand,
}
SHARED = ("stepped in training_step", "stepped by hand")  # in place, by all workers
CELLS = [(s, kind) for s in STRATEGIES for kind in KINDS if s != "hogwild" or kind not in SHARED]
CHOSEN = [("hybrid", kind) for kind in KINDS] + [("async", "stepped in a hook")]


@pytest.mark.parametrize(("strategy", "kind"), by_default(CELLS, *CHOSEN))
def test_steps_that_each_worker_makes_alone_are_refused(strategy: str, kind: str) -> None:
    with pytest.raises(UserError, match=r"outside of Lightning.* return the optimizer from"):
        fit(strategy, 2, 4, KINDS[kind], max_epochs=1)


@pytest.mark.parametrize("kind", by_default(KINDS, "stepped in a hook"))
@pytest.mark.parametrize("strategy", by_default(("hybrid", "async", "hogwild"), "hybrid"))
def test_one_worker_steps_as_one_device(strategy: str, kind: str) -> None:
    assert distance(trained(strategy, 1, kind), trained("auto", 1, kind)) < 1e-6


def trained(strategy: str, workers: int, kind: str) -> pl.LightningModule:
    """In the order of the data."""
    pl.seed_everything(7, verbose=False)
    module = KINDS[kind]()
    trainer = make_trainer(strategy, workers, max_epochs=1)
    trainer.fit(module, DataLoader(regression_data(), 2))
    return module


class Two(Regression):
    """Lightning's optimizer has one parameter, another optimizer the other, or both have it."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        self.net = torch.nn.Sequential()
        self.lightnings = [self.a, self.b] if both else [self.a]
        self.second = torch.optim.SGD([self.b], lr=1.0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.b.sum().backward()
        self.second.step()
        self.second.zero_grad()
        return self.a.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.lightnings, lr=1.0)


@pytest.mark.parametrize("both", [True, False], ids=["of both optimizers", "of one optimizer"])
def test_workers_that_share_parameters_in_place_step_what_lightnings_optimizer_has(
    both: bool,
) -> None:
    if not both:
        with pytest.raises(UserError, match="Two steps SGD within training_step"):
            fit("hogwild", 2, 4, lambda: Two(both), max_epochs=1)
        return
    module, _ = fit("hogwild", 2, 4, lambda: Two(both), max_epochs=1)
    assert module.b.tolist() == [-12.0, -12.0]


class Looking(Regression):
    """Hooks that change gradients, and steps of an optimizer over other tensors."""

    def __init__(self) -> None:
        super().__init__()
        for each in self.parameters():
            each.register_post_accumulate_grad_hook(self.halve)

    @staticmethod
    def halve(parameter: torch.Tensor) -> None:
        parameter.grad *= 0.5

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        fast = torch.zeros(3, requires_grad=True)
        inner = torch.optim.SGD([fast], lr=0.1)
        fast.sum().backward()
        inner.step()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("strategy", by_default(STRATEGIES, "hybrid"))
def test_hooks_that_change_gradients_and_optimizers_of_other_tensors_are_free(
    strategy: str,
) -> None:
    fit(strategy, 2, 4, Looking, max_epochs=1)
