"""``task=clusters``: clusters of points in many dimensions, some of which are one class.

The toy of Liu et al., *Asynchronous Local-SGD Training for Language Modeling*, 2024
(arXiv:2401.09135): quick, and hard enough that the workers' movements soon differ in direction.
"""

from __future__ import annotations

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from hybridtrain.tasks.digits import Batch, Classifier
from hybridtrain.tasks.shared_tables import MakeOptimizer
from hybridtrain.util.option_types import Natural, NotNegative, Positive, typed


class ClustersModule(Classifier):
    """One hidden layer of rectified units.

    Args:
        dimensions: D, of a point.
        classes: to tell apart.
        hidden: units.
        optimizer: given the parameters, returns their optimizer.
    """

    @typed("model.")
    def __init__(
        self,
        dimensions: Positive = 512,
        classes: Positive = 4,
        hidden: Positive = 128,
        optimizer: MakeOptimizer = AdamW,
    ) -> None:
        units = (nn.Linear(dimensions, hidden), nn.ReLU(), nn.Linear(hidden, classes))
        super().__init__(nn.Sequential(*units), optimizer)


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
