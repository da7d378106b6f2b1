"""Whatever lies in a data file: it is read, or refused in one line. Never more, and soon."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from hybridtrain.tasks.hogwild.text_examples import read_examples, read_triples
from hybridtrain.tasks.speech.alphabet import Alphabet
from hybridtrain.tasks.speech.datamodule import check_all
from hybridtrain.tasks.speech.features import Features
from hybridtrain.tasks.speech.lm import NgramModel, estimate
from hybridtrain.tasks.speech.sources.manifest import read_manifest
from hybridtrain.tasks.speech.sources.utterance import load_audio, probe, resampled_length
from hybridtrain.tasks.words.questions import KnownWords, read_vectors, write_vectors
from hybridtrain.tasks.words.text_data import TextFiles, count
from hybridtrain.virtual.script import read_script
from hybridtrain.virtual.service_times import Measured, read_times
from tests.fuzzing.mutations import damaged, faults

Reads = Callable[[Path], object]


def sound(path: Path) -> None:
    noise = np.random.default_rng(0).uniform(-0.1, 0.1, (3200, 2))
    subtype = "FLOAT" if "float" in path.name else None
    soundfile.write(path, noise, 16000, subtype=subtype)


def hear(path: Path) -> None:
    frames, rate = probe(path)
    samples = load_audio(path, 16000)
    assert len(samples) == resampled_length(frames, rate, 16000) < 2**27
    assert bool((samples.abs() < 2**16).all()), "that is no sound"


def manifest(path: Path) -> None:
    sound(path.with_name("a.wav"))
    rows = "".join(f"a.wav,{1000 + n},one two\n" for n in range(5))
    path.write_text(f"wav_filename,wav_filesize,transcript\n{rows}")


def listed(path: Path) -> None:
    rows = read_manifest(path)
    assert all(0 <= row.filesize < 2**60 for row in rows)
    check_all(rows, Alphabet(), Features(), skip_bad=True)


def vectors(path: Path) -> None:
    write_vectors(path, [f"word{n}" for n in range(9)], np.eye(9, 5, dtype=np.float32))


def known(path: Path) -> None:
    words, found = read_vectors(path)
    assert found.shape == (len(words), found.shape[1]) and found.size and np.isfinite(found).all()
    assert all(words), "a word without letters"
    KnownWords(words, found).most_similar(words[0])


def svm(path: Path) -> None:
    path.write_text("1 3:0.5 17:1.25\n-1 1:1 2:2\n1 |f 3:0.5 4\n0 5:1e-3 # why\n")


def examples(path: Path) -> None:
    found = read_examples(str(path), 1000)
    assert set(found.labels.tolist()) <= {-1.0, 1.0} and np.isfinite(found.values).all()
    assert (found.features < 1000).all() and found.starts[-1] == len(found.features)


def ratings(path: Path) -> None:
    path.write_text("".join(f"{n}::{2 * n}::{n / 2}\n" for n in range(9)))


def rated(path: Path) -> None:
    found = read_triples(str(path), ("user", "item", "rating"))
    assert np.isfinite(found.values).all() and (found.ones >= 0).all() and (found.others >= 0).all()


def prose(path: Path) -> None:
    path.write_text("a man and a woman went to sea\nin a sieve they went to sea\n" * 3)


def counted(path: Path) -> None:
    assert sum(count(TextFiles([path])).values()) < 10_000


def packed(write: Reads) -> Reads:
    def pack(path: Path) -> None:
        write(path)
        path.write_bytes(gzip.compress(path.read_bytes()))

    return pack


def arpa(path: Path) -> None:
    estimate([["a", "b", "c"], ["a", "c"]], 2).write(path)


def scored(path: Path) -> None:
    model = NgramModel.read(path)
    assert all(map(math.isfinite, [*model.log10.values(), *model.backoff.values()]))


def asked(path: Path) -> None:
    words = KnownWords(["a", "b", "c", "d"], np.eye(4, dtype=np.float32))
    assert not math.isinf(words.similarity(path).correlation)


def times(path: Path) -> None:
    path.write_text(json.dumps({"0": [0.1, 0.2], "1": [0.5, 0.25]}))


KINDS: dict[str, tuple[Reads, Reads]] = {
    "x.wav": (sound, hear),
    "float.wav": (sound, hear),
    "x.flac": (sound, hear),
    "x.ogg": (sound, hear),
    "x.csv": (manifest, listed),
    "x.bin": (vectors, known),
    "x.txt": (vectors, known),
    "x.bin.gz": (vectors, known),
    "x.svm": (svm, examples),
    "x.svm.gz": (packed(svm), examples),
    "x.ratings": (ratings, rated),
    "x.prose": (prose, counted),
    "x.arpa": (arpa, scored),
    "x.alphabet": (lambda path: path.write_text("# ours\n \na\nb\nc\n\\#\n"), Alphabet.from_file),
    "x.pairs": (lambda path: path.write_text("a b 1.5\na c 2\nb d 3.25\n"), asked),
    "x.json": (times, lambda path: Measured(read_times(path))),
    "times.csv": (
        lambda path: path.write_text("worker,seconds\n0,0.25\n1,1.0\n0,0.5\n"),
        lambda path: Measured(read_times(path)),
    ),
    "x.yaml": (
        lambda path: path.write_text("- {worker: 1, slower: 2, from: 1, until: 9}\n"),
        lambda path: read_script(str(path)),
    ),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "n", [100, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_a_damaged_file_is_read_or_refused_in_one_line(name: str, n: int, tmp_path: Path) -> None:
    write, read = KINDS[name]
    path = tmp_path / name
    write(path)
    read(path)
    good = path.read_bytes()

    def case(draw: random.Random, number: int) -> None:
        path.write_bytes(damaged(good, draw))
        read(path)

    ends, found = faults(case, n, name)
    assert not found, f"{dict(ends)}\n" + "\n".join(found[:3])


@pytest.mark.few(6)
@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_file_is_refused_at_once(name: str, tmp_path: Path) -> None:
    _, read = KINDS[name]
    fifo, folder, device = (tmp_path / f"{kind}-{name}" for kind in ("fifo", "folder", "device"))
    os.mkfifo(fifo)
    folder.mkdir()
    device.symlink_to("/dev/zero")
    large = tmp_path / f"large-{name}"
    with large.open("wb") as file:
        file.truncate(2**43)  # bytes that are nowhere

    def case(draw: random.Random, number: int) -> None:
        read((fifo, folder, device, large)[number])
        raise AssertionError("it was read")

    ends, found = faults(case, 4, name)
    assert not found, f"{dict(ends)}\n" + "\n".join(found)
