"""Models to train: networks, mini-batches in memory, ordinary Lightning modules.

Legend: B samples of a mini-batch, T frames, N samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, ctc_loss
from torch.utils.data import DataLoader, Dataset

from hybridtrain.tasks.speech.nets import DeepSpeechSTT

CLASSES, MFCC, SYMBOLS, LETTERS = 10, 26, 29, 8
SPEECH_WIDTH = 1024  # 12 million parameters; the published 2048 has 47


class Mlp(nn.Module):
    """``depth`` dense layers with ReLU, one more for the classes; cross entropy."""

    def __init__(self, inputs: int, width: int, depth: int) -> None:
        super().__init__()
        sizes = [inputs, *[width] * depth]
        layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
        inner = [x for layer in layers for x in (layer, nn.ReLU())]
        self.net = nn.Sequential(*inner, nn.Linear(width, CLASSES))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of features (B, inputs) and labels (B,)."""
        return cross_entropy(self.net(x), y)


class Speech(nn.Module):
    """DeepSpeech in Mozilla's and Coqui's form, CTC loss, all samples of one length."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = DeepSpeechSTT(MFCC, SYMBOLS, width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of features (B, T, 26) and labels (B, 8)."""
        lengths = torch.full((len(x),), x.shape[1])
        scores = self.net(x, lengths).log_softmax(-1).transpose(0, 1)
        return ctc_loss(scores, y, lengths, torch.full((len(x),), LETTERS), blank=SYMBOLS - 1)


class Bag(nn.Module):
    """The mean of the embeddings of a sample's ids, whose gradient is sparse; squared error."""

    def __init__(self, ids: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(ids, width, sparse=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of ids (B, n) and labels (B,)."""
        return (self.table(x).mean(1) - y[:, None].float()).square().mean()


@dataclass(frozen=True, slots=True)
class Model:
    """A model, its optimizer and its data.

    ``step_s``: about how long a step of the slowest way takes on 2 cores: for their number.
    ``ids``: samples are so many different numbers; their gradients are sparse, and so is Adam.
    """

    about: str
    make: Callable[[], nn.Module]
    features: tuple[int, ...]  # the shape of a sample
    batch_size: int
    step_s: float
    ids: int = 0

    def samples(self, n: int) -> tuple[Tensor, Tensor]:
        """Random features (n, ...) and labels, the same in every run."""
        draw = torch.Generator().manual_seed(1)
        if self.ids:
            x = torch.randint(self.ids, (n, *self.features), generator=draw)
            return x, torch.randint(CLASSES, (n,), generator=draw)
        x = torch.randn(n, *self.features, generator=draw)
        speech = len(self.features) > 1
        high, shape = (SYMBOLS - 1, (n, LETTERS)) if speech else (CLASSES, (n,))
        return x, torch.randint(high, shape, generator=draw)

    def optimizer(self, net: nn.Module, fused: bool | None) -> torch.optim.Optimizer:
        """Adam; ``fused`` is its argument, ``None`` what a user gets who says nothing."""
        if self.ids:
            return torch.optim.SparseAdam(net.parameters(), lr=1e-4)
        return torch.optim.Adam(net.parameters(), lr=1e-4, fused=fused)

    def steps(self, seconds: float, fewest: int = 8) -> int:
        """How many fill so much time, in the slowest way."""
        return max(fewest, round(seconds / self.step_s))


def speech(frames: int, batch_size: int, step_s: float) -> Model:
    """A DeepSpeech-like model with mini-batches of this shape."""
    about = f"DeepSpeech-like, T={frames}, B={batch_size}"
    return Model(about, lambda: Speech(SPEECH_WIDTH), (frames, MFCC), batch_size, step_s)


MODELS = {
    "mlp-100k": Model("MLP 100 k, batch 32", lambda: Mlp(64, 280, 2), (64,), 32, 0.003),
    "mlp-small": Model("MLP 128-256-256-10, batch 32", lambda: Mlp(128, 256, 2), (128,), 32, 0.002),
    "mlp-10m": Model("MLP 10.5 M, batch 32", lambda: Mlp(1024, 2048, 3), (1024,), 32, 0.060),
    "speech-short": speech(40, 2, 0.12),
    "speech-long": speech(100, 8, 0.7),
    "embedding": Model(
        "embedding 1 M × 64, 1,000 rows a worker",
        lambda: Bag(1_000_000, 64),
        *((32,), 32, 0.012),
        ids=1_000_000,
    ),
    "embedding-small": Model(
        "embedding 10 k × 16, 1,000 rows a worker",
        lambda: Bag(10_000, 16),
        *((32,), 32, 0.012),
        ids=10_000,
    ),
    "tiny": Model("MLP 3 k, batch 32", lambda: Mlp(16, 48, 2), (16,), 32, 0.003),
}


class Trained(pl.LightningModule):
    """The network with an optimizer.

    Args:
        model: a key of :data:`MODELS`.
        fused: see :meth:`Model.optimizer`.
    """

    def __init__(self, model: str, fused: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = MODELS[model].make()
        self.model, self.fused = model, fused

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.net(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return MODELS[self.model].optimizer(self, self.fused)


class InMemory(Dataset[Any]):
    """Gives a whole mini-batch at a time, so that the loader costs as little as it can."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self.x[list(indices)], self.y[list(indices)]


def loader(model: str, steps: int, workers: int, single_samples: bool = False) -> DataLoader[Any]:
    """Mini-batches for ``steps`` steps of every worker, perhaps put together of single samples."""
    spec = MODELS[model]
    samples = spec.samples(steps * workers * spec.batch_size)
    if single_samples:
        return DataLoader(list(zip(*samples, strict=True)), spec.batch_size, shuffle=True)
    data = InMemory(*samples)
    return DataLoader(data, spec.batch_size, shuffle=True, collate_fn=as_it_is)


def as_it_is(batch: Any) -> Any:
    """Collate nothing: :class:`InMemory` gives whole mini-batches."""
    return batch
