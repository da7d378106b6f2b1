"""Text for ``task=word2vec`` and ``task=glove``: files in, stretches of numbers out."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader

from hybridtrain.errors import UserError
from hybridtrain.tasks.words.text_files import EncodedText, Errors, TextFiles, Tokens, encode
from hybridtrain.tasks.words.vocabulary import Vocabulary, count
from hybridtrain.util.option_types import Natural, Positive, Range, typed

_COMPILED, _TORCH, _LEAST = 20_000, 1_000, 250  # words of a mini-batch
_PARTS = 16  # mini-batches of each worker in an epoch, at least, where there are words for it


def shipped(path: Path) -> list[Path]:
    """A text that comes with Python: its language reference, written to ``path``."""
    from pydoc_data.topics import topics

    path.write_text("\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    rank_zero_info("No data.files given: the text is the language reference that Python brings.")
    return [path]


FromTwo = Annotated[int, Range(2)]


class TextData(pl.LightningDataModule):
    """Words of text files, as numbers.

    The text is read twice when training begins, and its numbers are written to a file (4 bytes a
    word), which is removed at the end; neither has to fit into memory, only the words that differ.

    Args:
        files: one path or many, of plain or gzipped UTF-8; null: a text that Python brings.
        tokens: ``words``: runs of letters and digits; ``spaces``: what lies between spaces.
        lower: make all letters small.
        encoding_errors: bytes that are no UTF-8: ``strict`` ends the run, ``replace``, ``ignore``.
        min_count: words that occur less often get no vector.
        max_words: how many words get one at most, the most frequent; null: no limit.
        batch_words: of each worker's mini-batch; auto: 20,000 for compiled steps, else 1,000, and
            less where the text is short.
        num_workers: processes that load, for each worker.
        cache: folder for the numbers; null: in the trainer's ``default_root_dir``.

    Raises:
        UserError: if an option makes no sense.
    """

    kind = "text"

    @typed("data.")
    def __init__(
        self,
        files: str | Sequence[str] | None = None,
        tokens: Tokens = "words",
        lower: bool = True,
        encoding_errors: Errors = "strict",
        min_count: Positive = 5,
        max_words: FromTwo | None = None,
        batch_words: FromTwo | Literal["auto"] = "auto",
        num_workers: Natural = 0,
        cache: str | None = None,
    ) -> None:
        super().__init__()
        self.files = [files] if isinstance(files, str) else files
        self.reading: dict[str, Any] = {"tokens": tokens, "lower": lower, "errors": encoding_errors}
        if self.files is not None:
            TextFiles(self.files, **self.reading)  # raises before training starts
        self.min_count, self.max_words, self.batch_words = min_count, max_words, batch_words
        self.num_workers, self.cache = num_workers, cache
        self.vocabulary: Vocabulary | None = None

    @property
    def folder(self) -> Path:
        """Where numbers lie while training goes on."""
        assert self.trainer is not None, "Lightning gives it"
        return Path(self.cache or self.trainer.default_root_dir) / "text-numbers"

    def prepare_data(self) -> None:
        """Count the words and write their numbers, in one process.

        Raises:
            UserError: if there is too little text, or no room for its numbers.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write()
        except BaseException as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise UserError(
                f"the text could not be read, or its numbers not be written to {self.folder}: "
                f"{error}; name another folder with data.cache"
            ) from error

    def _write(self) -> None:
        folder = self.folder
        files = shipped(folder / "reference.txt") if self.files is None else self.files
        text = TextFiles(files, **self.reading)
        vocabulary = Vocabulary.of(count(text), self.min_count, self.max_words)
        n_words = encode(text, vocabulary.number_of, folder / "numbers.int32")
        (folder / "words.txt").write_text("\n".join(vocabulary.words), encoding="utf-8")
        np.save(folder / "counts.npy", np.append(vocabulary.counts, vocabulary.total))
        rank_zero_info(
            f"{vocabulary.total:,} words of text, of them {n_words:,} in a vocabulary of "
            f"{len(vocabulary):,}"
        )

    def setup(self, stage: str | None = None) -> None:
        """Read the vocabulary that ``prepare_data`` has written."""
        words = (self.folder / "words.txt").read_text(encoding="utf-8").split("\n")
        *counts, total = np.load(self.folder / "counts.npy")
        self.vocabulary = Vocabulary(tuple(words), np.array(counts, dtype=np.int64), int(total))

    def batch_length(self) -> int:
        """Words of a mini-batch."""
        if self.batch_words != "auto":
            return int(self.batch_words)
        assert self.vocabulary is not None and self.trainer is not None
        compiled = getattr(self.trainer.lightning_module, "steps_compiled", False)
        share = int(self.vocabulary.counts.sum()) // (_PARTS * self.trainer.world_size)
        return max(_LEAST, min(share, _COMPILED if compiled else _TORCH))

    def train_dataloader(self) -> DataLoader[tuple[int, Tensor]]:
        """Stretches of the text, in another order each epoch."""
        text = EncodedText(self.folder / "numbers.int32", self.batch_length())
        return text.loader(self.num_workers)

    def teardown(self, stage: str | None = None) -> None:
        """Remove the numbers; processes that have mapped them keep them."""
        if stage == "fit" and self.trainer is not None and self.trainer.is_global_zero:
            shutil.rmtree(self.folder, ignore_errors=True)
