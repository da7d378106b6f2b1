"""A language model to train on a GPU, in several sizes.

Legend: B samples of a mini-batch, T tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

WORDS = 8192
# By the number of parameters, and tiny for tests.
SIZES: dict[str, dict[str, int]] = {
    "25 M": {"width": 512, "depth": 5, "length": 128},
    "170 M": {"width": 1024, "depth": 12, "length": 256},
    "1.2 G": {"width": 2048, "depth": 24, "length": 512},
}
HOST_BYTES = 4 * 5 + 4  # a parameter: masters, moments, two rows; a copy while the model is made
TINY = {"width": 32, "depth": 1, "length": 8}


def parameters_of(model: dict[str, int]) -> int:
    """About so many."""
    return model["depth"] * 12 * model["width"] ** 2 + 2 * WORDS * model["width"]


class Block(nn.Module):
    """Attention and a dense layer behind norms; 12 · width² parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 128)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        b, t, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, width))
        return x + self.down(torch.relu(self.up(self.norms[1](x))))


class Language(nn.Module):
    """Words in, the loss of the next word out."""

    def __init__(self, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of (B, T) words and the words behind them."""
        scores = self.head(self.blocks(self.words(x) + self.places))
        return cross_entropy(scores.flatten(0, 1).float(), y.flatten())


class Trained(pl.LightningModule):
    """The model with an optimizer."""

    def __init__(self, model: dict[str, int], make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.make = Language(**model), make

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        return self.net(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Over all parameters."""
        return self.make(self.parameters())


class Homeless(Trained):
    """Has no weights to bring home from the workers, which would take longer than the steps."""

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing."""
        return {}

    def on_fit_end(self) -> None:
        """In a worker: parameters that the state lacks would come home by their names."""
        for parameter in self.parameters():
            parameter.data = parameter.data.new_empty(0)


def words(model: dict[str, int], n: int) -> tuple[Tensor, Tensor]:
    """Samples, the same in every run."""
    draw = torch.Generator().manual_seed(1)
    drawn = torch.randint(WORDS, (n, model["length"] + 1), generator=draw)
    return drawn[:, :-1], drawn[:, 1:]
