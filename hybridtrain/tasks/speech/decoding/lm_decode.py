"""Beam search over the words of a lexicon, scored by an n-gram model: flashlight-text and KenLM.

The score of a text is that of DeepSpeech: ln P(labels | sound) + alpha ln P(words) + beta * words.
flashlight walks a trie of the words' spellings; here every spelling ends with the blank between
words, so that a word is scored when it is complete, and one more frame that surely is that
blank ends the last word. KenLM answers in log10, hence the factor ln 10 on alpha.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.alphabet import Alphabet
from hybridtrain.tasks.speech.decoding.decode import DecoderOptions
from hybridtrain.tasks.speech.lm import NgramModel
from hybridtrain.util.input_files import open_input, read_text

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
    """CTC beam search with a lexicon and an n-gram model, one word at a time."""

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
        return " ".join(self.words[word] for word in results[0].words if word >= 0)

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
        words = read_text(path, "the lexicon").split()
    elif binary:
        raise UserError(f"{path} is a KenLM binary, which hides its words: add lexicon=FILE")
    else:
        words = NgramModel.read(path).words
    spellable = sorted({word for word in words if set(word) <= set(alphabet.symbols)})
    if not spellable:
        raise UserError(f"no word of {path} can be written with the alphabet {alphabet.symbols!r}")
    return spellable
