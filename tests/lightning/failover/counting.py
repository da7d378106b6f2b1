"""Masters that count: how many updates was each sample part of?

A sample's gradient is that of one element, and Adam without memory moves an element by one wherever
its gradient is not zero.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from hybridtrain import HybridStrategy

N = 24
STRATEGIES = (
    "hybrid",
    "async",
    "backup",
    "synchronous",
    "k_async",
    "k_batch_sync",
    "k_batch_async",
    "softsync",
    "ssp",
    "grace",
    "hogwild",
)


class Counting(pl.LightningModule):
    """Its parameter says how many updates each of ``n`` samples was part of."""

    def __init__(self, n: int = N) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(n))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return -self.w[batch].sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", float(len(batch)), sync_dist=True, reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([self.w], lr=1.0, betas=(0.0, 0.0), eps=1e-30)


class Scheduled(Counting):
    """With a schedule by step and one by epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0) for _ in range(2)]
        by = ("step", "epoch")
        return [optimizer], [
            {"scheduler": s, "interval": i} for s, i in zip(schedules, by, strict=True)
        ]


class Looking(Counting):
    """Needs the mean of all gradients before it pushes."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        pass


class ByHand(Counting):
    """Accumulates two mini-batches under manual optimization."""

    def __init__(self, n: int = N) -> None:
        super().__init__(n)
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2 or self.trainer.is_last_batch:
            self.optimizers().step()  # type: ignore[union-attr]
            self.optimizers().zero_grad()  # type: ignore[union-attr]


class Seen(pl.Callback):
    """Writes down how many samples each validation of :class:`Counting` is of."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "seen"

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            with self.path.open("a") as file:
                file.write(f"{int(trainer.callback_metrics['seen'])}\n")

    def are(self, n: int) -> None:
        """There were validations, and each was of ``n`` samples."""
        assert {int(line) for line in self.path.read_text().split()} == {n}


def counts_are(module: Any, strategy: HybridStrategy, epochs: int) -> None:
    """Every sample was trained on once in each epoch."""
    n = len(module.w)
    assert strategy.run_stats()["samples"] == n * epochs
    if strategy.requirements.in_place:  # whose steps may be lost to one another
        assert module.w.round().min() > 0 and module.w.round().max() <= epochs
    else:
        assert module.w.round().tolist() == [epochs] * n
