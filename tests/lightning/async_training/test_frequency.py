"""``frequency`` of a schedule counts an epoch's mini-batches, as on one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from hybridtrain.engine.policies import STRATEGIES
from tests.lightning.toys import Regression, make_trainer, regression_data
from tests.picking import by_default

EPOCHS, BATCH = 3, 2
# One is one policy, then another; of the other one no schedule has an effect.
COUNTED = sorted(set(STRATEGIES) - {"switch", "sandblaster"})
WITH_ONE_MINI_BATCH = ["async", "hogwild", "synchronous"]  # in an update
CHOSEN = ["async", "synchronous", "easgd"]


class Noted(Regression):
    """Notes its rate behind each mini-batch, or each update of all workers, in worker 0."""

    def __init__(self, frequency: int, interval: str = "step", monitor: str | None = None) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.04))
        self.about = {"interval": interval, "frequency": frequency, "monitor": monitor}
        self.rates: list[tuple[int, int, float]] = []

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        schedules = torch.optim.lr_scheduler
        made: Any = schedules.ExponentialLR(optimizer, 0.5)
        if self.about["monitor"]:
            made = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return [optimizer], [{"scheduler": made, **self.about}]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.rates.append((self.trainer.current_epoch, self.trainer.global_step, rate))


def fitted(strategy: Any, workers: int, n: int, module: Noted, **options: Any) -> pl.Trainer:
    pl.seed_everything(1, verbose=False)
    trainer = make_trainer(strategy, workers, max_epochs=EPOCHS, **options)
    trainer.fit(module, DataLoader(regression_data(n), BATCH))
    return trainer


@pytest.mark.parametrize("strategy", by_default(COUNTED, *CHOSEN))
@pytest.mark.parametrize(("frequency", "n", "accumulated"), [(3, 8, 1), (2, 10, 3), (1, 14, 3)])
def test_one_worker_has_the_rates_of_one_device(
    strategy: str, frequency: int, n: int, accumulated: int
) -> None:
    options = {"accumulate_grad_batches": accumulated}
    plain, ours = Noted(frequency), Noted(frequency)
    fitted("auto", 1, n, plain, **options)
    fitted(strategy, 1, n, ours, **options)
    mine, theirs = [[rate for _, _, rate in each.rates] for each in (ours, plain)]
    assert len(mine) == EPOCHS * n // BATCH
    assert mine == pytest.approx(theirs)


@pytest.mark.parametrize("strategy", by_default(COUNTED, "k_batch_async"))
@pytest.mark.parametrize(
    ("interval", "monitor"), [("step", "train/loss"), ("epoch", "train/loss"), ("epoch", None)]
)
def test_one_worker_follows_a_metric_and_epochs_as_one_device(
    strategy: str, interval: str, monitor: str | None
) -> None:
    plain, ours = Noted(2, interval, monitor), Noted(2, interval, monitor)
    fitted("auto", 1, 10, plain)
    fitted(strategy, 1, 10, ours)
    assert [r for *_, r in ours.rates] == pytest.approx([r for *_, r in plain.rates])


@pytest.mark.parametrize("strategy", by_default(WITH_ONE_MINI_BATCH, "async", "synchronous"))
@pytest.mark.parametrize("frequency", [2, 3])
def test_several_workers_have_the_rates_of_one_device_after_as_many_updates(
    strategy: str, frequency: int
) -> None:
    per_epoch = 11
    module = Noted(frequency)
    trainer = fitted(strategy, 2, per_epoch * BATCH, module)
    assert trainer.global_step == EPOCHS * per_epoch
    end = 0.04 * 0.5 ** (EPOCHS * (per_epoch // frequency))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(end)
    for epoch, step, rate in module.rates:
        within = (step - epoch * per_epoch) // frequency
        halved = epoch * (per_epoch // frequency) + within
        assert rate == pytest.approx(0.04 * 0.5**halved), (epoch, step)


def test_updates_of_several_accumulated_mini_batches_count_them() -> None:
    module = Noted(2)  # an epoch's updates come after 3, 6, 9 and 11 mini-batches
    trainer = fitted("synchronous", 2, 22, module, accumulate_grad_batches=3)
    plain = Noted(2)
    alone = fitted("auto", 1, 22, plain, accumulate_grad_batches=3)
    assert trainer.global_step == alone.global_step
    rates = [each.optimizers[0].param_groups[0]["lr"] for each in (trainer, alone)]
    assert rates[0] == pytest.approx(rates[1])


def test_an_epoch_that_is_resumed_counts_on(tmp_path: Any) -> None:
    class Stopped(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            if trainer.global_step == 13:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    whole, rest = Noted(3), Noted(3)
    fitted("async", 1, 16, whole, callbacks=[Stopped()])
    pl.seed_everything(1, verbose=False)
    trainer = make_trainer("async", 2, max_epochs=EPOCHS)
    trainer.fit(rest, DataLoader(regression_data(16), BATCH), ckpt_path=tmp_path / "middle.ckpt")
    known = {step: rate for _, step, rate in whole.rates}
    assert rest.rates
    assert all(rate == pytest.approx(known[step]) for _, step, rate in rest.rates)
