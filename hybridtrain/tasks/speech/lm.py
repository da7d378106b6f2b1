"""A small n-gram language model from a text file, written as ARPA text.

    python -m hybridtrain.tasks.speech.lm text=sentences.txt order=3 out=sentences.arpa

One sentence per line, words between blanks. Interpolated Kneser-Ney smoothing (Chen and Goodman
1999, section 2.7) with one discount per order, D = n1 / (n1 + 2 n2): an n-gram seen c times after a
history h has

    p(w | h) = (c(hw) - D) / c(h.) + g(h) p(w | h'),     g(h) = D * N1+(h.) / c(h.)

where h' is h without its first word and N1+(h.) the number of different words seen after h. Orders
below the highest count the different words *before* an n-gram instead of its occurrences, except
at the beginning of a sentence, which nothing precedes. Below the unigrams lies the uniform
distribution over the words, ``</s>`` and ``<unk>``. Since g(h) is exactly the back-off weight of
an n-gram that was not seen, the file holds a normalised model.

Options:
  text=FILE          sentences, one per line (required)
  out=FILE           where to write the model (required)
  order=N            words of the longest n-gram (default 3)
"""

from __future__ import annotations

import math
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from hybridtrain.errors import UserError
from hybridtrain.util.arguments import command, options
from hybridtrain.util.files import text_lines

Ngram = tuple[str, ...]
BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
_HEAD = re.compile(r"\\(\d{1,2})-grams:")
NEVER = -99.0  # ARPA's log10 of zero


class NgramModel:
    """log10 probabilities and back-off weights, as an ARPA file holds them."""

    def __init__(self, order: int, log10: dict[Ngram, float], backoff: dict[Ngram, float]) -> None:
        self.order, self.log10, self.backoff = order, log10, backoff

    @property
    def words(self) -> list[str]:
        """Every word that can be predicted (not ``<s>``, ``</s>``, ``<unk>``)."""
        return [g[0] for g in self.log10 if len(g) == 1 and g[0] not in (BEGIN, END, UNKNOWN)]

    def write(self, path: str | Path) -> None:
        """Write ARPA text."""
        by_order = [[g for g in self.log10 if len(g) == n + 1] for n in range(self.order)]
        lines = ["\\data\\", *(f"ngram {n + 1}={len(g)}" for n, g in enumerate(by_order))]
        for n, ngrams in enumerate(by_order):
            lines += ["", f"\\{n + 1}-grams:", *(self._line(ngram) for ngram in sorted(ngrams))]
        Path(path).write_text("\n".join([*lines, "", "\\end\\", ""]), encoding="utf-8")

    def _line(self, ngram: Ngram) -> str:
        end = f"\t{self.backoff[ngram]:.7f}" if ngram in self.backoff else ""
        return f"{self.log10[ngram]:.7f}\t{' '.join(ngram)}{end}"

    @classmethod
    def read(cls, path: str | Path) -> NgramModel:
        """Read ARPA text; ``UserError`` names the line that is not."""
        log10: dict[Ngram, float] = {}
        backoff: dict[Ngram, float] = {}
        order = 0
        for number, text in text_lines(path, "the text"):
            line = text.strip()
            if line.startswith("\\"):
                head = _HEAD.fullmatch(line)
                order = int(head[1]) if head else 0
            elif order and line:
                try:
                    _read_ngram(line, order, log10, backoff)
                except ValueError as error:
                    raise UserError(f"{path}, line {number}: not an ARPA n-gram: {line}") from error
        if not log10:
            raise UserError(f"{path} holds no n-grams: expected a language model as ARPA text")
        return cls(max(map(len, log10)), log10, backoff)


