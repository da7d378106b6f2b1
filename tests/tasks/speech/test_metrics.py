"""Error rates: micro-averaged, clipped at 1."""

from __future__ import annotations

import pytest

from hybridtrain.tasks.speech.metrics import ErrorCounts, Sentence, count_errors, rate, select


@pytest.mark.parametrize(
    ("truth", "heard", "words", "chars"),
    [
        ("the cat sat", "the cat sat", (0, 3), (0, 11)),
        ("the cat sat", "the bat sat", (1, 3), (1, 11)),
        ("the cat sat", "the cat", (1, 3), (4, 11)),
        ("the cat", "the  cat ", (0, 2), (0, 7)),  # blanks do not count
        ("a", "a b c", (2, 1), (4, 1)),
        ("", "a b", (2, 0), (3, 0)),
        ("abc", "", (1, 1), (3, 3)),
        ("ab", "a b", (2, 1), (1, 2)),
    ],
)
def test_wrong_words_and_characters_are_counted(
    truth: str, heard: str, words: tuple[int, int], chars: tuple[int, int]
) -> None:
    assert count_errors([truth], [heard]) == ErrorCounts(*words, *chars)


def test_rates_are_averaged_over_words_not_over_sentences() -> None:
    counts = count_errors(["one two three four", "five"], ["one two three four", "six"])
    assert counts.wer == 1 / 5  # the macro average would be 1/2


def test_counts_of_parts_add_up_to_the_counts_of_the_whole() -> None:
    truth, heard = ["one two", "three", "four five"], ["one", "tree", "for five six"]
    parts = [count_errors([t], [h]) for t, h in zip(truth, heard, strict=True)]
    assert tuple(map(sum, zip(*parts, strict=True))) == count_errors(truth, heard)


def test_a_rate_is_at_most_one() -> None:
    assert count_errors(["a"], ["b c d e"]).wer == 1.0
    assert rate(0, 0) == 0.0
    assert rate(3, 0) == 1.0


def test_nothing_to_count_is_no_error() -> None:
    assert count_errors([], []) == ErrorCounts()


def test_sentences_are_chosen_alike_in_any_order_whatever_their_losses() -> None:
    losses = [1.0, float("nan"), 3.0, float("nan"), 2.0]
    found = [Sentence(str(n), "a", "a", loss, 0.0, 0.0) for n, loss in enumerate(losses)]
    first = select(found, 2)
    assert [x["file"] for x in first["best"]] == ["1", "3"]
    assert repr(select(found[::-1], 2)) == repr(first)
