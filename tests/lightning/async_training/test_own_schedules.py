"""A worker's own optimizer has the rate that plain torch has after as many steps of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from tests.lightning.step.test_last_exchange import DELAYED, NESTEROV
from tests.lightning.toys import Regression, make_trainer, regression_data
from tests.picking import by_default

MOVEMENT, LR = {"name": "movement", "every": 4}, 0.05
SCHEMES: dict[str, dict[str, Any]] = {
    "local_sgd": {"policy": "hybrid", "exchange": MOVEMENT},
    "post_local_sgd": {
        "policy": "hybrid",
        "exchange": {"name": "movement", "every": {"then": 4, "at": 3}},
    },
    "diloco": {"policy": "hybrid", "exchange": MOVEMENT, "update": NESTEROV},
    "streaming_diloco": {"policy": "hybrid", "exchange": {"name": "streaming", "every": 6}},
    "async_diloco": {"policy": "grace", "exchange": MOVEMENT, "update": DELAYED},
    "easgd": {"policy": "async", "exchange": {"name": "elastic", "every": 4}},
    "downpour": {"policy": "async", "exchange": {"name": "accumulated", "n_push": 3}},
    "downpour, overlapped": {
        "policy": "async",
        "exchange": {"name": "accumulated", "n_push": 3, "n_fetch": 2, "fetch": "overlapped"},
    },
}


class Scheduled(Regression):
    def __init__(self, frequency: int = 0) -> None:
        super().__init__()
        self.frequency, self.total = frequency, 0  # 0: a cycle over the whole training

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=LR)
        rates = torch.optim.lr_scheduler
        if self.frequency:
            made: Any = rates.ExponentialLR(optimizer, 0.9)
        else:
            self.total = self.trainer.estimated_stepping_batches
            made = rates.OneCycleLR(optimizer, LR, total_steps=self.total)
        about = {"interval": "step", "frequency": self.frequency or 1}
        return [optimizer], [{"scheduler": made, **about}]


class Rates(pl.Callback):
    """Each worker's rate behind each of its mini-batches, in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        with (self.folder / f"{trainer.global_rank}").open("a") as file:
            print(
                trainer.current_epoch,
                rest[-1],
                trainer.optimizers[0].param_groups[0]["lr"],
                file=file,
            )


def fitted(name: str, workers: int, folder: Path, module: Any, **options: Any) -> list[list[Any]]:
    """Epoch, number, rate of each worker's mini-batches."""
    trainer = make_trainer(
        HybridStrategy(**SCHEMES[name]), workers, max_epochs=2, callbacks=[Rates(folder)], **options
    )
    trainer.fit(module, DataLoader(regression_data(90), 4))
    found = [path.read_text().splitlines() for path in sorted(folder.iterdir())]
    assert len(found) == workers
    return [[tuple(map(float, line.split())) for line in lines] for lines in found]


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", by_default([1, 2, 3], 2))
@pytest.mark.parametrize("name", by_default(SCHEMES, "async_diloco", "easgd", "downpour", "diloco"))
@pytest.mark.parametrize(("frequency", "accumulated"), by_default([(1, 1), (1, 2), (3, 1)], (1, 1)))
def test_a_schedule_counts_its_workers_own_steps(
    name: str, workers: int, frequency: int, accumulated: int, tmp_path: Path
) -> None:
    options = {"accumulate_grad_batches": accumulated}
    for lines in fitted(name, workers, tmp_path, Scheduled(frequency), **options):
        plain = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
        schedule = torch.optim.lr_scheduler.ExponentialLR(plain, 0.9)
        last = {epoch: batch for epoch, batch, _ in lines}
        for epoch, batch, rate in lines:
            steps = (batch + 1) % accumulated == 0 or batch == last[epoch]
            if steps:
                plain.step()
            if steps and (batch + 1) % frequency == 0:
                schedule.step()
            assert rate == pytest.approx(schedule.get_last_lr()[0], rel=1e-12), (epoch, batch)


@pytest.mark.parametrize("workers", by_default([1, 2, 3], 3))
@pytest.mark.parametrize("name", by_default(SCHEMES, "easgd", "downpour"))
def test_a_schedule_over_the_expected_steps_is_gone_through_once(
    name: str, workers: int, tmp_path: Path
) -> None:
    module = Scheduled()
    found = fitted(name, workers, tmp_path, module)
    assert module.total == 2 * -(-23 // workers)
    plain = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(plain, LR, total_steps=module.total)
    for _ in range(min(len(found[0]), module.total)):
        plain.step()
        schedule.step()
    assert found[0][-1][2] == pytest.approx(schedule.get_last_lr()[0], rel=1e-12)
