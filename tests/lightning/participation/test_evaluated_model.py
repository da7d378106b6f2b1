"""What workers validate together is the model that comes home and is saved."""

from __future__ import annotations

import time
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from hybridtrain.engine.options.schemes import parts_of
from tests.lightning.toys import make_trainer, regression_data
from tests.picking import by_default
from tests.support.counts import STRATEGIES

REFUSED = ("sandblaster",)  # dropout and BatchNorm are refused
OWN = ("async_diloco", "diloco", "downpour", "easgd", "local_sgd", "post_local_sgd")
NO_AVERAGES = (*REFUSED, *OWN, "streaming_diloco", "hogwild")


class Normed(pl.LightningModule):
    """Worker 1 has few mini-batches, and so other running means, averages and counts."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        kind = torch.nn.BatchNorm1d if norm else torch.nn.Identity
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), kind(8), torch.nn.Linear(8, 1))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("validated", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        if self.global_rank:
            time.sleep(0.005)
        self.mean = 0.9 * self.mean + 0.1 * y.mean().float()
        return (self.net(x.float()) - y).square().mean()

    def on_validation_end(self) -> None:
        self.validated += not self.trainer.sanity_checking

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss = (self.net(x.float()) - y + self.mean).square().mean()
        self.log("loss", loss.double(), sync_dist=True, on_epoch=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02)


def validated(strategy: str, workers: int, module: pl.LightningModule, **options: Any) -> None:
    pl.seed_everything(3, verbose=False)
    data = DataLoader(regression_data(72), batch_size=4, shuffle=True)
    held_out = DataLoader(regression_data(24), batch_size=4)
    options["num_sanity_val_steps"] = 2
    made = HybridStrategy(**parts_of(strategy))
    trainer = make_trainer(made, workers, max_epochs=2, **options)
    trainer.fit(module, data, held_out)
    then = float(trainer.callback_metrics["loss"])
    alone = make_trainer("auto", 1)
    (now,) = alone.validate(module, held_out, verbose=False)
    assert then == pytest.approx(now["loss"], rel=1e-6)


class Scripted(Normed):
    """Layers of ``torch.jit.script``, whose buffers are in no dict."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.jit.script(self.net)


@pytest.mark.parametrize("workers", by_default([1, 2], 2))
@pytest.mark.parametrize(
    "strategy", by_default([x for x in STRATEGIES if x not in REFUSED], "hybrid", "async", "easgd")
)
def test_scripted_layers_are_validated_with_their_buffers(strategy: str, workers: int) -> None:
    module = Scripted()
    validated(strategy, workers, module)
    assert module.net[1].running_mean.abs().sum() > 0


@pytest.mark.few(3)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    "strategy", by_default([x for x in STRATEGIES if x not in REFUSED], "ssp", "local_sgd")
)
def test_the_buffers_that_are_validated_are_those_of_the_returned_model(
    strategy: str, workers: int
) -> None:
    module = Normed()
    validated(strategy, workers, module)
    assert float(module.validated) == 2 + 1, "what a validation writes to them stays"


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("strategy", [x for x in STRATEGIES if x not in NO_AVERAGES])
def test_the_averaged_weights_that_are_validated_are_those_of_the_returned_model(
    strategy: str, workers: int
) -> None:
    averaging = EMAWeightAveraging(decay=0.8)
    validated(strategy, workers, Normed(norm=False), callbacks=[averaging])
