"""Base of modules that train word vectors: words, rates, files, figures.

Legend: V words, D dimensions.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pytorch_lightning.utilities import rank_zero_info
from torch.optim.lr_scheduler import LambdaLR

from hybridtrain.errors import UserError
from hybridtrain.tasks.shared_tables import CompiledSteps, MakeOptimizer
from hybridtrain.tasks.words.questions import Vectors, write_vectors
from hybridtrain.tasks.words.text_data import Vocabulary
from hybridtrain.util.option_types import Positive, typed

_WORDS, _COUNTS = "words", "word_counts"  # in checkpoints
_PROJECTED = 10_000  # words
_TELLS_EVERY_S = 0.2


class WordVectors(CompiledSteps):
    """A table of V vectors; subclasses define what vectors predict.

    Args:
        dim: D.
        compiled: see :class:`CompiledSteps`.
        save: names of files in ``directory`` for the vectors: ``vectors.bin`` and ``vectors.txt``.
        directory: None: the trainer's ``default_root_dir``.
        project: show the most frequent words in TensorBoard's projector.
        optimizer: given the parameters, returns their optimizer; for steps that are not compiled.
    """

    reads = "text"

    @typed("model.")
    def __init__(
        self,
        dim: Positive,
        compiled: bool | Literal["auto"],
        save: Sequence[str],
        directory: str | None,
        project: bool,
        optimizer: MakeOptimizer | None,
    ) -> None:
        super().__init__(compiled, optimizer or partial(torch.optim.Adagrad, lr=0.1))
        self.dim = dim
        self.save, self.directory, self.project = list(save), directory, project
        # Text and bytes, which the calling process gets back whatever their size.
        self.word_lines, self.word_counts = "", b""
        self._vocabulary: Vocabulary | None = None
        self._began_s, self._words = 0.0, 0
        self._told = (-1, 0.0)  # in which epoch, when
        self._losses: list[float] = []  # not logged yet

    # ---- tables ---------------------------------------------------------------------------------

    def know(self, data: Any) -> None:
        """Take the vocabulary of the data."""
        self._know(data.vocabulary)

    def _know(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.word_lines = "\n".join(vocabulary.words)
        self.word_counts = vocabulary.counts.tobytes()

    @property
    def has_words(self) -> bool:
        """Whether there is a vocabulary, of a text or a checkpoint."""
        return bool(self.word_lines)

    @property
    def vocabulary(self) -> Vocabulary:
        """The words, in the order of their rows.

        Raises:
            UserError: if nothing has been trained or loaded.
        """
        if not self.has_words:
            raise UserError("these vectors have no words yet; train them, or load a checkpoint")
        if self._vocabulary is None:
            words = tuple(self.word_lines.split("\n"))
            counts = np.frombuffer(self.word_counts, dtype=np.int64)
            self._vocabulary = Vocabulary(words, counts, int(counts.sum()))
        return self._vocabulary

    @abstractmethod
    def vectors(self) -> Vectors:
        """(V, D): what is saved."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the words, in the order of their rows."""
        checkpoint[_WORDS] = self.word_lines
        checkpoint[_COUNTS] = torch.from_numpy(self.vocabulary.counts.copy())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that rows mean the same words; a module without words takes the checkpoint's.

        Raises:
            UserError: if the words differ.
        """
        if not self.has_words:
            self.word_lines = checkpoint[_WORDS]
            self.word_counts = checkpoint[_COUNTS].numpy().tobytes()
            self.configure_model()
        elif self.word_lines != checkpoint[_WORDS]:
            raise UserError(
                f"the checkpoint has vectors of {len(checkpoint[_COUNTS]):,} words, and the text "
                f"has {len(self.vocabulary):,} or others; go on with the text that it began with"
            )

    # ---- steps ----------------------------------------------------------------------------------

    def num_samples(self, batch: Any) -> int:
        """Samples are words."""
        return int((batch[1] >= 0).sum())

    def progress(self) -> float:
        """The share of the training that is done, by mini-batches of all workers."""
        total = self.trainer.estimated_stepping_batches
        trainer: Any = self.trainer
        here = trainer.current_epoch * trainer.num_training_batches
        done: float = max(trainer.global_step, trainer.fit_loop.epoch_loop.batch_idx)
        if not self.automatic_optimization and trainer.world_size == 1 and np.isfinite(here):
            done = max(done, here + trainer.fit_loop.epoch_loop.batch_idx)
        return min(1.0, done / total) if 0 < total < float("inf") else 0.0

    def scheduled(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer, with a rate that decays linearly if the end of training is known."""
        total = self.trainer.estimated_stepping_batches
        if not 0 < total < float("inf"):
            return optimizer
        schedule = LambdaLR(optimizer, lambda step: max(1e-4, 1.0 - step / total))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def tell(self, loss: float | torch.Tensor, n_words: int, unit: str = "words/s") -> None:
        """Log the loss, and how many words all workers train on in a second.

        Not after every step: two logs take as long as compiled steps of a thousand words.
        """
        now, first = time.perf_counter(), not self._words
        if first:
            self._began_s = now
        self._losses.append(float(loss))
        new_epoch = self._told[0] != self.current_epoch  # in which all are to log something
        due = first or new_epoch or self.trainer.is_last_batch
        if due or now - self._told[1] >= _TELLS_EVERY_S:
            if not first:
                rate = self._words * self.trainer.world_size / max(now - self._began_s, 1e-9)
                self.log(unit, rate, prog_bar=True, batch_size=1)
            n, mean = len(self._losses), sum(self._losses) / len(self._losses)
            self.log("train/loss", mean, on_epoch=True, on_step=False, sync_dist=True, batch_size=n)
            self._told = (self.current_epoch, now)
            self._losses.clear()
        self._words += n_words

    def on_train_epoch_start(self) -> None:
        """Losses of an epoch are not logged in the next one."""
        self._losses.clear()

    # ---- the end --------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Reset the words and losses counted."""
        self._words = 0
        self._losses.clear()

    def on_train_end(self) -> None:
        """Write files, show the projection."""
        if not self.trainer.is_global_zero:
            return
        words, vectors = self.vocabulary.words, self.vectors()
        folder = Path(self.directory or self.trainer.default_root_dir)
        for name in self.save:
            write_vectors(folder / name, words, vectors)
            rank_zero_info(f"Vectors of {len(words):,} words: {folder / name}")
        for logger in self.trainer.loggers if self.project else ():
            board: Any = getattr(logger, "experiment", None)
            if hasattr(board, "add_embedding"):
                shown = torch.from_numpy(np.array(vectors[:_PROJECTED]))
                names = list(words[:_PROJECTED])
                board.add_embedding(shown, metadata=names, tag="words")
