"""Three small modules, each with something that a strategy can get wrong, and their data.

Kept runs name these classes in their configuration, so they must stay where they are.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

N = 94  # samples: two workers with mini-batches of 4 have a last one that is shorter
WORDS, LENGTH, CLASSES = 40, 6, 5


class Golden(pl.LightningModule):
    """Cross entropy of ``net``, logged in every step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train/loss", loss, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", self._loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def _loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class Transformer(Golden):
    """Attention, dropout, decay that spares some parameters, a schedule in steps."""

    def __init__(self, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.body(self.words(words) + self.places).mean(1))

    def configure_optimizers(self) -> Any:
        flat = [p for p in self.parameters() if p.ndim < 2]
        rest = [p for p in self.parameters() if p.ndim >= 2]
        groups = [{"params": rest, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Normed(Golden):
    """Batch normalisation: buffers that every worker changes; SGD with momentum."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.net = nn.Sequential(
            nn.Linear(4 * LENGTH, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, CLASSES),
        )

    def forward(self, words: Tensor) -> Tensor:
        return self.net(self.words(words).flatten(1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)


class Sparse(Golden):
    """Two tables with sparse gradients, and nothing else."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width, sparse=True)
        self.classes = nn.Embedding(CLASSES, width, sparse=True)

    def forward(self, words: Tensor) -> Tensor:
        every = torch.arange(CLASSES, device=words.device)
        return self.words(words).mean(1) @ self.classes(every).T

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(list(self.parameters()), lr=0.02)


class Words(pl.LightningDataModule):
    """Sequences of numbers; the class is the first number's rest."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size
        words = torch.randint(WORDS, (N + 20, LENGTH), generator=torch.Generator().manual_seed(1))
        whole = TensorDataset(words, words[:, 0] % CLASSES)
        self.parts = torch.utils.data.Subset(whole, range(N)), whole

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.parts[0], batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        rest = torch.utils.data.Subset(self.parts[1], range(N, N + 20))
        return DataLoader(rest, batch_size=self.batch_size)
