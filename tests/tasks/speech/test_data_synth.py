"""The embedded corpus: made by espeak-ng, reproducible, cached, and made again when damaged."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.datamodule import SpeechDataModule
from hybridtrain.tasks.speech.sources import synth
from hybridtrain.tasks.speech.sources.synth import SPEAKERS, SpokenDigits
from tests.picking import by_default

pytest.importorskip("espeakng_loader", reason="needs the extra synth (espeakng-loader)")

SMALL = {"train": 70, "val": 8, "test": 12, "max_digits": 4}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpokenDigits]:
    source = SpokenDigits(root=str(tmp_path_factory.mktemp("cache")), **SMALL)
    source.prepare()
    yield source


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_in_two_fresh_caches(
    corpus: SpokenDigits, tmp_path: Path
):
    """In another second too: espeak-ng seeds itself with the clock unless told otherwise."""
    time.sleep(1.1)
    again = SpokenDigits(root=str(tmp_path), **SMALL)
    again.prepare()
    assert contents(again.folder()) == contents(corpus.folder())


def test_another_seed_or_setting_is_another_corpus(corpus: SpokenDigits):
    root = corpus.root
    others = [SpokenDigits(root=root, seed=1, **SMALL), SpokenDigits(root=root, max_snr_db=30)]
    assert len({corpus.folder(), *(other.folder() for other in others)}) == 3
    assert corpus._plan("train") != others[0]._plan("train")
    assert SpokenDigits(min_snr_db=15).folder() == SpokenDigits(min_snr_db=15.0).folder()


def test_the_speakers_of_the_splits_are_disjoint(corpus: SpokenDigits):
    heard = {
        split: {u.speaker.split("+")[1] for u in corpus.utterances(split)}
        for split in ("train", "val", "test")
    }
    assert heard == {split: set(speakers) for split, speakers in SPEAKERS.items()}
    assert not heard["train"] & (heard["val"] | heard["test"]) and not heard["val"] & heard["test"]


def test_utterances_sound_like_speech_of_their_length(corpus: SpokenDigits):
    for utterance in corpus.utterances("train"):
        sound = utterance.load(16000)
        words = len(utterance.transcript.split())
        assert 1 <= words <= 4 and "," not in utterance.transcript
        assert len(sound) == utterance.measure(16000)
        assert 0.15 < len(sound) / 16000 / words < 1.5
        level_db = 20 * np.log10(float(sound.square().mean().sqrt()))
        assert -33 < level_db < -16
        loud = float(sound.unfold(0, 320, 320).square().mean(1).max())
        assert loud > 2 * float(sound.square().mean())  # words and pauses, not a steady hum


def test_the_same_digit_words_sound_different_in_different_mouths(corpus: SpokenDigits):
    sounds = [u.load(16000) for u in corpus.utterances("train")]
    assert len({len(sound) for sound in sounds}) > 60


def test_a_whole_cache_is_not_made_again(corpus: SpokenDigits, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(synth, "speak_shards", lambda *_: pytest.fail("made again"))
    corpus.prepare()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "damage", by_default(["flip", "cut", "remove", "manifest"], "flip", "manifest")
)
def test_a_damaged_cache_is_made_again_with_one_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
):
    source = SpokenDigits(root=str(tmp_path), train=2, val=1, test=1, max_digits=1)
    source.prepare()
    whole = contents(source.folder())
    file = source.folder() / ("manifest.json" if damage == "manifest" else "train-00.npy")
    match damage:
        case "flip":
            file.write_bytes(whole[file.name][:-1] + bytes([whole[file.name][-1] ^ 1]))
        case "remove":
            file.unlink()
        case _:
            file.write_bytes(whole[file.name][:100])
    synth._manifest.cache_clear()  # as in a new process
    with caplog.at_level(logging.WARNING):
        source.prepare()
    assert [r.message.split(": ")[-1] for r in caplog.records] == ["making it again"]
    assert contents(source.folder()) == whole


def test_an_interrupted_run_leaves_nothing_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = SpokenDigits(root=str(tmp_path), train=2, val=1, test=1)

    def interrupted(folder: Path, shards: object) -> dict[str, list[int]]:
        (folder / "train-00.npy").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(synth, "speak_shards", interrupted)
    with pytest.raises(KeyboardInterrupt):
        source.prepare()
    assert [p.name for p in source.folder().parent.iterdir() if p.is_dir()] == []


@pytest.mark.slow
def test_two_processes_at_once_make_one_whole_corpus(tmp_path: Path):
    code = (
        "from hybridtrain.tasks.speech.sources.synth import SpokenDigits as S;"
        f"s = S(root={str(tmp_path)!r}, train=30, val=1, test=1); s.prepare();"
        "print(len(s.utterances('train')))"
    )
    path = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": path}
    pipe = subprocess.PIPE
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=pipe, stderr=pipe)
        for _ in range(2)
    ]
    results = [process.communicate(timeout=100) for process in both]
    assert [out.split() for out, _ in results] == [[b"30"], [b"30"]], results
    assert [p.suffix for p in sorted((tmp_path / "spoken_digits").iterdir())] == [""]


def test_without_the_extra_one_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(synth, "find_spec", lambda _: None)
    data = SpeechDataModule(SpokenDigits(root=str(tmp_path)))
    with pytest.raises(UserError) as error:
        data.prepare_data()
    assert "pip install 'hybridtrain[synth]'" in str(error.value)
    assert "data=fsdd data.root=" in str(error.value) and "\n" not in str(error.value)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the speech cache .*set data.root"):
        SpokenDigits(root=str(tmp_path / "file")).prepare()


def test_the_default_cache_follows_xdg_cache_home(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(SpokenDigits().folder()).startswith("/somewhere/hybridtrain/spoken_digits/")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert Path.home() / ".cache" / "hybridtrain" in SpokenDigits().folder().parents


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": 0}, "data.train=0"),
        ({"min_digits": 0}, "min_digits=0"),
        ({"min_snr_db": 50}, "data.min_snr_db=50"),
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, settings: dict[str, int], message: str):
    with pytest.raises(UserError, match=message):
        SpokenDigits(root=str(tmp_path), **settings).prepare()


def test_a_failing_engine_is_reported_with_its_message(tmp_path: Path):
    source = SpokenDigits(root=str(tmp_path), train=2, val=1, test=1)
    job = source._plan("train")[0]
    bad = type(job)(
        **json.loads(json.dumps({n: getattr(job, n) for n in job.__slots__})) | {"voice": "no such"}
    )
    with pytest.raises(RuntimeError, match="has no voice no such"):
        synth.speak_shards(tmp_path, {"train-00.npy": [bad]})
