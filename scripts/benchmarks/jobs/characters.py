"""A transformer on the characters of Python's own modules, and Muon for its matrices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset

MODULES = ("argparse", "ast", "datetime", "decimal", "inspect", "pathlib", "tarfile", "typing")
LENGTH = 64  # characters of a sample
MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
Group = dict[str, Any]


def corpus() -> torch.Tensor:
    """The text of some modules as (n,) int64 numbers of ASCII characters."""
    library = Path(os.__file__).parent
    found = [library / f"{name}.py" for name in MODULES]
    text = "".join(each.read_text() for each in found if each.exists())
    return torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long()


class Windows(Dataset[Any]):
    """Samples of ``LENGTH`` characters and the one behind each."""

    def __init__(self, text: torch.Tensor, n: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.text = text
        self.starts = torch.randint(0, len(text) - LENGTH - 1, (n,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> Any:
        window = self.text[self.starts[number] : self.starts[number] + LENGTH + 1]
        return window[:-1], window[1:]


class Characters(pl.LightningModule):
    """Two layers, pre-norm.

    Args:
        optimizer: makes it.
        width: of a layer.
        updates: of the cosine schedule, after a rise of 50.
        samples: of an epoch.
        batch_size: of a mini-batch.
    """

    def __init__(
        self,
        optimizer: MakeOptimizer,
        width: int = 64,
        updates: int = 480,
        samples: int = 3840,
        batch_size: int = 32,
    ) -> None:
        super().__init__()
        self.make_optimizer, self.updates = optimizer, updates
        self.samples, self.batch_size = samples, batch_size
        self.embedding = torch.nn.Embedding(128, width)
        self.place = torch.nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = torch.nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.out = torch.nn.LayerNorm(width), torch.nn.Linear(width, 128)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def loss(self, batch: Any) -> torch.Tensor:
        """Mean cross entropy of the next character, in nats."""
        x, y = batch
        hidden = self.layers(self.embedding(x) + self.place, mask=self.mask, is_causal=True)
        return torch.nn.functional.cross_entropy(
            self.out(self.norm(hidden)).flatten(0, 1), y.flatten()
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """One mini-batch."""
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """On text that is not trained on."""
        self.log("val/loss", self.loss(batch))

    def train_dataloader(self) -> Any:
        """Nine tenths of the text."""
        text = corpus()
        data = Windows(text[: len(text) * 9 // 10], self.samples, 0)
        return DataLoader(data, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> Any:
        """The last tenth."""
        text = corpus()
        return DataLoader(Windows(text[len(text) * 9 // 10 :], 512, 1), 128)

    def configure_optimizers(self) -> Any:
        """With a rise and a cosine."""
        optimizer = self.make_optimizer(self.parameters())
        rise = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
        fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, self.updates - 50))
        both = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], [50])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": both, "interval": "step"}}


class Muon(torch.optim.Optimizer):
    """Matrices move by their orthogonalised momentum, all else as under AdamW.

    Jordan et al. 2024, *Muon: An optimizer for hidden layers*; five Newton-Schulz iterations.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        adam_lr: float = 0.003,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        matrices, others = [], []
        for parameter in params:
            (matrices if parameter.dim() == 2 else others).append(parameter)
        groups = [
            {"params": matrices, "lr": lr, "muon": True},
            {"params": others, "lr": adam_lr, "muon": False},
        ]
        super().__init__(groups, {"momentum": momentum, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step all parameters with a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            move = partial(self._matrix if group["muon"] else self._other, group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    move(parameter, self.state[parameter])
        return loss

    def _matrix(
        self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]
    ) -> None:
        mean = state.setdefault("momentum", torch.zeros_like(parameter))
        mean.lerp_(parameter.grad, 1 - group["momentum"])
        step = orthogonal(torch.lerp(parameter.grad, mean, group["momentum"]))
        parameter.add_(
            step, alpha=-group["lr"] * max(1.0, len(parameter) / parameter.shape[1]) ** 0.5
        )

    def _other(self, group: Group, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        first, second = group["betas"]
        mean = state.setdefault("exp_avg", torch.zeros_like(parameter))
        square = state.setdefault("exp_avg_sq", torch.zeros_like(parameter))
        state["count"] = count = state.get("count", 0) + 1
        mean.lerp_(parameter.grad, 1 - first)
        square.lerp_(parameter.grad.square(), 1 - second)
        scale = (square / (1 - second**count)).sqrt().add_(1e-8)
        parameter.addcdiv_(mean, scale, value=-group["lr"] / (1 - first**count))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """About the nearest orthogonal matrix."""
    a, b, c = 3.4445, -4.775, 2.0315
    found = matrix / (matrix.norm() + 1e-7)
    wide = found.T if len(found) > found.shape[1] else found
    for _ in range(5):
        square = wide @ wide.T
        wide = a * wide + (b * square + c * square @ square) @ wide
    return wide.T if len(found) > found.shape[1] else wide
