"""A gradient scaler in lock-step: every worker's has the state that one device's would have."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain.lightning.strategy import HybridStrategy
from tests.lightning.toys import make_trainer


class Scaled(MixedPrecision):
    """Scales in full precision, so that sums are exact enough to compare."""

    def autocast_context_manager(self) -> Any:
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[None]:
        return nullcontext()


class Line(pl.LightningModule):
    """Notes its scale behind each epoch; ``nothing``: (worker, epoch, step) without a loss."""

    def __init__(self, folder: Path, nothing: tuple[int, int, int] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.folder, self.nothing = nn.Linear(3, 1).double(), folder, nothing

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        if self.nothing == (self.global_rank, self.current_epoch, batch_idx):
            return None
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None:
        scaler: Any = self.trainer.precision_plugin.scaler  # type: ignore[attr-defined]
        with (self.folder / f"{self.global_rank}.txt").open("a") as page:
            page.write(f"{scaler.get_scale():g} {scaler._get_growth_tracker()}\n")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Skips(Line):
    """Nobody has a loss in two of the steps."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        if batch_idx == 0 and self.current_epoch in (0, 2):
            return None
        return super().training_step(batch, batch_idx)


def trained(
    module: Line, workers: int, n: int = 9, interval: int = 3, accumulate: int = 1, **options: Any
) -> tuple[Tensor, list[str]]:
    """All parameters, and what each worker has noted."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=generator).double()
    y = x.sum(1, keepdim=True) + 3
    y[1::2] -= 6  # so that the workers' shares differ
    pl.seed_everything(7, verbose=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=interval)
    plugin = Scaled("16-mixed", "cpu", scaler)
    strategy = HybridStrategy("hybrid", keep_order=True, **options)
    for page in module.folder.glob("*.txt"):
        page.unlink()
    trainer = make_trainer(
        strategy, workers, max_epochs=4, plugins=[plugin], accumulate_grad_batches=accumulate
    )
    trainer.fit(module, DataLoader(TensorDataset(x, y), 8 // workers))
    found = torch.cat([p.detach().flatten() for p in module.parameters()])
    return found, [(module.folder / f"{w}.txt").read_text() for w in range(workers)]


def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in ("one", "two")]
    for each in made:
        each.mkdir()
    return made


def test_a_worker_without_samples_in_a_step_keeps_the_scale_of_the_others(tmp_path: Path) -> None:
    """The last global mini-batch has one sample, so the second worker sits it out."""
    here, there = folders(tmp_path)
    one, (alone,) = trained(Line(here), 1)
    two, notes = trained(Line(there), 2)
    assert notes == [alone] * 2 and alone.split()[-2] == "16"
    torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-12)


def test_a_step_without_any_gradient_leaves_the_scaler_alone(tmp_path: Path) -> None:
    """The first step of all, and a later one; and one that a hook skips at an uneven end."""
    here, there = folders(tmp_path)
    one, (alone,) = trained(Skips(here), 1)
    two, notes = trained(Skips(there), 2)
    assert notes == [alone] * 2
    torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("worker", "at"), [(0, (1, 0)), (1, (1, 0)), (1, (0, 0))])
def test_a_worker_whose_step_has_no_loss_keeps_the_scale_of_the_others(
    worker: int, at: tuple[int, int], tmp_path: Path
) -> None:
    here, there = folders(tmp_path)
    _, notes = trained(Line(here, nothing=(worker, *at)), 2, n=16)
    _, others = trained(Line(there), 2, n=16)
    assert notes == others and notes[0] == notes[1]


class Breaks(torch.autograd.Function):
    """Identity, but for a backward that may run out of memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, breaks: bool) -> Tensor:
        ctx.breaks = breaks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.breaks:
            raise MemoryError("out of memory")
        return grads[0], None


class Heavy(Line):
    at = 1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        breaks = batch_idx == self.at and self.current_epoch == 1 and self.global_rank == 0
        return nn.functional.mse_loss(Breaks.apply(self.net(batch[0]), breaks), batch[1])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_backward_out_of_memory_is_forgiven_with_a_scaler(workers: int, tmp_path: Path) -> None:
    found, notes = trained(Heavy(tmp_path), workers, n=16, on_oom="drop")
    assert found.isfinite().all() and len({*notes}) == 1


@pytest.mark.wide
def test_a_backward_that_was_broken_off_takes_no_later_one_along(tmp_path: Path) -> None:
    """Of two accumulated mini-batches the first one's breaks: the second one's gradient counts."""
    here, there = folders(tmp_path)
    heavy = type("First", (Heavy,), {"at": 0})
    options = {"n": 16, "accumulate": 2, "interval": 1000}
    found, _ = trained(heavy(here), 1, on_oom="drop", **options)
    other, _ = trained(Line(there), 1, **options)
    assert (found - other).abs().max() > 0, "one mini-batch is missing"
    _, (notes,) = trained(heavy(here), 1, on_oom="drop", **options)
    assert notes.split()[-1] == "4", "and each step was made"
