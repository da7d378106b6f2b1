"""Workers that compute apart from the parameters: on a device of the tests, or on a GPU if there is
one. The same claims hold on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from hybridtrain import HybridStrategy
from hybridtrain.engine.worker.device import KINDS, transfers
from hybridtrain.engine.worker.device.cuda import CudaStreams
from hybridtrain.errors import UserError
from tests.lightning import toys
from tests.lightning.step.test_equality import OPTIMIZERS
from tests.lightning.toys import Regression, distance, fit, regression_data
from tests.picking import by_default
from tests.standin.state import NAME
from tests.standin.training import fit_apart

Fit = Callable[..., tuple[pl.LightningModule, pl.Trainer]]


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fit]:
    """What trains on the device; several workers share the one GPU."""
    monkeypatch.setattr(transfers, "LEAST_BYTES", 64)
    if request.param == "fake":
        monkeypatch.setitem(KINDS, NAME, CudaStreams)
        yield fit_apart
    else:
        assert torch.cuda.device_count() > 0, "no GPU: leave -m gpu out"
        yield lambda workers, *args, strategy=None, **options: fit(
            HybridStrategy(workers_per_device=workers, **(strategy or {})),
            1,
            *args,
            **{"accelerator": "cuda"} | options,
        )


IN_64 = {"precision": "64-true", "max_epochs": 3}


@pytest.mark.wide
@pytest.mark.parametrize("name", by_default(["nesterov", "adamw"], "adamw"))
def test_two_workers_equal_one_with_a_doubled_batch(device: Fit, name: str) -> None:
    module, data = partial(Regression, OPTIMIZERS[name]), regression_data(48, torch.float64)
    whole, _ = fit("hybrid", 1, 12, module, data, **IN_64)
    shared, trainer = device(2, 6, module, data, **IN_64)
    assert trainer.global_step == 12
    assert distance(shared, whole) < 1e-12


class LooksAtGradients(Regression):
    def on_after_backward(self) -> None:
        assert self.net[0].weight.grad is not None


class ClosureChanges(Regression):
    """Hyper-parameters change before the step, by a hook that the module does not show."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(half_rate)
        return optimizer


def half_rate(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.005


class Clamps(Regression):
    """Writes to parameters before forward."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.3, 0.3)


UNUSUAL: dict[str, Any] = {
    "clipped": (Regression, {"gradient_clip_val": 0.1}),
    "looked at": (LooksAtGradients, {}),
    "hooked": (ClosureChanges, {}),
    "clamped": (Clamps, {}),
    "accumulated": (Regression, {"accumulate_grad_batches": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", by_default(UNUSUAL, "clipped"))
def test_what_is_unusual_in_a_step_trains_as_on_a_cpu(device: Fit, name: str) -> None:
    module, options = UNUSUAL[name]
    plain, _ = fit("hybrid", 2, 6, module, **options)
    apart, _ = device(2, 6, module, **options)
    assert distance(apart, plain) < 1e-5


class NotFinite(Regression):
    """In step 3 the gradient of worker 1's first layer is not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.net[:2](batch[0])
        if self.trainer.global_step == 3 and self.global_rank == 1:
            hidden.register_hook(lambda gradient: gradient * float("nan"))
        return torch.nn.functional.mse_loss(self.net[2](hidden), batch[1])


def test_a_gradient_that_is_not_finite_is_named(device: Fit) -> None:
    with pytest.raises(UserError, match=r"worker 1 .* not finite: net\.0"):
        device(2, 6, NotFinite)


class CountsTaken(Regression):
    """Each mini-batch but the first of an epoch was on the device before it was asked for."""

    taken: int = 0
    expected: int = 9

    def on_train_start(self) -> None:
        ahead = self.trainer.strategy._ahead
        take = ahead.take

        def count(batch: Any) -> Any:
            moved = take(batch)
            self.taken += moved is not None
            assert moved is None or moved[0].device == self.device
            return moved

        ahead.take = count

    def on_train_end(self) -> None:
        assert self.taken == self.expected


class Transforms(CountsTaken):
    """What is changed on the device is changed when it is its turn."""

    expected = 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [2 * batch[0], batch[1]]


@pytest.mark.wide
@pytest.mark.parametrize("module", by_default([CountsTaken, Transforms], Transforms))
def test_the_next_mini_batch_is_on_the_device_before_the_step_has_ended(
    device: Fit, module: type[CountsTaken], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = partial(toys.DataLoader, num_workers=1)
    monkeypatch.setattr(toys, "DataLoader", loader)
    found, _ = device(2, 6, module)
    monkeypatch.undo()
    assert distance(found, fit("hybrid", 2, 6, Plain[module])[0]) < 1e-5


class Doubles(Regression):
    on_after_batch_transfer = Transforms.on_after_batch_transfer


Plain = {CountsTaken: Regression, Transforms: Doubles}
