"""A layer is loaded while it is frozen, then trained: all workers begin with what was loaded."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import HybridStrategy
from tests.lightning.toys import make_trainer
from tests.picking import by_default

# Workers of the local family refuse parameters that come later.
STRATEGIES: list[Any] = ["hybrid", "async", "hogwild", "synchronous"]
STRATEGIES += [{"name": "softsync", "n": 2}, {"name": "ssp", "lead": 1}, {"name": "backup", "k": 1}]


class Grows(pl.LightningModule):
    """The second layer begins as a 1/4, and with ones from the second epoch on, at a rate of 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 1, bias=False)
        nn.init.constant_(self.two.weight, 0.25)
        self.two.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.two.load_state_dict({"weight": torch.ones(1, 3)})
            self.two.requires_grad_(True)
            optimizer: Any = self.optimizers()
            optimizer.optimizer.add_param_group({"params": [*self.two.parameters()], "lr": 0.0})

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.two(self.one(batch[0])), batch[0].sum(1, keepdim=True))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.one.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("policy", "workers"),
    by_default(
        [(policy, workers) for policy in STRATEGIES for workers in (1, 2, 3)],
        ("async", 3),
        ("hogwild", 2),
        ("hybrid", 2),
    ),
    ids=str,
)
def test_what_is_loaded_before_a_layer_is_trained_counts_once(policy: Any, workers: int) -> None:
    if isinstance(policy, dict) and workers == 1:
        policy = {"name": "ssp", "lead": 1}  # the others need more of them
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
    pl.seed_everything(7, verbose=False)
    module, trainer = Grows(), make_trainer(HybridStrategy(policy), workers, max_epochs=3)
    trainer.fit(module, DataLoader(TensorDataset(x), 4))
    assert module.two.weight.tolist() == [[1.0, 1.0, 1.0]]
