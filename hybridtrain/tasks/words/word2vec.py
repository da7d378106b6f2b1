"""``task=word2vec``: skip-gram and CBOW (Mikolov et al. 2013, arXiv:1301.3781, 1310.4546).

Legend: V words, D dimensions, N numbers of a stretch, M predictions, K words drawn for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from hybridtrain.tasks.shared_tables import MakeOptimizer, array, check_size
from hybridtrain.tasks.words.questions import Vectors
from hybridtrain.tasks.words.text_data import Floats, Ints, Paths, alias_table, huffman
from hybridtrain.tasks.words.vectors_module import WordVectors
from hybridtrain.util.option_types import Above0, Natural, NotNegative, Positive, typed

Architecture = Literal["skip_gram", "cbow"]
Output = Literal["negative", "hierarchical"]
_POWER = 0.75  # of the counts: how often a word is drawn


class Word2Vec(WordVectors):
    """Vectors of words that predict their neighbours.

    Args:
        dim: D.
        architecture: ``skip_gram`` or ``cbow``.
        output: ``negative`` sampling or ``hierarchical`` softmax.
        window: neighbours on each side, at most; each word's window is shortened at random.
        negative: K.
        sample: the share of the text from which on a frequent word is thinned out; 0: none is.
        rate: learning rate of compiled steps at the beginning; it goes down in a straight line.
        min_rate: where it ends.
        seed: of windows, of words drawn, and of what is left out.
        compiled, save, directory, project, optimizer: see :class:`WordVectors`.
    """

    inputs: nn.Embedding  # made by configure_model, as the outputs
    outputs: nn.Embedding
    _keep: Floats  # made by on_fit_start, as the draws
    _draws: tuple[Floats, Ints]

    @typed("model.")
    def __init__(
        self,
        dim: int = 100,
        architecture: Architecture = "skip_gram",
        output: Output = "negative",
        window: Positive = 5,
        negative: Positive = 5,
        sample: NotNegative = 1e-3,
        rate: Above0 = 0.025,
        min_rate: NotNegative = 1e-4,
        seed: Natural = 0,
        compiled: bool | Literal["auto"] = "auto",
        save: Sequence[str] = ("vectors.bin",),
        directory: str | None = None,
        project: bool = False,
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        super().__init__(dim, compiled, save, directory, project, optimizer)
        self.architecture, self.output = architecture, output
        self.window, self.negative, self.sample = window, negative, sample
        self.rate, self.min_rate, self.seed = rate, min_rate, seed
        self._paths: Paths | None = None

    def configure_model(self) -> None:
        """Inputs at random, outputs at 0, as soon as there are words."""
        if not self.has_words or hasattr(self, "inputs"):
            return
        n = len(self.vocabulary)
        what = f"vectors of {n:,} words and {self.dim} dimensions"
        check_size(8 * n * self.dim, self.workers, what)
        self.inputs = nn.Embedding(n, self.dim, sparse=True)
        # As gensim: with half of it, as in the authors' program, 5 epochs end 1 % higher.
        nn.init.uniform_(self.inputs.weight, -1.0 / self.dim, 1.0 / self.dim)
        rows = n if self.output == "negative" else n - 1
        self.outputs = nn.Embedding(rows, self.dim, sparse=True)
        nn.init.zeros_(self.outputs.weight)

    def vectors(self) -> Vectors:
        """(V, D): the inputs."""
        return self.inputs.weight.detach().cpu().numpy()

    def _tables(self) -> tuple[Tensor, Tensor]:
        return self.inputs.weight, self.outputs.weight

    def on_fit_start(self) -> None:
        """Compute subsampling, the table of draws and the tree from the counts of words."""
        counts = self.vocabulary.counts
        self._keep = self.vocabulary.kept(self.sample)
        self._draws = alias_table(counts**_POWER)
        if self.output == "hierarchical":
            self._paths = huffman(counts)

    # ---- steps ----------------------------------------------------------------------------------

    def training_step(self, batch: tuple[int, Tensor], batch_idx: int) -> Tensor:
        """One stretch of text; returns the mean loss of a prediction."""
        index, numbers = batch
        seed = hash((self.seed, self.current_epoch, int(index))) & 0x7FFFFFFF
        if self.steps_compiled:
            loss = torch.tensor(self._step(numbers.numpy(), seed))
        else:
            loss = self.loss(numbers.cpu().numpy(), np.random.default_rng(seed))
        self.tell(loss.detach(), self.num_samples(batch))
        return loss

    def _step(self, numbers: Ints, seed: int) -> float:
        from hybridtrain.tasks.words import word_kernels as kernels

        inputs, outputs = map(array, self._tables())
        rate = self.rate + (self.min_rate - self.rate) * self.progress()
        step = kernels.skip_gram if self.architecture == "skip_gram" else kernels.cbow
        drawn = self._keep, (*self._draws, self.negative), self._paths, self.window
        loss, seen = step(inputs, outputs, numbers, *drawn, inputs.dtype.type(rate), seed)
        return loss / max(seen, 1)

    def loss(self, numbers: Ints, random: np.random.Generator) -> Tensor:
        """Mean loss of all predictions in a stretch, by torch's operations."""
        left = thinned(numbers, self._keep, random)
        centres, others = neighbours(left, self.window, random)
        if not len(centres):
            return self.inputs.weight.sum() * 0.0
        if self.architecture == "skip_gram":
            rows = torch.from_numpy(left[centres]).to(self.device)
            hidden, words = self.inputs(rows), left[others]
        else:
            at, near, starts = bags(centres, others)
            hidden, words = self._mean(left[near], starts), left[at]
        if self.output == "hierarchical":
            return self.hierarchical(hidden, words)
        drawn = draw_rows(*self._draws, (len(words), self.negative), random)
        return self.sampled(hidden, words, drawn)

    def _mean(self, rows: Rows, starts: Any) -> Tensor:
        """Mean of each bag; each row gets the gradient undivided, as in the authors' program."""
        summed = F.embedding_bag(
            torch.from_numpy(rows).to(self.device),
            self.inputs.weight,
            torch.from_numpy(starts).to(self.device),
            mode="sum",
            sparse=True,
        )
        sizes = torch.from_numpy(np.diff(starts, append=len(rows))).to(self.device)
        return summed - (summed - summed / sizes[:, None]).detach()

    def sampled(self, hidden: Tensor, words: Rows, drawn: Rows) -> Tensor:
        """Negative sampling: mean over ``hidden`` (M, D) of the losses of K + 1 predictions each.

        Rows ``drawn`` (M, K) that are the word itself, (M,), are left out.
        """
        rows = torch.from_numpy(np.concatenate((words[:, None], drawn), 1)).to(self.device)
        logits = torch.einsum("md,mkd->mk", hidden, self.outputs(rows))
        stays = (rows[:, 1:] != rows[:, :1]).to(logits.dtype)
        right = F.softplus(-logits[:, 0])
        wrong = (F.softplus(logits[:, 1:]) * stays).sum(1)
        return (right + wrong).mean()

    def hierarchical(self, hidden: Tensor, words: Rows) -> Tensor:
        """Hierarchical softmax: mean over ``hidden`` (M, D) of the losses on the paths."""
        assert self._paths is not None, "on_fit_start has made them"
        starts, all_nodes, all_turns = self._paths
        lengths = starts[words + 1] - starts[words]
        owner = np.repeat(np.arange(len(words)), lengths)
        offset = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        at = starts[words][owner] + offset
        nodes = torch.from_numpy(all_nodes[at].astype(np.int64)).to(self.device)
        turns = torch.from_numpy(all_turns[at].astype(np.float32)).to(self.device)
        whose = torch.from_numpy(owner).to(self.device)
        logits = (hidden[whose] * self.outputs(nodes)).sum(1)
        return F.softplus(torch.where(turns > 0, logits, -logits)).sum() / len(words)


