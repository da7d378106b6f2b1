"""Settings of torch that hold for a whole process: hooks of all optimizers, the default dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from tests.lightning.toys import Regression, flat, make_trainer, regression_data


class Decays(Regression):
    """An optimizer that the server steps tensor by tensor (True), or in flat pieces."""

    by_tensor = False

    def configure_optimizers(self) -> Any:
        kind = torch.optim.Rprop if self.by_tensor else torch.optim.SGD
        return kind(self.parameters(), lr=0.01)


def trained(module: Any, workers: int) -> torch.Tensor:
    torch.manual_seed(1)
    made = module()
    strategy = HybridStrategy("hybrid", keep_order=True) if workers else "auto"
    trainer = make_trainer(strategy, workers or 1, max_epochs=2)
    size = 12 // max(workers, 1)
    trainer.fit(made, DataLoader(regression_data(24), size))
    return flat(made)


@contextmanager
def clamped() -> Iterator[None]:
    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:  # ahead of the closure
        for group in optimizer.param_groups:
            group["lr"] = 0.005

    def clamp(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.1, 0.1)

    hooks = [register_optimizer_step_pre_hook(halve), register_optimizer_step_post_hook(clamp)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("by_tensor", [False, True])
def test_hooks_of_all_optimizers_run_once_a_step(by_tensor: bool) -> None:
    module = type("Its", (Decays,), {"by_tensor": by_tensor})
    with clamped():
        one, two = trained(module, 0), trained(module, 2)
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)
    assert one.abs().max() <= 0.1 + 1e-6 < trained(module, 0).abs().max()


def test_another_default_dtype_changes_no_update() -> None:
    expected = trained(Decays, 2)
    torch.set_default_dtype(torch.float64)
    try:
        found = trained(type("Float32", (Single,), {}), 2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found.float(), expected.float())


class Single(Decays):
    def __init__(self) -> None:
        torch.set_default_dtype(torch.float32)
        super().__init__()
        torch.set_default_dtype(torch.float64)
