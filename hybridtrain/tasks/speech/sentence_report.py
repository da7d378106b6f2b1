"""The sentences of a test: best, median and worst, as a table for people and as plain data."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hybridtrain.tasks.speech.metrics import count_errors


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
    ordered = sorted(sentences, key=lambda s: (s.wer, -s.loss))
    n = len(ordered)
    best = list(range(min(count, n)))
    worst = [i for i in range(n - 1, max(n - 1 - count, -1), -1) if i not in best]
    start = max(0, (n - count) // 2)
    taken = {*best, *worst}
    median = [i for i in range(start, min(start + count, n)) if i not in taken]
    groups = {"best": best, "median": median, "worst": worst}
    return {name: [asdict(ordered[i]) for i in indices] for name, indices in groups.items()}


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
    return head + "\n".join(f"| {truth} | {heard} |" for truth, heard in rows)
