"""The models of ``scripts/plan.py``, whose mini-batches take longer than their arithmetic."""

from __future__ import annotations

import time
from typing import Any

import torch
from advice import Timed
from pytorch_lightning import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain.tasks.digits import DigitsData
from hybridtrain.tasks.speech.datamodule import spoken_digits
from hybridtrain.tasks.speech.module import SpeechModule

STEP_S = 0.25


class Digits(Timed):
    """Two dense layers; a mini-batch takes longer than they need."""

    def __init__(self) -> None:
        super().__init__(STEP_S)


class Speech(SpeechModule):
    """DeepSpeech; a mini-batch takes longer than it needs."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        """The sleep is the device's time."""
        time.sleep(STEP_S)
        return super().training_step(batch, batch_index)


class TextData(LightningDataModule):
    """Letters of which each follows from the two before it."""

    def train_dataloader(self) -> DataLoader[Any]:
        """768 texts of 16 letters, 8 in a mini-batch."""
        letters = torch.randint(0, 32, (768, 17), generator=torch.Generator().manual_seed(0))
        for place in range(2, 17):
            letters[:, place] = (letters[:, place - 1] + 3 * letters[:, place - 2]) % 32
        return DataLoader(TensorDataset(letters), 8, shuffle=True)


class Text(LightningModule):
    """A transformer, which says the next letter."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.letters, self.places = nn.Embedding(32, 32), nn.Embedding(16, 32)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(32, 32)

    def training_step(self, batch: list[Tensor], batch_index: int) -> Tensor:
        """The sleep is the device's time."""
        time.sleep(STEP_S)
        text = batch[0]
        hidden = self.letters(text[:, :-1]) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(16)
        scores = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As usual for transformers."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _digits() -> tuple[LightningModule, LightningDataModule]:
    return Digits(), DigitsData(batch_size=15)


def _speech() -> tuple[LightningModule, LightningDataModule]:
    data = spoken_digits(train=192, val=20, test=20, batch_size=2, max_digits=2)
    return Speech({"kind": "stt", "width": 32, "dropout": 0.2}, optimizer=Adam), data


def _text() -> tuple[LightningModule, LightningDataModule]:
    return Text(), TextData()


MADE = {"digits": _digits, "speech": _speech, "text": _text}
