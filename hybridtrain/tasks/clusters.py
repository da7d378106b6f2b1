"""``task=clusters``: clusters of points in many dimensions, some of which are one class.

The toy of Liu et al., *Asynchronous Local-SGD Training for Language Modeling*, 2024
(arXiv:2401.09135): quick, and hard enough that the workers' movements soon differ in direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from hybridtrain.util.option_types import Natural, NotNegative, Positive, typed

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
Batch = Sequence[Tensor]  # points (B, D) fp32; classes (B,) int64


class ClustersModule(pl.LightningModule):
    """One hidden layer of rectified units.

    Args:
        dimensions: D, of a point.
        classes: to tell apart.
        hidden: units.
        optimizer: given the parameters, returns their optimizer.
    """

    def __init__(
        self,
        dimensions: int = 512,
        classes: int = 4,
        hidden: int = 128,
        optimizer: MakeOptimizer = AdamW,
    ) -> None:
        super().__init__()
        self.make_optimizer = optimizer
        self.net = nn.Sequential(
            nn.Linear(dimensions, hidden), nn.ReLU(), nn.Linear(hidden, classes)
        )

    def forward(self, points: Tensor) -> Tensor:
        """Logits (B, classes) of points (B, D)."""
        return self.net(points)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean cross entropy of the mini-batch."""
        points, classes = batch
        loss = F.cross_entropy(self(points), classes)
        self.log("train/loss", loss, batch_size=len(classes))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``val/loss`` and ``val/acc``."""
        points, classes = batch
        logits = self(points)
        right = (logits.argmax(1) == classes).float().mean()
        scores = {"val/loss": F.cross_entropy(logits, classes), "val/acc": right}
        self.log_dict(scores, prog_bar=True, sync_dist=True, batch_size=len(classes))

    def configure_optimizers(self) -> Optimizer:
        """One optimizer for all parameters."""
        return self.make_optimizer(self.parameters())


class ClustersData(pl.LightningDataModule):
    """Points around centres on the unit sphere, with normal noise.

    Args:
        dimensions: D, of a point.
        classes: each has as many clusters.
        clusters: of each class.
        noise: standard deviation in each dimension.
        points: to train on.
        passes: of an epoch over them; more let workers meet less often.
        val_points: to validate on.
        batch_size: of each worker.
        seed: of centres and noise.

    Raises:
        UserError: if a number is below 1, or ``noise`` negative.
    """

    @typed("data.")
    def __init__(
        self,
        dimensions: Positive = 512,
        classes: Positive = 4,
        clusters: Positive = 1,
        noise: NotNegative = 0.5,
        points: Positive = 4096,
        passes: Positive = 1,
        val_points: Positive = 1024,
        batch_size: Positive = 32,
        seed: Natural = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        drawn = torch.Generator().manual_seed(seed)
        centres = F.normalize(torch.randn(classes * clusters, dimensions, generator=drawn))

        def around(n: int) -> TensorDataset:
            which = torch.randint(0, classes * clusters, (n,), generator=drawn)
            x = centres[which] + noise * torch.randn(n, dimensions, generator=drawn)
            return TensorDataset(x, which % classes)

        trained, self.validated = around(points), around(val_points)
        self.trained: ConcatDataset[Batch] = ConcatDataset([trained] * passes)

    def train_dataloader(self) -> DataLoader[Batch]:
        """The points, ``passes`` times, in another order each epoch."""
        return DataLoader(self.trained, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """The points validated on."""
        return DataLoader(self.validated, batch_size=256)
