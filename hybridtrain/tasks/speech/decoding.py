"""From per-frame probabilities to text: greedy, and CTC prefix beam search.

CTC gives each *path* (one label or blank per frame) a probability; a *labelling* is a path with
repeats merged and blanks removed, and its probability is the sum over its paths. Greedy decoding
takes the best path. Prefix beam search (Hannun et al. 2014, arXiv:1408.2873) sums paths as it goes
and finds the best labelling, exactly if the beam is wide enough. With a language model,
flashlight-text and KenLM search over the words of a lexicon by DeepSpeech's score,
ln P(labels | sound) + alpha ln P(words) + beta * words.

Shapes: B samples, T frames, S labels with the blank last, K beams.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.alphabet import Alphabet
from hybridtrain.tasks.speech.lm import NgramModel
from hybridtrain.util.files import open_input, text_lines
from hybridtrain.util.option_types import Positive, Range, check_fields, check_names

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Decoder = Callable[[Tensor, Tensor], list[str]]  # log_probs (B, T, S), lengths (B,) -> B texts


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """Options of a decoder; names and defaults are those of DeepSpeech's flags.

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
        check_names("decoder.", options or {}, [field.name for field in fields(cls)])
        return cls(**(options or {}))


def build_decoder(options: DecoderOptions, alphabet: Alphabet) -> Decoder:
    """The decoder that ``options`` describe; with ``lm`` it needs the extra ``lm``."""
    if options.kind == "greedy":
        return GreedyDecoder(alphabet)
    if options.lm is None:
        return BeamDecoder(alphabet, options)
    return LanguageModelDecoder(alphabet, options)


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
        if len(self.nodes) == 0:  # no path has a probability, or the net gives NaN
            return
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


# ---- with a language model -----------------------------------------------------------------------

IMPOSSIBLE = -1e4  # log-probability of other labels in the frame that ends the last word


def _flashlight() -> Any:
    """The bindings, or one line that says how to get them."""
    try:
        from flashlight.lib.text import decoder
    except ImportError as error:
        raise UserError(
            "decoding with a language model needs flashlight-text (Python below 3.13):"
            " pip install 'hybridtrain[lm]', or leave lm unset"
        ) from error
    return decoder


class LanguageModelDecoder:
    """CTC beam search with a lexicon and an n-gram model, one word at a time.

    flashlight walks a trie of the words' spellings. Every spelling ends with the blank between
    words, so that a word is scored when it is complete, and one more frame that surely is that
    blank ends the last word. KenLM returns log10, hence the factor ln 10 on alpha.
    """

    def __init__(self, alphabet: Alphabet, options: DecoderOptions) -> None:
        """Read ``options.lm`` and the lexicon; ``UserError`` if they or the package are missing."""
        self._library = _flashlight()
        if " " not in alphabet.symbols:
            raise UserError(
                "decoding with a language model needs words: the alphabet has no blank (' ')"
            )
        self.alphabet = alphabet
        self.space = alphabet.symbols.index(" ")
        self.words = read_lexicon(options, alphabet)
        self._decoder = self._build(options)

    def __call__(self, log_probs: Tensor, lengths: Tensor) -> list[str]:
        """log_probs (B, T, S), lengths (B,) -> B texts."""
        rows = log_probs.float().cpu()
        return [self._text(row[:n]) for row, n in zip(rows, lengths.tolist(), strict=True)]

    def _text(self, row: Tensor) -> str:
        """One sample, (T, S). -inf (a label that cannot be) would make flashlight's sums NaN."""
        last = torch.full((1, row.shape[1]), IMPOSSIBLE)
        last[0, self.space] = 0.0
        frames = torch.cat([row.clamp_min(IMPOSSIBLE), last]).contiguous()
        results = self._decoder.decode(frames.data_ptr(), *frames.shape)
        found = results[0].words if results else []  # none: the net gives NaN
        return " ".join(self.words[word] for word in found if word >= 0)

    def _build(self, options: DecoderOptions) -> Any:
        library = self._library
        self._lm = self._read_lm(str(options.lm))
        settings = library.LexiconDecoderOptions(
            beam_size=options.beam_width,
            beam_size_token=min(options.cutoff_top_n, len(self.alphabet) + 1),
            beam_threshold=math.inf,
            lm_weight=options.lm_alpha * math.log(10),
            word_score=options.lm_beta,
            unk_score=-math.inf,
            sil_score=0.0,
            log_add=True,
            criterion_type=library.CriterionType.CTC,
        )
        unknown = len(self.words)
        blank = self.alphabet.blank
        return library.LexiconDecoder(
            settings, self._trie(), self._lm, self.space, blank, unknown, [], False
        )

    def _read_lm(self, path: str) -> Any:
        from flashlight.lib.text.decoder.kenlm import KenLM
        from flashlight.lib.text.dictionary import Dictionary

        dictionary = Dictionary()
        for word in [*self.words, "<unk>"]:
            dictionary.add_entry(word)
        dictionary.set_default_index(len(self.words))
        try:
            with _quiet():
                return KenLM(path, dictionary)
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[-1]
            raise UserError(f"cannot read the language model {path}: {reason}") from error

    def _trie(self) -> Any:
        """Spellings, each with its word's unigram score for the hope of unfinished words."""
        trie = self._library.Trie(len(self.alphabet) + 1, self.space)
        start = self._lm.start(False)
        for index, word in enumerate(self.words):
            _, score = self._lm.score(start, index)
            trie.insert([*self.alphabet.encode(word), self.space], index, score)
        trie.smear(self._library.SmearingMode.MAX)
        return trie


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep KenLM's progress bar, written by C++, off standard error."""
    kept, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(sink)


def read_lexicon(options: DecoderOptions, alphabet: Alphabet) -> list[str]:
    """The words to choose from: the lexicon's, else the ARPA model's; only those we can spell."""
    path = options.lexicon or str(options.lm)
    with open_input(str(options.lm), "the language model (ARPA or KenLM binary)") as file:
        binary = file.read(6) == b"mmap l"
    if options.lexicon:
        words = list(_words_of(path))
    elif binary:
        raise UserError(f"{path} is a KenLM binary, which hides its words: add lexicon=FILE")
    else:
        words = NgramModel.read(path).words
    spellable = sorted({word for word in words if alphabet.has(word)})
    if not spellable:
        raise UserError(f"no word of {path} can be written with the alphabet {alphabet.symbols!r}")
    return spellable


def _words_of(lexicon: str) -> Iterator[str]:
    for number, line in text_lines(lexicon, "the lexicon"):
        words = line.split()
        if len(words) > 1:
            raise UserError(
                f"{lexicon}, line {number}: {line.strip()[:60]!r} is not one word; write one per "
                "line, without its spelling"
            )
        yield from words
