"""In lock-step a learning rate that each worker makes of its own losses is worker 0's."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import HybridStrategy
from hybridtrain.errors import UserError
from tests.lightning.toys import make_trainer

N = 24


class Drops(pl.LightningModule):
    """Its gradient is 1, so the weight is the sum of all rates; each worker has its own losses."""

    def __init__(self, plateau: bool, others: bool) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))
        self.idle = torch.nn.Parameter(torch.zeros(1))
        self.plateau, self.others = plateau, others
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        optimizer: Any = self.optimizers()
        group = optimizer.param_groups[0]
        drops = (self.global_rank > 0) == self.others
        if not self.plateau and batch_idx in (1, 4) and drops:
            group["lr"] *= 0.5
        self.rates.append(group["lr"])
        return self.w.sum() + 0 * self.idle.sum() + 0 * batch[0].sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rises = (self.global_rank > 0) == self.others
        epoch = float(self.current_epoch)
        self.log("loss", torch.tensor(epoch if rises else -epoch), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([{"params": [self.w]}, {"params": [self.idle]}], lr=1.0)
        if not self.plateau:
            return optimizer
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "loss"}


@pytest.mark.few(6)
@pytest.mark.filterwarnings("ignore:It is recommended to use")
@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("plateau", [False, True])
@pytest.mark.parametrize("exchange", [None, {"name": "gradient", "compress": "int8"}])
def test_the_rate_of_worker_0_is_applied(
    exchange: Any, plateau: bool, others: bool, workers: int, record: bool, tmp_path: Any
) -> None:
    """By the worker that comes last, and by the server: it steps what is encoded."""
    options: dict[str, Any] = {"record": str(tmp_path)} if record else {}
    strategy = HybridStrategy(**({"exchange": exchange} if exchange else {}), **options)
    module = Drops(plateau, others)
    data = TensorDataset(torch.zeros(N * workers, 1))
    trainer = make_trainer(strategy, workers, max_epochs=4)
    trainer.fit(module, DataLoader(data, 4), DataLoader(TensorDataset(torch.zeros(6, 1)), 1))
    assert len(module.rates) == 4 * N // 4
    assert len({*module.rates}) == 1 if others else len({*module.rates}) > 1
    assert float(module.w) == pytest.approx(-sum(module.rates), rel=1e-5)


class Falls(Drops):
    """As ``Drops``, under automatic optimization alone."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.w.sum() + 0 * self.idle.sum() + 0 * batch[0].sum()


def test_a_rate_that_falls_in_one_worker_cannot_say_when_all_exchange() -> None:
    """Their movements would be of different steps."""
    every = {"then": 4, "at": "first_decay"}
    strategy = HybridStrategy("hybrid", exchange={"name": "movement", "every": every})
    trainer = make_trainer(strategy, 2, max_epochs=4)
    data = DataLoader(TensorDataset(torch.zeros(2 * N, 1)), 4)
    with pytest.raises(UserError, match=r"behind its step \d+, worker \d behind .*sync_dist=True"):
        trainer.fit(Falls(True, False), data, DataLoader(TensorDataset(torch.zeros(6, 1)), 1))
