"""Letters with marks, composed or not, and characters that only look like those of the alphabet."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.alphabet import Alphabet
from hybridtrain.tasks.speech.decoding import DecoderOptions, read_lexicon
from hybridtrain.tasks.speech.lm import NgramModel, main
from hybridtrain.tasks.speech.metrics import as_markdown, count_errors

FORMS = ("NFC", "NFD")
LETTERS = " abcdeouäöüéêệñß한하क"  # letters of which each has one composed form


def in_form(form: str, text: str) -> str:
    return unicodedata.normalize(form, text)


@settings(deadline=None, max_examples=100)
@given(st.text(LETTERS, max_size=20), st.sampled_from(FORMS), st.sampled_from(FORMS))
def test_a_text_has_the_same_labels_composed_or_decomposed(text: str, one: str, other: str) -> None:
    alphabet = Alphabet(in_form(one, LETTERS))
    labels = alphabet.encode(in_form(other, text))
    assert labels == [LETTERS.index(letter) for letter in text]
    assert alphabet.decode(labels) == text


def test_a_decomposed_letter_in_an_alphabet_file_is_one_character(tmp_path: Path) -> None:
    file = tmp_path / "alphabet.txt"
    file.write_text("a\nu\nu\u0308\ne\u0323\u0302\n", encoding="utf-8")
    assert Alphabet.of(str(file)).symbols == "auüệ"


def test_marks_may_be_symbols_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "alphabet.txt"
    file.write_text("a\nu\nx\n\u0308\n\u030c\n", encoding="utf-8")
    alphabet = Alphabet.from_file(file)
    assert alphabet.encode("ü") == alphabet.encode("u\u0308") == [1, 3]
    assert alphabet.encode("x\u030c") == [2, 4]
    assert Alphabet.of(alphabet.symbols) == alphabet, "as a checkpoint has it"
    assert Alphabet("a\u0958").encode("\u0958a\u0915\u093c") == [1, 0, 1], "it is never composed"


def test_marks_that_are_composed_with_no_letter_are_named_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "alphabet.txt"
    file.write_text("a\nx\u030c\n", encoding="utf-8")
    with pytest.raises(
        UserError, match=r"line 2: .* \(U\+0078 U\+030C\) is not one .* each a line"
    ):
        Alphabet.from_file(file)


@pytest.mark.parametrize(
    ("text", "named", "hint"),
    [
        ("a\u00a0b", r"'\xa0' (U+00A0 NO-BREAK SPACE)", "' '"),
        ("a\u200bb", r"'\u200b' (U+200B ZERO WIDTH SPACE)", None),
        ("a\ufeffb", r"'\ufeff' (U+FEFF ZERO WIDTH NO-BREAK SPACE)", None),
        ("don\u2019t", "'\u2019' (U+2019 RIGHT SINGLE QUOTATION MARK)", '"\'"'),
        ("stra\u00dfe", "'ß' (U+00DF LATIN SMALL LETTER SHARP S)", None),
        ("\u0130s", "'\u0130' (U+0130 LATIN CAPITAL LETTER I WITH DOT ABOVE)", None),
        ("u\u0308ber", "'ü' (U+00FC LATIN SMALL LETTER U WITH DIAERESIS)", None),
        ("x\u030c", "'\u030c' (U+030C COMBINING CARON)", None),
        ("a\tb", r"'\t' (U+0009)", None),
        ("Fine", "'F'", "'f'"),
        ("a?", "'?'", None),
    ],
)
def test_a_character_outside_the_alphabet_is_named_by_its_code_point(
    text: str, named: str, hint: str | None
) -> None:
    with pytest.raises(UserError) as error:
        Alphabet().encode(text)
    line = str(error.value)
    assert line.startswith(f"the character {named} in {text!r} is not in the alphabet")
    assert line.partition(" (it has ")[2].partition("): ")[0] == (hint or "")


@pytest.mark.parametrize("form", FORMS)
def test_error_rates_compare_letters_whatever_their_form(form: str) -> None:
    truth, heard = "über die Größe", in_form(form, "über die Größe")
    assert count_errors([truth], [heard]) == count_errors([truth], [truth])
    assert count_errors([heard], [truth]).chars == len(truth)


@pytest.mark.parametrize("form", FORMS)
def test_words_of_lexicon_and_language_model_are_spelled_in_either_form(
    form: str, tmp_path: Path
) -> None:
    lexicon, text, arpa = (tmp_path / name for name in ("words.txt", "text.txt", "words.arpa"))
    lexicon.write_text(in_form(form, "größe\nüber\n"), encoding="utf-8")
    text.write_text(f"\ufeff{in_form(form, 'über die größe')}\nüber größe\n", encoding="utf-8")
    assert main([f"text={text}", f"out={arpa}", "order=2"]) == 0
    assert sorted(NgramModel.read(arpa).words) == ["die", "größe", "über"], "each word is one"
    alphabet = Alphabet(in_form("NFD", " abcdefghijklmnopqrstuvwxyzäöüß"))
    options = DecoderOptions(kind="beam", lm=str(arpa), lexicon=str(lexicon))
    words = [in_form("NFC", word) for word in read_lexicon(options, alphabet)]
    assert words == ["größe", "über"]


def test_a_lexicon_with_spellings_is_refused_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("a\nhello\th e l l o |\n")
    (tmp_path / "words.arpa").write_text("")
    options = DecoderOptions(
        kind="beam", lm=str(tmp_path / "words.arpa"), lexicon=str(tmp_path / "words.txt")
    )
    with pytest.raises(UserError, match=r"words\.txt, line 2: .* is not one word; write one per"):
        read_lexicon(options, Alphabet())


def test_a_bar_in_a_sentence_does_not_make_another_cell_of_a_table() -> None:
    assert as_markdown([("a|b", "c")]).splitlines()[-1] == "| a\\|b | c |"