def estimate(sentences: Iterable[Sequence[str]], order: int = 3) -> NgramModel:
    """Count and smooth. ``order`` 1 to 10; at least one sentence with a word is needed."""
    if not 1 <= order <= 10:
        raise UserError(f"order={order}: an n-gram model has order 1 to 10")
    padded = [(BEGIN, *words, END) for words in sentences if words]
    if not padded:
        raise UserError("the text holds no words: a language model needs at least one sentence")
    if any({BEGIN, END, UNKNOWN} & set(words[1:-1]) for words in padded):
        raise UserError(f"the text holds {BEGIN}, {END} or {UNKNOWN}: remove them, they are marks")
    counts = _counts(padded, order)
    probability, gamma = _unigrams(counts[0])
    for table in counts[1:]:
        _smooth(table, probability, gamma)
    log10 = {ngram: math.log10(p) for ngram, p in probability.items()}
    log10[(BEGIN,)] = NEVER
    return NgramModel(order, log10, {h: math.log10(g) for h, g in gamma.items()})


def _counts(sentences: list[Ngram], order: int) -> list[Counter[Ngram]]:
    """Per order: occurrences at the highest, below it the number of different words before."""
    raw: list[Counter[Ngram]] = [Counter() for _ in range(order)]
    for words in sentences:
        for n in range(1, order + 1):
            raw[n - 1].update(words[i : i + n] for i in range(len(words) - n + 1))
    counts = [*(Counter(g[1:] for g in longer) for longer in raw[1:]), raw[-1]]
    for table, occurrences in zip(counts, raw, strict=True):
        table.update({g: c for g, c in occurrences.items() if g[0] == BEGIN and g not in table})
    counts[0].pop((BEGIN,), None)
    return counts


def _unigrams(table: Counter[Ngram]) -> tuple[dict[Ngram, float], dict[Ngram, float]]:
    """Probabilities of single words, <unk> among them, and the still empty back-off weights."""
    discount, total = _discount(table), sum(table.values())
    words = dict.fromkeys([*table, (UNKNOWN,)])
    uniform = discount * len(table) / total / len(words)
    return {w: max(0.0, table[w] - discount) / total + uniform for w in words}, {}


def _smooth(
    table: Counter[Ngram], probability: dict[Ngram, float], gamma: dict[Ngram, float]
) -> None:
    """Add one order to ``probability``, and the back-off weights of its histories to ``gamma``."""
    discount = _discount(table)
    total: defaultdict[Ngram, int] = defaultdict(int)
    followers: defaultdict[Ngram, int] = defaultdict(int)
    for ngram, count in table.items():
        total[ngram[:-1]] += count
        followers[ngram[:-1]] += 1
    for history in total:
        gamma[history] = discount * followers[history] / total[history]
    for ngram, count in table.items():
        history, shorter = ngram[:-1], probability[ngram[1:]]
        probability[ngram] = (count - discount) / total[history] + gamma[history] * shorter


def _discount(table: Counter[Ngram]) -> float:
    """n1 / (n1 + 2 n2), kept away from 0 and 1 where the counts say nothing."""
    once = sum(1 for c in table.values() if c == 1)
    twice = sum(1 for c in table.values() if c == 2)
    return min(0.9, max(0.1, once / (once + 2 * twice))) if once else 0.5


def _read_ngram(
    line: str, order: int, log10: dict[Ngram, float], backoff: dict[Ngram, float]
) -> None:
    parts = line.split()
    ngram = tuple(parts[1 : order + 1])
    if len(ngram) != order or len(parts) > order + 2:
        raise ValueError(line)
    log10[ngram] = _finite(parts[0])
    if len(parts) == order + 2:
        backoff[ngram] = _finite(parts[-1])


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def run(arguments: Sequence[str]) -> None:
    """Read a text, write its model."""
    given = options(arguments, ("text", "order", "out"))
    for name in ("text", "out"):
        if name not in given:
            raise UserError(f"{name}=... is missing: text=FILE out=FILE [order=3]")
    order = given.get("order", "3")
    lines = [line for _, line in text_lines(given["text"], "the text")]
    sentences = [unicodedata.normalize("NFC", line).split() for line in lines]
    model = estimate(sentences, int(order) if order.isdecimal() else 0)
    model.write(given["out"])
    print(f"{given['out']}: {len(model.words)} words, {len(model.log10)} n-grams")


def main(arguments: Sequence[str]) -> int:
    """The command line; 0 or, after one line on standard error, 2."""
    return command(run, __doc__, arguments or ["--help"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
