"""``task=digits``: scikit-learn's bundled handwritten digits and a small convolutional net.

1,797 images of 8 x 8 pixels. 1,440 of them train (a number that 2, 3 and 4 workers share evenly),
the others are validated and tested on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain.tasks.shared_tables import MakeOptimizer
from hybridtrain.util.option_types import Natural, Positive, Range, Rule, typed

N_TRAIN = 1440
TWO = Rule("(two)", lambda given: len(given) == 2)
Batch = Sequence[Tensor]  # images (B, 1, 8, 8) fp32 in [0, 1]; labels (B,) int64


class Classifier(pl.LightningModule):
    """Trains ``net`` on mean cross entropy; its accuracy is logged, too."""

    def __init__(self, net: nn.Module, optimizer: MakeOptimizer) -> None:
        super().__init__()
        self.net, self.make_optimizer = net, optimizer

    def forward(self, samples: Tensor) -> Tensor:
        """Logits (B, classes) of samples (B, ...)."""
        return self.net(samples)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean cross entropy of the mini-batch."""
        samples, labels = batch
        loss = F.cross_entropy(self(samples), labels)
        self.log("train/loss", loss, batch_size=len(labels))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``val/loss`` and ``val/acc``."""
        self._score(batch, "val")

    def _score(self, batch: Batch, stage: str) -> None:
        samples, labels = batch
        logits = self(samples)
        right = (logits.argmax(1) == labels).float().mean()
        scores = {f"{stage}/loss": F.cross_entropy(logits, labels), f"{stage}/acc": right}
        self.log_dict(scores, prog_bar=True, sync_dist=True, batch_size=len(labels))

    def configure_optimizers(self) -> Optimizer:
        """One optimizer for all parameters."""
        return self.make_optimizer(self.parameters())


class DigitsModule(Classifier):
    """Two convolutions, each halving the image, and two dense layers.

    Args:
        channels: of the two convolutions.
        hidden: width of the dense layer before the ten outputs.
        optimizer: given the parameters, returns their optimizer.
    """

    @typed("model.")
    def __init__(
        self,
        channels: Annotated[Sequence[Positive], TWO] = (16, 32),
        hidden: Positive = 64,
        optimizer: MakeOptimizer = Adam,
    ) -> None:
        first, second = channels
        net = nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),  # (B, first, 4, 4)
            nn.Conv2d(first, second, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),  # (B, second, 2, 2)
            nn.Flatten(),
            nn.Linear(second * 4, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 10),
        )
        super().__init__(net, optimizer)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``test/loss`` and ``test/acc``."""
        self._score(batch, "test")


class DigitsData(pl.LightningDataModule):
    """The digits, shuffled once and split.

    Args:
        batch_size: of each worker.
        val_size: images to validate on, of the 357 not trained on; the rest is the test set.
        num_workers: processes that load batches, for each worker.
        split_seed: of the shuffle before the split.
    """

    @typed("data.")
    def __init__(
        self,
        batch_size: Positive = 30,
        val_size: Annotated[int, Range(1, 356)] = 180,
        num_workers: Natural = 0,
        split_seed: Natural = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.val_size = val_size
        self.num_workers = num_workers
        self.split_seed = split_seed
        self.parts: dict[str, TensorDataset] = {}

    def setup(self, stage: str | None = None) -> None:
        """Load and split; the images come with scikit-learn, nothing is downloaded."""
        if self.parts:
            return
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        generator = torch.Generator().manual_seed(self.split_seed)
        order = torch.randperm(len(labels), generator=generator)
        x = torch.from_numpy(images).float().div_(16).view(-1, 1, 8, 8)[order]  # (1797, 1, 8, 8)
        y = torch.from_numpy(labels).long()[order]  # (1797,)
        bounds = {"train": (0, N_TRAIN), "val": (N_TRAIN, N_TRAIN + self.val_size)}
        bounds["test"] = (N_TRAIN + self.val_size, len(y))
        self.parts = {k: TensorDataset(x[a:b], y[a:b]) for k, (a, b) in bounds.items()}

    def _loader(self, part: str) -> DataLoader[Batch]:
        return DataLoader(
            self.parts[part],
            batch_size=self.batch_size,
            shuffle=part == "train",
            num_workers=self.num_workers,
        )

    def train_dataloader(self) -> DataLoader[Batch]:
        """1,440 images, in another order each epoch."""
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Batch]:
        """The images validated on."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Batch]:
        """The images seen only at the end."""
        return self._loader("test")
