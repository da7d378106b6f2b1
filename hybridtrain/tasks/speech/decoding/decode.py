"""From per-frame probabilities to text: greedy, and CTC prefix beam search.

CTC gives each *path* (one label or blank per frame) a probability; a *labelling* is a path with
repeats merged and blanks removed, and its probability is the sum over its paths. Greedy decoding
takes the best path. Prefix beam search (Hannun et al. 2014, arXiv:1408.2873) sums paths as it goes
and finds the best labelling, exactly if the beam is wide enough. With a language model the words
are rescored as they are completed: `lm_decode.py`.

Shapes: B samples, T frames, S labels with the blank last, K beams.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.alphabet import Alphabet
from hybridtrain.util.option_types import Positive, Range, check_fields

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Decoder(Protocol):
    """Turns log-probabilities into one text per sample."""

    def __call__(self, log_probs: Tensor, lengths: Tensor) -> list[str]:
        """log_probs (B, T, S), lengths (B,) -> B texts."""


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """What to decode with; names and defaults are those of DeepSpeech's flags.

    ``kind``: greedy or beam. ``beam_width``: how many prefixes stay alive. ``cutoff_top_n`` and
    ``cutoff_prob``: look only at so many, or so much probability, of the labels of each frame.
    ``lm``: an n-gram model (ARPA text or KenLM binary). ``lexicon``: a file of the words allowed,
    one per line; without it the ARPA model's own words. ``lm_alpha``: weight of ln P(words),
    ``lm_beta``: added per word.
    """

    kind: Literal["greedy", "beam"] = "greedy"
    beam_width: Positive = 1024
    cutoff_top_n: Positive = 300
    cutoff_prob: Annotated[float, Range(0, 1, "(")] = 1.0
    lm: str | None = None
    lexicon: str | None = None
    lm_alpha: float = 0.931289039105002
    lm_beta: float = 1.1834137581510284

    def __post_init__(self) -> None:
        check_fields(self, "decoder.")
        if self.lm is not None and self.kind == "greedy":
            raise UserError("a language model (lm=...) works with decoder=beam, not with greedy")

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> DecoderOptions:
        """From plain data; an unknown name is a ``UserError`` that lists the known ones."""
        known = [field.name for field in fields(cls)]
        for name in options or {}:
            if name not in known:
                raise UserError(f"unknown decoder option {name!r}: choose from {', '.join(known)}")
        return cls(**(options or {}))


def build_decoder(options: DecoderOptions, alphabet: Alphabet) -> Decoder:
    """The decoder that ``options`` describe; with ``lm`` it needs the extra ``lm``."""
    if options.kind == "greedy":
        return GreedyDecoder(alphabet)
    if options.lm is None:
        return BeamDecoder(alphabet, options)
    module = importlib.import_module("hybridtrain.tasks.speech.decoding.lm_decode")
    return module.LanguageModelDecoder(alphabet, options)


class GreedyDecoder:
    """The best label of every frame, repeats merged, blanks removed."""

    def __init__(self, alphabet: Alphabet) -> None:
        self.alphabet = alphabet

    def __call__(self, log_probs: Tensor, lengths: Tensor) -> list[str]:
        """log_probs (B, T, S), lengths (B,) -> B texts."""
        paths = log_probs.argmax(-1).cpu().numpy()  # (B, T)
        return [self._text(path[:n]) for path, n in zip(paths, lengths.tolist(), strict=True)]

    def _text(self, path: Ints) -> str:
        changed = np.diff(path, prepend=-1) != 0
        return self.alphabet.decode(path[changed & (path != self.alphabet.blank)].tolist())


class BeamDecoder:
    """The most probable labelling, by prefix beam search without a language model."""

    def __init__(self, alphabet: Alphabet, options: DecoderOptions) -> None:
        self.alphabet = alphabet
        self.options = options

    def __call__(self, log_probs: Tensor, lengths: Tensor) -> list[str]:
        """log_probs (B, T, S), lengths (B,) -> B texts."""
        arrays = log_probs.double().cpu().numpy()
        pairs = zip(arrays, lengths.tolist(), strict=True)
        return [self.alphabet.decode(self.search(array[:n])[0]) for array, n in pairs]

    def search(self, log_probs: Floats) -> tuple[list[int], float]:
        """log_probs (T, S) -> the best labelling, and the log-probability of its paths found."""
        beam = _Beam(log_probs.shape[1] - 1, self.options.beam_width)
        for frame in log_probs:
            beam.step(frame, self._candidates(frame))
        return beam.best()

    def _candidates(self, frame: Floats) -> Ints:
        """Labels worth a look in this frame (S,), without the blank."""
        order = np.argsort(-frame, kind="stable")[: self.options.cutoff_top_n]
        if self.options.cutoff_prob < 1.0:
            below = np.cumsum(np.exp(frame[order])) - np.exp(frame[order])
            order = order[below < self.options.cutoff_prob]
        return order[order != len(frame) - 1]


class _Beam:
    """K prefixes with the log-probability of all their paths, split by whether a blank comes last.

    Prefixes are nodes of a trie (node 0 is empty), so a prefix that leaves the beam and returns is
    the same node, and its children still know it as their parent.
    """

    def __init__(self, blank: int, width: int) -> None:
        self.blank, self.width = blank, width
        self.children: dict[tuple[int, int], int] = {}  # (parent node, label) -> node
        self.parent, self.label = [-1], [-1]  # per node
        self.nodes: Ints = np.zeros(1, np.int64)  # (K,)
        self.ends_in_blank: Floats = np.zeros(1)  # (K,) log-probability
        self.ends_in_label: Floats = np.full(1, -np.inf)  # (K,) log-probability

    def step(self, frame: Floats, labels: Ints) -> None:
        """Take one frame (S,) and look at ``labels`` (L,) only."""
        total = np.logaddexp(self.ends_in_blank, self.ends_in_label)  # (K,)
        last = np.array([self.label[node] for node in self.nodes])  # (K,), -1 for the empty prefix
        repeat = labels == last[:, None]  # (K, L)
        grown = frame[labels] + np.where(repeat, self.ends_in_blank[:, None], total[:, None])
        blank = total + frame[self.blank]
        same = np.where(last >= 0, self.ends_in_label + frame[last], -np.inf)
        self._merge(grown, same, last, labels)
        self._select(blank, same, grown, labels)

    def _merge(self, grown: Floats, same: Floats, last: Ints, labels: Ints) -> None:
        """A prefix grown into one that is in the beam already adds to it, in place."""
        place = {node: k for k, node in enumerate(self.nodes.tolist())}
        column = {label: j for j, label in enumerate(labels.tolist())}
        for k, node in enumerate(self.nodes.tolist()):
            parent, j = place.get(self.parent[node]), column.get(int(last[k]))
            if parent is not None and j is not None:
                same[k] = np.logaddexp(same[k], grown[parent, j])
                grown[parent, j] = -np.inf

    def _select(self, blank: Floats, same: Floats, grown: Floats, labels: Ints) -> None:
        """Keep the ``width`` best of the prefixes that stayed and of those that grew."""
        scores = np.concatenate([np.logaddexp(blank, same), grown.ravel()])
        order = np.argsort(-scores, kind="stable")[: self.width]
        order = order[scores[order] > -np.inf]
        kept, new = order[order < len(blank)], order[order >= len(blank)] - len(blank)
        added = [
            self._child(int(self.nodes[i // len(labels)]), int(labels[i % len(labels)]))
            for i in new
        ]
        self.ends_in_blank = np.concatenate([blank[kept], np.full(len(new), -np.inf)])
        self.ends_in_label = np.concatenate([same[kept], grown.ravel()[new]])
        self.nodes = np.concatenate([self.nodes[kept], np.array(added, np.int64)])

    def _child(self, parent: int, label: int) -> int:
        node = self.children.setdefault((parent, label), len(self.label))
        if node == len(self.label):
            self.parent.append(parent)
            self.label.append(label)
        return node

    def best(self) -> tuple[list[int], float]:
        """Labels of the best prefix, and its log-probability."""
        if len(self.nodes) == 0:  # every path has probability 0: nothing was heard
            return [], -np.inf
        total = np.logaddexp(self.ends_in_blank, self.ends_in_label)
        node, labels = int(self.nodes[total.argmax()]), []
        while node:
            labels.append(self.label[node])
            node = self.parent[node]
        return labels[::-1], float(total.max())
