"""Text files become words, words become numbers, and bad text is named with its place."""

from __future__ import annotations

import gzip
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrain.errors import UserError
from hybridtrain.tasks.words import text_data
from hybridtrain.tasks.words.text_data import (
    END,
    EncodedText,
    TextData,
    TextFiles,
    Vocabulary,
    count,
    encode,
    shipped,
)
from hybridtrain.tasks.words.word2vec import Word2Vec, bags, neighbours, thinned
from tests.support.several_hosts import run_hosts
from tests.tasks.words.made import train, write_text


def lines_of(text: TextFiles) -> list[list[str]]:
    lines: list[list[str]] = [[]]
    for words, ends in text:
        lines[-1] += words
        if ends:
            lines.append([])
    return [line for line in lines if line]


def test_files_are_read_in_their_order_packed_or_not(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One two,\n\nthree's a-b\n")
    (tmp_path / "b").write_bytes(gzip.compress("Größe ZWEI".encode()))
    files = [tmp_path / "a.txt", tmp_path / "b"]
    words = [["one", "two"], ["three's", "a", "b"], ["größe", "zwei"]]
    assert lines_of(TextFiles(files)) == words
    spaces = [["One", "two,"], ["three's", "a-b"], ["Größe", "ZWEI"]]
    assert lines_of(TextFiles(files, "spaces", lower=False)) == spaces


def test_words_of_any_script_are_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf" + "the हिन्दी தமிழ் cafe\u0301 İs l’été".encode())
    words = ["the", "हिन्दी", "தமிழ்", "café", "i\u0307s", "l’été"]
    assert lines_of(TextFiles([tmp_path / "a"])) == [words]
    found = lines_of(TextFiles([tmp_path / "a"], "spaces"))[0]
    assert found[0] == "the", "no mark of byte order"
    assert found[3] == "café", "composed, as all words are"


WORDS = st.lists(st.lists(st.text("abé", min_size=1, max_size=9), max_size=9), max_size=9)


@settings(max_examples=60, deadline=None)
@given(WORDS, st.integers(1, 12))
def test_a_line_may_be_longer_than_what_is_looked_at_together(
    tmp_path_factory: pytest.TempPathFactory, lines: list[list[str]], longest: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "long.txt"
    path.write_text("\n".join(map(" ".join, lines)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_data, "LONGEST", longest)
        assert lines_of(TextFiles([path])) == [line for line in lines if line]


@pytest.mark.slow
def test_a_line_of_a_million_words_is_counted_and_encoded(tmp_path: Path) -> None:
    path = tmp_path / "line.txt"
    path.write_text("one two three four " * 250_000)
    counted = dict.fromkeys(("one", "two", "three", "four"), 250_000)
    assert count(TextFiles([path])) == counted
    numbers = {"one": 0, "three": 1}
    assert encode(TextFiles([path]), numbers, tmp_path / "n") == 500_000
    text = EncodedText(tmp_path / "n", 7)
    assert len(text) == 71_429 and text[0][1].tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert text[len(text) - 1][1].tolist() == [0, 1, 0, 1, END]


def test_bytes_that_are_no_utf_8_are_named_or_replaced_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"fine\nalso fine\ncaf\xe9 au lait\n")
    with pytest.raises(UserError, match=r"latin.txt, line 3: byte 0xe9 .*encoding_errors=replace"):
        list(TextFiles([path]))
    assert lines_of(TextFiles([path], "spaces", errors="replace"))[2][0] == "caf\ufffd"
    assert lines_of(TextFiles([path], errors="ignore"))[2] == ["caf", "au", "lait"]


def test_a_gzip_file_that_is_damaged_is_refused_by_name(tmp_path: Path) -> None:
    whole = gzip.compress(b"one two three " * 1000)
    for damaged in (whole[:-20], whole[:12] + b"\xff" * 9 + whole[21:], whole[:2] + b"\xff" * 20):
        (tmp_path / "a.gz").write_bytes(damaged)
        with pytest.raises(UserError, match=r"a.gz is damaged"):
            list(TextFiles([tmp_path / "a.gz"]))


def test_words_are_sorted_by_how_often_they_occur() -> None:
    counted = Counter({"c": 3, "b": 5, "a": 3, "d": 1})
    found = Vocabulary.of(counted, min_count=2)
    assert found.words == ("b", "a", "c") and found.counts.tolist() == [5, 3, 3]
    assert found.total == 12 and Vocabulary.of(counted, 2, size=2).words == ("b", "a")
    assert found.kept(0.0).tolist() == [1.0, 1.0, 1.0]
    share = 5 / 11
    assert found.kept(0.1)[0] == pytest.approx((0.1 / share) ** 0.5 + 0.1 / share)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text has no words"),
        (" \n\n ", "the text has no words"),
        ("alone alone alone", "of 1 different words 1 occur"),
        ("one two three", "of 3 different words 0 occur data.min_count=2 .* frequent one 1"),
    ],
)
def test_too_little_text_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "little.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        Vocabulary.of(count(TextFiles([path])), min_count=2)


