"""Parameters of every dtype, shape and memory format at once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hybridtrain.errors import UserError
from tests.lightning.checkpointing.test_checkpoints import saved
from tests.lightning.step.test_optimizers import fresh
from tests.lightning.toys import Regression, distance, fit
from tests.picking import by_default

OPTIM = torch.optim


class Zoo(Regression):
    """One of each; all take part in the loss but the empty one."""

    def __init__(self, make: Any) -> None:
        super().__init__(make)
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int, dtype: Any = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=dtype) * 0.1)

        self.fine = random(4, dtype=torch.float64)
        self.brain = random(4, dtype=torch.bfloat16)
        self.coarse = random(4, dtype=torch.float16)
        self.wave = random(4, dtype=torch.complex64)
        self.scalar = nn.Parameter(torch.tensor(0.1))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.turned = nn.Parameter(torch.randn(3, 4, generator=generator).t())
        self.conv = nn.Conv2d(2, 3, 1).to(memory_format=torch.channels_last)
        self.tied = nn.Linear(4, 16)
        self.tied.weight = self.net[0].weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.net(x) + self.scalar + self.empty.sum() + self.tied(x).mean(1, keepdim=True)
        for weight in (self.fine, self.brain, self.coarse):
            out = out + (x.to(weight.dtype) @ weight).unsqueeze(1).float()
        out = out + (x.to(torch.complex64) @ self.wave).abs().unsqueeze(1)
        out = out + (x @ self.turned).sum(1, keepdim=True)
        image = x.view(-1, 2, 2, 1).to(memory_format=torch.channels_last)
        out = out + self.conv(image).mean(dim=(1, 2, 3)).unsqueeze(1)
        return (out - y).pow(2).mean()


class Looking(Zoo):
    """Reads gradients, so that they are averaged first."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype
            assert parameter.grad.shape == parameter.shape


MAKES = {
    "SGD": partial(OPTIM.SGD, lr=0.01, momentum=0.9),
    "Adam": partial(OPTIM.Adam, lr=0.01),
    "foreach": partial(OPTIM.AdamW, lr=0.01, foreach=True),
    "Adagrad": partial(OPTIM.Adagrad, lr=0.01),
}
# Over eight steps; the two coarse ones also move the others a little, through the loss.
ROUNDING = {torch.bfloat16: 0.02, torch.float16: 2e-3}


def compare_all(module: Any, **options: Any) -> None:
    """Each dtype within its own rounding."""
    settings: dict[str, Any] = {"overfit_batches": 1.0, "max_epochs": 2} | options
    alone, _ = fit("auto", 1, 12, module, **settings)
    shared, _ = fit("hybrid", 2, 6, module, **settings)
    assert distance(shared.net, fresh(module).net) > 1e-2
    for (name, mine), theirs in zip(shared.named_parameters(), alone.parameters(), strict=True):
        near = ROUNDING.get(mine.dtype, 5e-4)
        torch.testing.assert_close(mine, theirs, rtol=near, atol=near, msg=f"{name} {mine.dtype}")


@pytest.mark.few(2)
@pytest.mark.parametrize("module", [Zoo, Looking])
@pytest.mark.parametrize("name", by_default(MAKES, "SGD", "Adam"))
def test_parameters_of_all_dtypes_shapes_and_formats_at_once_equal_one_device(
    name: str, module: Any
) -> None:
    compare_all(partial(module, MAKES[name]))


def test_a_global_norm_spans_dtypes() -> None:
    compare_all(partial(Zoo, MAKES["SGD"]), gradient_clip_val=0.5)


@pytest.mark.parametrize("name", by_default(MAKES, "Adam"))
def test_optimizer_states_of_all_kinds_of_parameters_resume_to_the_bit(
    name: str, tmp_path: Path
) -> None:
    module = partial(Zoo, MAKES[name])
    path = saved("hybrid", 2, 6, module, tmp_path)
    resumed, _ = fit("hybrid", 2, 6, module, ckpt_path=str(path), max_epochs=3)
    whole, _ = fit("hybrid", 2, 6, module, max_epochs=3)
    assert all(map(torch.equal, resumed.parameters(), whole.parameters()))


def test_free_running_workers_train_all_kinds_of_parameters() -> None:
    trained, _ = fit("async", 2, 6, partial(Zoo, MAKES["Adam"]))
    assert all(bool(torch.isfinite(p).all()) for p in trained.parameters())


class Quantized(Looking):
    """With frozen parameters of dtypes that have no arithmetic; its optimizer has them, too."""

    def __init__(self) -> None:
        super().__init__(MAKES["SGD"])
        for dtype in (torch.int8, torch.bool, torch.float8_e4m3fn):
            frozen = nn.Parameter(torch.ones(5).to(dtype), requires_grad=False)
            self.register_parameter(str(dtype).replace(".", "_"), frozen)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """A hook, so that gradients are averaged first."""


@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_frozen_parameters_of_any_dtype_stay_as_they_are(strategy: str) -> None:
    trained, _ = fit(strategy, 2, 6, Quantized)
    assert distance(trained.net, Quantized().net) > 0
    frozen = [p.float() for p in trained.parameters() if not p.requires_grad]
    assert len(frozen) == 3
    assert all(torch.equal(each, torch.ones(5)) for each in frozen)


def test_int8_parameters_are_refused_where_workers_train_on_their_own() -> None:
    with pytest.raises(UserError, match=r"parameter of torch.int8 with exchange=.*leave it out"):
        fit("local_sgd", 2, 6, Quantized)