Rows = NDArray[np.int64]


# ---- predictions of a stretch, all at once: steps through torch ----------------------------------


def thinned(numbers: Ints, keep: Floats, random: np.random.Generator) -> Rows:
    """A stretch (N,) after subsampling."""
    chance = random.random(len(numbers), dtype=np.float32)
    stays = (numbers < 0) | (chance < keep[np.maximum(numbers, 0)])
    return numbers[stays].astype(np.int64)


def neighbours(left: Rows, window: int, random: np.random.Generator) -> tuple[Rows, Rows]:
    """(M,) each: places of words, and of their neighbours within a window shortened at random."""
    lines = np.cumsum(left < 0)
    reach = random.integers(1, window + 1, len(left))
    centres, others = [], []
    for distance in range(1, window + 1):
        first = np.arange(len(left) - distance)
        near = (lines[first] == lines[first + distance]) & (left[first] >= 0)
        for one, other in ((first, first + distance), (first + distance, first)):
            chosen = near & (reach[one] >= distance)
            centres.append(one[chosen])
            others.append(other[chosen])
    return np.concatenate(centres), np.concatenate(others)


def draw_rows(
    kept: Floats, other: Ints, shape: tuple[int, int], random: np.random.Generator
) -> Rows:
    """Draw rows from an alias table."""
    rows = random.integers(0, len(kept), shape)
    chance = random.random(shape, dtype=np.float32)
    return np.where(chance < kept[rows], rows, other[rows])


def bags(centres: Rows, others: Rows) -> tuple[Rows, Rows, Any]:
    """The neighbours of each word together: the words, all neighbours, where each bag begins."""
    order = np.argsort(centres, kind="stable")
    words, starts = np.unique(centres[order], return_index=True)
    return words, others[order], starts
