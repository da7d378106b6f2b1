"""Text with a plan: each line is about one of four topics, with ten words of its own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl

from hybridtrain.tasks.words.questions import Vectors, unit
from hybridtrain.tasks.words.text_data import TextData
from hybridtrain.tasks.words.vectors_module import WordVectors
from tests.lightning.toys import make_trainer

TOPICS, EACH = 4, 10


def write_text(path: Path, lines: int = 600) -> Path:
    """Lines of eight words of a topic, and two that are everybody's."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(lines):
            topic = draw.randrange(TOPICS)
            words = [f"w{topic}_{draw.randrange(EACH)}" for _ in range(8)] + ["the", "of"]
            draw.shuffle(words)
            print(*words, file=file)
    return path


def train(
    module: WordVectors, file: Path, strategy: Any, workers: int, **options: Any
) -> pl.Trainer:
    """Fit on the text of a file."""
    pl.seed_everything(3, verbose=False)
    data = TextData(str(file), min_count=1, batch_words=options.pop("batch_words", 500))
    settings: dict[str, Any] = {"default_root_dir": file.parent, "max_epochs": 4}
    trainer = make_trainer(strategy, workers, **(settings | options))
    trainer.fit(module, datamodule=data)
    return trainer


def margin(words: tuple[str, ...], vectors: Vectors) -> float:
    """By how much words of one topic are more alike than words of two."""
    known = [n for n, word in enumerate(words) if word[0] == "w"]
    topics = np.array([words[n].split("_")[0] for n in known])
    alike = unit(vectors)[known] @ unit(vectors)[known].T
    same = topics[:, None] == topics[None, :]
    np.fill_diagonal(same, False)
    other = topics[:, None] != topics[None, :]
    return float(alike[same].mean() - alike[other].mean())
