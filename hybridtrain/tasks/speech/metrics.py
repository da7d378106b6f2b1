"""Word and character error rates, micro-averaged: all errors of a set over its reference length.

Long sentences weigh more than short ones, as in DeepSpeech (whose version 0.1 averaged rates). A
rate above 1 is possible, by insertions; DeepSpeech shows at most 1, and so do we, in the report and
in the log: the two never disagree, and a net that babbles in its first epoch does not flatten the
plot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hybridtrain.errors import UserError


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
    """Single blanks between words and none around."""
    return " ".join(text.split())
