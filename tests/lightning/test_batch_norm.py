"""Batch normalisation over all workers equals one worker that sees the union of mini-batches."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.layer_sync import LayerSync
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain.errors import UserError
from hybridtrain.lightning.sync_batchnorm import HostBatchNorm
from tests.lightning.toys import flat, make_trainer
from tests.picking import by_default

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "1d": lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(32)),
    "2d": lambda: nn.BatchNorm2d(2),
    "cumulative": lambda: nn.BatchNorm2d(2, momentum=None),
    "plain": lambda: nn.BatchNorm2d(2, affine=False, track_running_stats=False),
    "converted": lambda: nn.SyncBatchNorm(2),
}


class Net(pl.LightningModule):
    def __init__(self, kind: str = "2d") -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 2, 1), LAYERS[kind](), nn.Tanh(), nn.Flatten(), nn.Linear(32, 1)]
        self.net = nn.Sequential(*layers).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.5)


def train(workers: int, size: int, n: int = 48, **options: Any) -> tuple[Any, pl.Trainer]:
    pl.seed_everything(7, verbose=False)
    kind = options.pop("kind", "2d")
    module = options.pop("module", Net)(kind)
    x = torch.randn(n, 1, 4, 4, generator=torch.Generator().manual_seed(0)).double() + 3
    data = TensorDataset(x, x.mean(dim=(1, 2, 3))[:, None])
    strategy = options.pop("strategy", "hybrid")
    trainer = make_trainer(strategy, workers, **({"sync_batchnorm": True} | options))
    trainer.fit(module, DataLoader(data, size // workers, shuffle=True))
    return module, trainer


def compare(one: Any, many: Any) -> None:
    torch.testing.assert_close(flat(many), flat(one), rtol=1e-7, atol=1e-9)
    for name, buffer in one.named_buffers():
        torch.testing.assert_close(dict(many.named_buffers())[name], buffer, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("workers", by_default([2, 3], 2))
def test_statistics_of_accumulated_mini_batches_of_unequal_size_are_those_of_the_union(
    workers: int,
) -> None:
    """The last global mini-batch has 5 samples, so the workers' shares differ from the first's."""
    options = {"n": 41, "accumulate_grad_batches": 2, "max_epochs": 1}
    one, _ = train(1, 12, **options)
    many, _ = train(workers, 12, **options)
    compare(one, many)


@pytest.mark.parametrize("workers", by_default([2, 3], 3))
@pytest.mark.parametrize("kind", by_default(["1d", "2d", "cumulative", "plain"], "cumulative"))
def test_statistics_and_gradients_are_those_of_the_union(kind: str, workers: int) -> None:
    one, _ = train(1, 12, kind=kind)
    many, _ = train(workers, 12, kind=kind)
    compare(one, many)
    alone, _ = train(workers, 12, kind=kind, sync_batchnorm=False)
    assert (flat(alone) - flat(one)).abs().max() > 1e-5, "it matters here"


@pytest.mark.slow
@pytest.mark.parametrize("workers", by_default([2, 3], 3))
@pytest.mark.parametrize("n", by_default([43, 37, 25], 25))
def test_uneven_shares_and_empty_ones_count_by_their_samples(n: int, workers: int) -> None:
    """The last mini-batch has 7, 1 and 1 samples."""
    one, _ = train(1, 12, n=n)
    many, _ = train(workers, 12, n=n)
    compare(one, many)


@pytest.mark.slow
def test_layers_that_the_user_has_converted_need_no_flag_and_no_gpu() -> None:
    one, _ = train(1, 12, kind="2d")
    many, _ = train(2, 12, kind="converted", sync_batchnorm=False)
    compare(one, many)


def test_the_callers_module_keeps_its_layers_and_its_names() -> None:
    module, _ = train(2, 12)
    assert type(module.net[1]) is nn.BatchNorm2d
    assert int(module.net[1].num_batches_tracked) == 12


def test_a_replaced_layer_keeps_parameters_hooks_and_mode_and_can_be_copied() -> None:
    layer = nn.BatchNorm2d(3)
    layer.eval()
    seen: list[Any] = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    made = HostBatchNorm.of(layer)
    assert made.weight is layer.weight and made.running_mean is layer.running_mean
    x = torch.randn(4, 3, 2, 2)
    assert torch.equal(made(x), layer(x)) and len(seen) == 2
    assert torch.equal(deepcopy(made)(x), layer(x))
    with pytest.raises(ValueError, match="at least 2"):
        made(torch.zeros(3))


def test_a_layer_sync_of_the_users_own_is_applied() -> None:
    class Own(LayerSync):
        def apply(self, model: nn.Module) -> nn.Module:
            model.net[1] = nn.Identity()
            return model

        def revert(self, model: nn.Module) -> nn.Module:
            return model

    module, _ = train(2, 12, plugins=[Own()], sync_batchnorm=False, kind="2d")
    assert int(module.net[1].num_batches_tracked) == 0


def test_free_running_workers_cannot_meet_at_a_layer() -> None:
    with pytest.raises(UserError, match=r"sync_batchnorm=True was given.*strategy=hybrid"):
        train(2, 12, strategy="async")
