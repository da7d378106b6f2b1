"""A restarted worker has what the others have beside the masters: frozen parameters, groups."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import HybridStrategy
from tests.lightning.toys import flat, make_trainer
from tests.picking import by_default


class Distils(pl.LightningModule):
    """A teacher outside of the optimizer, which is moved by hand behind each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 1)
        self.teacher = nn.Linear(3, 1).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.two(self.one(batch[0])), self.teacher(batch[0]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.teacher.weight.add_(0.1)

    def trained(self) -> list[nn.Parameter]:
        return [*self.one.parameters(), *self.two.parameters()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.trained(), lr=0.05, momentum=0.5)


class Unfreezes(Distils):
    """The first layer is the optimizer's from the start, and frozen in the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.one.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.one.requires_grad_(True)


class Adds(Unfreezes):
    """The first layer gets a group of its own in the second epoch."""

    def trained(self) -> list[nn.Parameter]:
        return list(self.two.parameters())

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            optimizer: Any = self.optimizers()
            optimizer.optimizer.add_param_group({"params": [*self.one.parameters()], "lr": 0.02})


def trained(module: pl.LightningModule, lost: int | None) -> Tensor:
    faults = [] if lost is None else [{"worker": lost, "step": 5, "kind": "kill"}]
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
    pl.seed_everything(7, verbose=False)
    strategy = HybridStrategy("hybrid", on_failure="restart", faults=faults)
    make_trainer(strategy, 2, max_epochs=4).fit(module, DataLoader(TensorDataset(x), 4))
    return flat(module)


class Lazily(Distils):
    """Makes a parameter within its first step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if not hasattr(self, "shift"):
            self.shift = nn.Parameter(torch.zeros(1), requires_grad=False)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "lost"),
    by_default(
        [(kind, lost) for kind in (Distils, Unfreezes, Adds, Lazily) for lost in (0, 1)],
        (Distils, 0),
        (Unfreezes, 1),
        (Adds, 1),
        (Lazily, 1),
    ),
)
def test_a_run_with_a_restarted_worker_ends_with_the_bits_of_an_undisturbed_run(
    module: Any, lost: int
) -> None:
    assert torch.equal(trained(module(), lost), trained(module(), None))
