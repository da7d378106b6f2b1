"""Gradients accumulated by hand, where workers share an epoch's last mini-batch unevenly."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from tests.lightning.toys import Regression, flat, make_trainer, regression_data


class ByHand(Regression):
    """Steps and clears behind every N-th mini-batch; the rest goes into the next epoch."""

    def __init__(self, every: int, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.automatic_optimization, self.every = False, every

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.manual_backward((self.net(x) - y).square().mean() / self.every)
        if (batch_idx + 1) % self.every == 0:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def trained(workers: int, n: int, every: int, optimizer: Any, size: int) -> torch.Tensor:
    pl.seed_everything(7, verbose=False)
    module = ByHand(every, optimizer).double()
    loader = DataLoader(regression_data(n, torch.float64), batch_size=size // workers, shuffle=True)
    make_trainer("hybrid", workers, max_epochs=3).fit(module, loader)
    return flat(module)


@pytest.mark.few(4)
@pytest.mark.parametrize("n", [25, 27, 32, 37])
@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_w_workers_are_one_with_mini_batches_w_times_as_large(
    n: int, every: int, workers: int, kind: Any
) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = kind(parameters, lr=0.01)
        return made

    mine, alone = (trained(w, n, every, optimizer, 8) for w in (workers, 1))
    assert torch.allclose(mine, alone, rtol=0, atol=1e-11)
