"""Greedy decoding and prefix beam search."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.alphabet import Alphabet
from hybridtrain.tasks.speech.decoding import (
    BeamDecoder,
    DecoderOptions,
    GreedyDecoder,
    build_decoder,
)

AB = Alphabet("ab")


def frames(*rows: list[float]) -> torch.Tensor:
    """Probabilities per frame as a batch of one, (1, T, S)."""
    return torch.tensor([rows]).log()


def beam(alphabet: Alphabet = AB, **options: object) -> BeamDecoder:
    decoder = build_decoder(DecoderOptions.of({"kind": "beam", **options}), alphabet)
    assert isinstance(decoder, BeamDecoder)
    return decoder


def labelling(path: tuple[int, ...], blank: int) -> tuple[int, ...]:
    return tuple(label for label, _ in itertools.groupby(path) if label != blank)


def best_by_enumeration(log_probs: np.ndarray) -> tuple[tuple[int, ...], float]:
    """Sum the probability of every path there is, (T, S)."""
    total: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for path in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        p = math.exp(sum(log_probs[t, s] for t, s in enumerate(path)))
        total[labelling(path, log_probs.shape[1] - 1)] += p
    best = max(total, key=lambda key: total[key])
    return best, math.log(total[best])


def test_greedy_merges_repeats_and_removes_blanks() -> None:
    path = [0, 0, 2, 0, 1, 1, 2, 2]
    log_probs = torch.nn.functional.one_hot(torch.tensor([path]), 3).float()
    assert GreedyDecoder(AB)(log_probs, torch.tensor([8])) == ["aab"]


def test_greedy_stops_at_each_samples_length() -> None:
    log_probs = torch.nn.functional.one_hot(torch.tensor([[0, 1, 0], [1, 2, 1]]), 3).float()
    assert GreedyDecoder(AB)(log_probs, torch.tensor([2, 1])) == ["ab", "b"]


def test_beam_prefers_the_best_labelling_to_the_best_path() -> None:
    # blank-blank has 0.36, the best path; a-a, a-blank and blank-a together have 0.64.
    log_probs, lengths = frames([0.4, 0.0, 0.6], [0.4, 0.0, 0.6]), torch.tensor([2])
    assert GreedyDecoder(AB)(log_probs, lengths) == [""]
    assert beam()(log_probs, lengths) == ["a"]


@pytest.mark.parametrize("seed", range(20))
def test_a_full_beam_finds_the_exact_most_probable_labelling(seed: int) -> None:
    rng = np.random.default_rng(seed)
    symbols, steps = [(2, 7), (3, 5), (4, 4)][seed % 3]
    log_probs = np.log(rng.dirichlet(np.full(symbols + 1, 0.5), steps))
    found, score = beam(Alphabet("abcd"[:symbols]), beam_width=10_000).search(log_probs)
    labels, exact = best_by_enumeration(log_probs)
    assert tuple(found) == labels
    assert score == pytest.approx(exact, abs=1e-9)


def test_a_prefix_that_left_the_beam_and_returns_is_not_counted_twice() -> None:
    rng = np.random.default_rng(5)
    log_probs = np.log(rng.dirichlet(np.ones(4), 12))
    for width in (2, 3, 5, 8):
        _, score = beam(Alphabet("abc"), beam_width=width).search(log_probs)
        _, full = beam(Alphabet("abc"), beam_width=100_000).search(log_probs)
        assert score <= full + 1e-9


def test_beam_copes_with_impossible_labels_and_no_frames() -> None:
    log_probs = frames([1.0, 0.0, 0.0], [0.0, 1.0, 0.0])
    assert beam(beam_width=2)(log_probs, torch.tensor([2])) == ["ab"]
    assert beam()(log_probs, torch.tensor([0])) == [""]
    no_path = torch.full((1, 3, 3), float("nan")), torch.full((1, 3, 3), -float("inf"))
    assert [beam()(each, torch.tensor([3])) for each in no_path] == [[""], [""]]


def test_cutoffs_look_only_at_probable_labels() -> None:
    log_probs, lengths = frames([0.30, 0.25, 0.45]), torch.tensor([1])
    assert beam(cutoff_prob=0.4)(log_probs, lengths) == [""]
    assert beam(cutoff_top_n=1)(frames([0.5, 0.2, 0.3]), lengths) == ["a"]


def test_defaults_are_those_of_deepspeech() -> None:
    options = DecoderOptions()
    assert (options.lm_alpha, options.lm_beta) == (0.931289039105002, 1.1834137581510284)
    assert (options.beam_width, options.cutoff_prob, options.cutoff_top_n) == (1024, 1.0, 300)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "magic"}, "greedy or beam"),
        ({"width": 3}, "known are beam_width, cutoff"),
        ({"kind": "beam", "beam_width": 0}, "from 1 on"),
        ({"kind": "greedy", "lm": "x.arpa"}, "decoder=beam"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DecoderOptions.of(options)
