"""Vectors in files, and what can be asked of them."""

from __future__ import annotations

import gzip
import math
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from hybridtrain.cli.commands import vectors as command
from hybridtrain.errors import UserError
from hybridtrain.tasks.words.questions import (
    KnownWords,
    rank_correlation,
    read_vectors,
    write_vectors,
)

WORDS = ["king", "queen", "man", "woman", "größe", "apple"]
VECTORS = np.array(
    [[1, 1, 0], [1, -1, 0], [0.1, 1, 0], [0.1, -1, 0], [0, 0, -1], [0, 0, 1]], dtype=np.float32
)


@pytest.mark.parametrize("name", ["v.txt", "v.bin", "v.txt.gz", "v.bin.gz"])
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((6, 7)).astype(np.float32)
    write_vectors(tmp_path / "new" / name, WORDS, values)
    words, found = read_vectors(tmp_path / "new" / name)
    assert words == WORDS and np.array_equal(found, values)


@pytest.mark.parametrize("name", ["v.txt", "v.bin", "v.txt.gz", "v.bin.gz"])
def test_gensim_opens_what_is_written(name: str, tmp_path: Path) -> None:
    models = pytest.importorskip("gensim.models")
    write_vectors(tmp_path / name, WORDS, VECTORS)
    opened = models.KeyedVectors.load_word2vec_format(str(tmp_path / name), binary=".bin" in name)
    assert opened.index_to_key == WORDS and np.array_equal(opened.vectors, VECTORS)
    opened.save_word2vec_format(str(tmp_path / f"again{name}"), binary=".bin" in name)
    assert np.array_equal(read_vectors(tmp_path / f"again{name}")[1], VECTORS)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("v.txt", b"hello\n", "does not begin with the number of words"),
        ("v.txt", b"2 3\na 1 2 3\nb 1 2\n", "damaged at word 2 of 2"),
        ("v.txt", b"1 2\na 1 x\n", "damaged at word 1 of 1"),
        ("v.txt", b"-2 3\na 1 2 3\n", "does not begin with the number of words"),
        ("v.txt", b"99999999999 500\na 1 2 3\n", "does not begin with the number of words"),
        ("v.bin", b"1 3\na \x00\x00\x00\x00", "damaged at word 1 of 1"),
        ("v.txt.gz", gzip.compress(b"1 2\na 1 2\n", mtime=0)[:15], "v.txt.gz is damaged"),
    ],
)
def test_files_that_hold_no_word_vectors_are_refused(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_vectors(tmp_path / name)


def test_neighbours_of_words_and_of_sums_of_words_are_found() -> None:
    known = KnownWords(WORDS, VECTORS)
    assert known.most_similar("king", 2)[0] == ("man", pytest.approx(0.774, abs=1e-3))
    assert known.most_similar("king-man+woman", 1)[0][0] == "queen"
    assert len(known.most_similar("king", 99)) == 5
    with pytest.raises(UserError, match="'prince' has no vector"):
        known.most_similar("king+prince")
    with pytest.raises(UserError, match=r"'\+' has no word in it"):
        known.most_similar("+")


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_word_is_found_composed_or_decomposed(form: str, tmp_path: Path) -> None:
    words = [unicodedata.normalize(form, word) for word in ("größe", "über")]
    known = KnownWords(words, np.eye(2, dtype=np.float32))
    for other in ("NFC", "NFD"):
        asked = [unicodedata.normalize(other, word) for word in ("größe", "über", "Über")]
        assert known.most_similar(asked[0], 1) == [(words[1], 0.0)]
        (tmp_path / "said").write_text(f"{asked[0]}\t{asked[2]}\t1,5\n", encoding="utf-8")
        assert known.similarity(tmp_path / "said").unknown == 0
        (tmp_path / "asked").write_text(" ".join([asked[0], *asked]), encoding="utf-8")
        assert known.analogies(tmp_path / "asked")[0].unknown == 0


@pytest.mark.parametrize("between", [" ", "\t", ";", ","])
def test_scores_are_read_with_the_separator_of_their_file(between: str, tmp_path: Path) -> None:
    rows = ["word1 word2 mean n", "king queen 7.5 3", '"king" man 1 2', "queen man 2e0 4"]
    (tmp_path / "said").write_text("\ufeff" + "\n".join(rows).replace(" ", between))
    found = KnownWords(WORDS, VECTORS).similarity(tmp_path / "said")
    assert (found.pairs, found.unknown) == (3, 0)


@pytest.mark.parametrize(
    ("question", "content", "said"),
    [
        ("analogies", "", "has no line with four words"),
        ("analogies", ": royal\nking man queen\n", "file, line 2: 3 words; an analogy has four"),
        ("similarity", "", "has no line with two words and a score"),
        ("similarity", "first second\n", "has no line with two words and a score"),
        ("similarity", "first second\nking queen\n", "file, line 2: 'king queen' is not two words"),
        ("similarity", "king,queen,7,5\nking,queen,7\n", "file, line 2: 'king,queen,7' is not two"),
    ],
)
def test_files_without_questions_are_named(
    question: str, content: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text(content)
    known = KnownWords(["king", "queen"], np.eye(2, dtype=np.float32))
    with pytest.raises(UserError, match=said):
        getattr(known, question)(tmp_path / "file")


def test_analogies_and_similarities_are_read_from_files_and_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:  # type: ignore[type-arg]
    write_vectors(tmp_path / "v.bin", WORDS, VECTORS)
    asked = tmp_path / "asked.txt"
    asked.write_text(": royal\nman king woman queen\nMan King Woman Apple\n: more\na b c d\n")
    said = tmp_path / "said.tsv"
    rows = ("# by people", "Word 1\tWord 2\tHuman", "king\tman\t9", "king\tapple\t1")
    said.write_text("\n".join((*rows, "king\tx\t2", "king\tqueen\t1,5\n")))
    known = KnownWords.of_file(tmp_path / "v.bin")
    assert known.analogies(asked) == [("royal", 2, 1, 0), ("more", 0, 0, 1)]
    found = known.similarity(said)
    assert (found.pairs, found.unknown) == (3, 1)
    assert found.correlation == pytest.approx(0.866, abs=1e-3)
    file = str(tmp_path / "v.bin")
    given = [file, "most_similar=king", "top=1", f"analogies={asked}", f"similarity={said}"]
    assert command.main(given) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[1] == "man" and "0.8660" in lines[1]
    assert lines[2] == "analogies  royal  right 1 of 2 (50.0 %)  without a vector 0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.bin", "most_similar=a"], "nowhere.bin: there is no such file"),
        (["v.bin"], "nothing was asked"),
        (["v.bin", "most_similer=a"], "did you mean most_similar?"),
        (["v.bin", "most_similar=a", "top=0"], "top=0: give a number from 1 on"),
    ],
)
def test_bad_questions_about_vectors_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:  # type: ignore[type-arg]
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.filterwarnings("error")
def test_equal_values_share_a_rank() -> None:
    assert math.isnan(rank_correlation([1.0, 1.0], [1.0, 2.0]))
    assert rank_correlation([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert math.isnan(rank_correlation([1], [1]))
