"""Word and character error rates, micro-averaged: all errors of a set over its reference length.

Long sentences weigh more than short ones, as in DeepSpeech (whose version 0.1 averaged rates). A
rate above 1 is possible, by insertions; DeepSpeech shows at most 1, and so do we, in the report and
in the log: the two never disagree, and a net that babbles in its first epoch does not flatten the
plot.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridtrain.errors import UserError

# ---- the sentences of a test --------------------------------------------------------------------
# The sentences of a test: best, median and worst, as a table for people and as plain data.


@dataclass(frozen=True, slots=True)
class Sentence:
    """One recording: what was said, what the model heard, and its CTC loss."""

    file: str
    truth: str
    heard: str
    loss: float
    wer: float
    cer: float

    @classmethod
    def of(cls, file: str, truth: str, heard: str, loss: float) -> Sentence:
        """Count the errors of this sentence."""
        errors = count_errors([truth], [heard])
        return cls(file, truth, heard, loss, errors.wer, errors.cer)


def gather(sentences: Sequence[Sentence], all_gather: Callable[[Tensor], Tensor]) -> list[Sentence]:
    """The sentences of all ranks, on every rank, in rank order.

    ``all_gather`` (Lightning's) takes tensors of one size only, so the sentences travel as bytes
    padded to the longest rank's.
    """
    rows = [asdict(sentence) for sentence in sentences]
    own = torch.tensor(list(json.dumps(rows).encode()), dtype=torch.int64)
    sizes = all_gather(torch.tensor([len(own)])).reshape(-1).tolist()  # (W,)
    padded = torch.nn.functional.pad(own, (0, max(sizes) - len(own)))
    every = all_gather(padded).reshape(len(sizes), -1)  # (W, bytes)
    texts = [bytes(row[:n].tolist()) for row, n in zip(every, sizes, strict=True)]
    return [Sentence(**row) for text in texts for row in json.loads(text)]


def select(sentences: Sequence[Sentence], count: int) -> dict[str, list[dict[str, Any]]]:
    """``count`` best, median and worst sentences by WER, none of them twice.

    DeepSpeech's order: ascending WER, and among equals the higher loss first.
    """
    ordered = sorted(sentences, key=lambda s: (s.wer, -_or_infinite(s.loss), s.file))
    n = len(ordered)
    best = list(range(min(count, n)))
    worst = [i for i in range(n - 1, max(n - 1 - count, -1), -1) if i not in best]
    start = max(0, (n - count) // 2)
    taken = {*best, *worst}
    median = [i for i in range(start, min(start + count, n)) if i not in taken]
    groups = {"best": best, "median": median, "worst": worst}
    return {name: [asdict(ordered[i]) for i in indices] for name, indices in groups.items()}


def _or_infinite(loss: float) -> float:
    """NaN has no place in an order."""
    return math.inf if math.isnan(loss) else loss


def as_text(report: dict[str, list[dict[str, Any]]]) -> str:
    """A table for a terminal: the truth above what was heard."""
    lines = []
    for name, sentences in report.items():
        for s in sentences:
            rates = f"WER {s['wer']:6.1%}  CER {s['cer']:6.1%}  loss {s['loss']:8.2f}"
            lines += [f"{name:>6}  {rates}  {s['file']}"]
            lines += [f"          truth: {s['truth']}", f"          heard: {s['heard']}"]
    return "\n".join(lines)


def as_markdown(rows: Sequence[tuple[str, str]]) -> str:
    """Pairs of truth and heard as a table that TensorBoard renders."""
    head = "| truth | heard |\n| --- | --- |\n"
    cells = [[text.replace("|", "\\|") for text in row] for row in rows]
    return head + "\n".join(f"| {truth} | {heard} |" for truth, heard in cells)


class ErrorCounts(NamedTuple):
    """Edits needed to turn hypotheses into references, and the references' lengths."""

    word_errors: int = 0
    words: int = 0
    char_errors: int = 0
    chars: int = 0

    @property
    def wer(self) -> float:
        """Word error rate in [0, 1]."""
        return rate(self.word_errors, self.words)

    @property
    def cer(self) -> float:
        """Character error rate in [0, 1]."""
        return rate(self.char_errors, self.chars)


def rate(errors: float, length: float) -> float:
    """errors / length, at most 1; without any reference it is 0 or, if there are errors, 1."""
    return min(1.0, errors / length) if length else float(errors > 0)


def count_errors(references: Sequence[str], hypotheses: Sequence[str]) -> ErrorCounts:
    """Count over all pairs. Words are separated by blanks; their number does not matter."""
    if not references:
        return ErrorCounts()
    try:
        import jiwer
    except ImportError as error:
        raise UserError(
            "word error rates need the package jiwer: pip install 'hybridtrain[speech]'"
        ) from error
    truth, heard = [_tidy(r) for r in references], [_tidy(h) for h in hypotheses]
    words = jiwer.process_words(truth, heard)
    chars = jiwer.process_characters(truth, heard)
    return ErrorCounts(
        words.substitutions + words.deletions + words.insertions,
        words.hits + words.substitutions + words.deletions,
        chars.substitutions + chars.deletions + chars.insertions,
        chars.hits + chars.substitutions + chars.deletions,
    )


def _tidy(text: str) -> str:
    """Composed letters, single blanks between words and none around."""
    return " ".join(unicodedata.normalize("NFC", text).split())