@pytest.mark.slow
def test_too_little_text_ends_a_run_with_the_same_line(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("alone alone")
    with pytest.raises(UserError, match="of 1 different words"):
        train(Word2Vec(4), tmp_path / "one.txt", "hogwild", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"], "nothing is left behind"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"files": "nowhere.txt"}, "nowhere.txt: there is no such file"),
        ({"files": []}, "data.files is empty"),
        ({"files": __file__, "tokens": "letters"}, "tokens='letters' .* words or spaces"),
        (
            {"files": __file__, "encoding_errors": "hide"},
            "errors='hide' .* strict, replace",
        ),
        ({"batch_words": 1}, "batch_words=1 .* from 2 on, or auto"),
        ({"min_count": 0}, "min_count=0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TextData(**options)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a b " * 50)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"not be written to .*/file/text-numbers: .* data.cache"):
        train(Word2Vec(4), tmp_path / "text.txt", "auto", 1, default_root_dir=tmp_path / "file")


def test_a_text_comes_with_python(tmp_path: Path) -> None:
    counted = count(TextFiles(shipped(tmp_path / "t.txt")))
    assert sum(counted.values()) > 40_000 and counted["iterator"] > 20


def test_neighbours_are_those_of_the_line_within_the_window() -> None:
    left = np.array([5, 6, 7, END, 8, END, 9, 5])
    random = np.random.default_rng(0)
    centres, others = neighbours(left, 1, random)
    found = sorted(zip(centres.tolist(), others.tolist(), strict=True))
    assert found == [(0, 1), (1, 0), (1, 2), (2, 1), (6, 7), (7, 6)]
    words, near, starts = bags(centres, others)
    assert (words.tolist(), starts.tolist()) == ([0, 1, 2, 6, 7], [0, 1, 3, 4, 5])
    assert sorted(near[1:3].tolist()) == [0, 2]
    wide = neighbours(np.zeros(10_000, dtype=np.int64), 5, random)
    distances = np.bincount(np.abs(wide[0] - wide[1]))[1:] / 20_000
    assert distances == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2], abs=0.02)


def test_frequent_words_are_thinned_out() -> None:
    numbers = np.tile(np.array([0, 1, END], dtype=np.int32), 5000)
    left = thinned(numbers, np.array([0.3, 1.0], dtype=np.float32), np.random.default_rng(0))
    counts = np.bincount(left + 1)
    assert counts[0] == counts[2] == 5000 and counts[1] == pytest.approx(1500, abs=100)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="hosts are forked processes")
def test_numbers_are_removed_on_each_host(tmp_path: Path) -> None:
    file = write_text(tmp_path / "text.txt")

    def body() -> list[str]:
        options = {"default_root_dir": Path.cwd(), "num_nodes": 2, "max_epochs": 1}
        train(Word2Vec(8), file, "hybrid", 1, **options)
        return [path.name for path in Path.cwd().rglob("text-numbers*")]

    hosts = run_hosts(tmp_path, body)
    assert [(host.status, host.result) for host in hosts] == [(0, [])] * 2, hosts[1].said
