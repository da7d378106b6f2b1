"""Small synthetic speech for tests of the model: each letter is a direction in feature space."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from hybridtrain.tasks.speech.alphabet import Alphabet
from hybridtrain.tasks.speech.module import SpeechModule

FEATURES = {"kind": "mfcc", "sample_rate": 16000, "n_features": 26}
Batch = dict[str, Any]


def utterance(text: str, frames_per_letter: int = 4) -> Tensor:
    """Features (T, 26): each letter lasts some frames, every other one ``silent``."""
    table = torch.randn(28, 26, generator=torch.Generator().manual_seed(7))
    rows = []
    for letter in Alphabet().encode(text):
        rows += [table[letter]] * (frames_per_letter - 1) + [torch.zeros(26)]
    return torch.stack(rows)


def batch_of(texts: Sequence[str], prefix: str = "f") -> Batch:
    """A batch as the data side makes it."""
    features = [utterance(text) for text in texts]
    targets = [torch.tensor(Alphabet().encode(text)) for text in texts]
    return {
        "features": pad_sequence(features, batch_first=True),
        "feature_lengths": torch.tensor([len(f) for f in features]),
        "targets": pad_sequence(targets, batch_first=True),
        "target_lengths": torch.tensor([len(t) for t in targets]),
        "transcripts": list(texts),
        "files": [f"{prefix}-{text}.wav" for text in texts],
    }


class Batches(pl.LightningDataModule):
    """Ready batches for every stage; counts how often the longest was asked for."""

    def __init__(self, train: list[Batch], held_out: list[Batch] | None = None) -> None:
        super().__init__()
        self.train, self.held_out = train, held_out if held_out is not None else train
        self.rehearsals = 0

    def longest_batch(self) -> Batch:
        self.rehearsals += 1
        torch.rand(3)  # augmentation, as it were
        return max(self.train, key=lambda batch: batch["features"].shape[1])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=None)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.held_out, batch_size=None)  # type: ignore[arg-type]

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.held_out, batch_size=None)  # type: ignore[arg-type]


def tiny_module(
    kind: str = "stt", width: int = 24, lr: float = 0.01, **options: Any
) -> SpeechModule:
    """A module of seconds."""
    torch.manual_seed(4)
    net = {"kind": kind, "width": width, "context": 2, "dropout": 0.0}
    options.setdefault("optimizer", partial(torch.optim.Adam, lr=lr))
    return SpeechModule(net, features=FEATURES, **options)


def trainer(**options: Any) -> pl.Trainer:
    """A quiet trainer on one CPU."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**{**defaults, **options})
