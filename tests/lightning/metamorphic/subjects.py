"""What is trained with and without an observer: small modules that show any random number drawn.

Dropout draws from torch's own generator, so that an observer that draws from it is seen. The
loaders of a validation have a generator of their own, because an iterator draws a number from the
loader's generator when it begins, also without any strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
import torchmetrics
from torch.utils.data import DataLoader, Dataset

BATCH, EPOCHS = 4, 2
SIZES = {"even": 48, "uneven": 50}  # with three workers a last mini-batch of two samples


class Noisy(Dataset[Any]):
    """Regression. What a sample is added to it is drawn anew each time.

    Args:
        n: samples.
        seed: of the samples.
        generators: whose numbers are drawn; ``None``: torch's own.
    """

    def __init__(
        self, n: int, seed: int, generators: tuple[torch.Generator | None, ...] = ()
    ) -> None:
        self.x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
        self.y = self.x.pow(2).sum(1, keepdim=True)
        self.generators = generators

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        noise = [torch.randn(4, generator=each) for each in self.generators]
        return self.x[index] + 0.01 * sum(noise, torch.zeros(4)), self.y[index], index


class Seen:
    """How often a training step has had each sample, in all workers."""

    def __init__(self) -> None:
        self.counts = torch.zeros(max(SIZES.values()), dtype=torch.int64).share_memory_()

    def count(self, indices: torch.Tensor) -> None:
        self.counts[indices] += 1


class Subject(pl.LightningModule):
    """Dropout, momentum, a schedule by step. ``notes``: what an observer of its own does.

    Args:
        note: called with the module and a loss, in each training step.
    """

    def __init__(self, note: Callable[[Any, torch.Tensor], None] | None = None) -> None:
        super().__init__()
        self.net: torch.nn.Module = torch.nn.Sequential(
            *(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2)),
            torch.nn.Linear(8, 1),
        )
        self.note = note
        self.seen = Seen()
        self.metric, self.val_metric = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.count(batch[2])
        loss = self.loss(batch)
        if self.note is not None:
            self.note(self, loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.val_metric.update(loss)
        self.log("val/loss", loss, sync_dist=True, batch_size=len(batch[0]))
        self.log("val/metric", self.val_metric)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class ByHand(Subject):
    """Steps its optimizer and its schedule itself."""

    def __init__(self, note: Callable[[Any, torch.Tensor], None] | None = None) -> None:
        super().__init__(note)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        schedule: Any = self.lr_schedulers()
        schedule.step()


class Two(Subject):
    """Two optimizers in turn, as an adversarial pair has them."""

    def __init__(self, note: Callable[[Any, torch.Tensor], None] | None = None) -> None:
        super().__init__(note)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        schedules: Any = self.lr_schedulers()
        super().training_step(batch, batch_idx)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            schedule.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        parameters = list(self.net.parameters())
        made: list[torch.optim.Optimizer] = [
            torch.optim.SGD(parameters[:2], lr=0.02, momentum=0.9),
            torch.optim.Adam(parameters[2:], lr=0.02),
        ]
        return made, [torch.optim.lr_scheduler.ExponentialLR(each, 0.95) for each in made]


class Sums(Subject):
    """One parameter for each sample, moved by each gradient by a power of two.

    So the sum of all updates is exact, in whichever order they come.
    """

    def __init__(self, note: Callable[[Any, torch.Tensor], None] | None = None) -> None:
        super().__init__(note)
        self.net = torch.nn.Embedding(max(SIZES.values()), 1, dtype=torch.float64)
        torch.nn.init.zeros_(self.net.weight)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(batch[2]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Whole(Subject):
    """Without chance, so that an epoch can be one evaluation of the loss."""

    def __init__(self, note: Callable[[Any, torch.Tensor], None] | None = None) -> None:
        super().__init__(note)
        tanh = torch.nn.Tanh()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), tanh, torch.nn.Linear(8, 1))


# How optimizers are stepped: the module, and what it asks of the trainer.
KINDS: dict[str, tuple[type[Subject], dict[str, Any]]] = {
    "automatic": (Subject, {}),
    "accumulating": (Subject, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
    "manual": (ByHand, {}),
    "two": (Two, {}),
    "sums": (Sums, {}),
    "whole": (Whole, {}),
}


def training_data(data: str) -> DataLoader[Any]:
    own = torch.Generator().manual_seed(3)
    return DataLoader(Noisy(SIZES[data], 0, (None, own)), batch_size=BATCH, shuffle=True)


def validation_data(*sizes: int) -> list[DataLoader[Any]]:
    """One loader each, that draws from a generator of its own."""
    return [
        DataLoader(Noisy(n, 1 + k), batch_size=2, generator=torch.Generator().manual_seed(k))
        for k, n in enumerate(sizes)
    ]
