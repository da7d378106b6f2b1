"""Alphabet, sound files and features: what a model hears and writes."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.alphabet import Alphabet
from hybridtrain.tasks.speech.features import Features
from hybridtrain.tasks.speech.sources.utterance import load_audio, probe, resampled_length


def tone(hertz: float, seconds: float, rate: int) -> np.ndarray:
    return (0.5 * np.sin(2 * math.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(
        "f4"
    )


def test_the_default_alphabet_is_deepspeechs_english_with_the_blank_last():
    alphabet = Alphabet()
    assert len(alphabet) == 28 and alphabet.blank == 28
    assert alphabet.encode(" az'") == [0, 1, 26, 27]
    assert alphabet.decode(alphabet.encode("don't panic")) == "don't panic"


def test_an_unknown_character_is_named():
    with pytest.raises(UserError, match=r"'é' \(U\+00E9 .*\) in 'café'"):
        Alphabet().encode("café")


def test_deepspeechs_alphabet_file_is_read_with_comments_and_escapes(tmp_path: Path):
    file = tmp_path / "alphabet.txt"
    file.write_text("# a comment\n \na\nß\n\\#\n# the end\n", encoding="utf-8")
    assert Alphabet.of(str(file)).symbols == " aß#"


@pytest.mark.parametrize(
    ("content", "message"),
    [("a\nbc\n", "line 2: 'bc'"), ("a\n\n", "line 2: ''"), ("a\na\n", "'a' twice"), ("", "empty")],
)
def test_a_bad_alphabet_file_is_one_clear_error(tmp_path: Path, content: str, message: str):
    file = tmp_path / "alphabet.txt"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        Alphabet.from_file(file)


@pytest.mark.parametrize("ending", ["wav", "flac"])
@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100])
def test_any_rate_and_channels_become_16_khz_mono(tmp_path: Path, ending: str, rate: int):
    file = tmp_path / f"tone.{ending}"
    left = tone(440, 0.5, rate)
    soundfile.write(file, np.stack([left, 0 * left], axis=1), rate)
    samples = load_audio(file, 16000)
    assert samples.dtype == torch.float32 and samples.shape == (8000,)
    assert resampled_length(probe(file)[0], rate, 16000) == 8000
    expected = torch.from_numpy(tone(440, 0.5, 16000)) / 2  # the mean of a tone and silence
    assert (samples - expected)[400:-400].abs().max() < 0.01


def test_a_piece_of_a_file_is_that_piece(tmp_path: Path):
    sound = tone(300, 0.2, 16000)
    soundfile.write(tmp_path / "a.wav", sound, 16000, subtype="FLOAT")
    piece = load_audio(tmp_path / "a.wav", 16000, start=100, frames=50)
    assert torch.equal(piece, torch.from_numpy(sound[100:150]))


@pytest.mark.parametrize("ending", ["wav", "flac"])
def test_a_truncated_file_is_found_from_its_header(tmp_path: Path, ending: str):
    file = tmp_path / f"cut.{ending}"
    soundfile.write(file, np.random.default_rng(0).uniform(-0.5, 0.5, 16000), 16000)
    content = file.read_bytes()
    probe(file)
    file.write_bytes(content[: len(content) // 2])
    for read in (lambda: probe(file), lambda: load_audio(file, 16000)):
        with pytest.raises(UserError, match=f"cut.{ending}"):
            read()


def test_a_wav_of_unknown_length_from_a_pipe_is_not_truncated(tmp_path: Path):
    file = tmp_path / "pipe.wav"
    soundfile.write(file, tone(440, 0.1, 16000), 16000)
    content = bytearray(file.read_bytes())
    place = content.index(b"data") + 4
    content[place : place + 4] = b"\xff\xff\xff\xff"
    file.write_bytes(content)
    assert len(load_audio(file, 16000)) == 1600


def test_missing_empty_and_foreign_files_are_named(tmp_path: Path):
    (tmp_path / "text.wav").write_text("no sound")
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), 16000)
    for name, message in (
        ("gone.wav", "gone.wav: there is no such file"),
        ("text.wav", "text.wav.*not audio"),
        ("empty.wav", "empty.wav holds no sound"),
    ):
        with pytest.raises(UserError, match=message):
            probe(tmp_path / name)


@pytest.mark.parametrize("samples", [1, 511, 512, 831, 832, 16000])
def test_frames_are_counted_as_the_stt_front_end_counts_them(samples: int):
    features = Features()
    frames = 1 + max(0, samples - 512) // 320
    assert features.frames(samples) == frames
    assert features(torch.randn(samples)).shape == (frames, 26)


def test_mfcc_equal_the_formula_written_out():
    """TensorFlow's audio_spectrogram and mfcc, frame by frame in numpy, without matrices."""
    sound = np.random.default_rng(0).normal(0, 0.1, 2000)
    ours = Features(normalize=False)(torch.from_numpy(sound).float()).numpy()
    mel = [1127 * math.log(1 + f / 700) for f in (20.0, 8000.0)]
    edges = [mel[0] + i * (mel[1] - mel[0]) / 41 for i in range(42)]
    for t in range(len(ours)):
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(512) / 512)
        magnitude = np.abs(np.fft.fft(sound[320 * t : 320 * t + 512] * hann))[:257]
        energies = np.zeros(40)
        for k in range(257):
            position = 1127 * math.log(1 + 31.25 * k / 700)
            for m in range(40):
                low, centre, high = edges[m : m + 3]
                rise, fall = (position - low) / (centre - low), (high - position) / (high - centre)
                energies[m] += max(0.0, min(rise, fall)) * magnitude[k]
        for c in range(26):
            terms = [
                math.log(energies[m]) * math.cos(math.pi * c * (m + 0.5) / 40) for m in range(40)
            ]
            assert ours[t, c] == pytest.approx(math.sqrt(2 / 40) * sum(terms), abs=2e-3)


def test_a_pure_tone_lights_the_filter_of_its_frequency():
    for kind, hertz, filters in (("logmel", 1000.0, 40), ("paper", 3000.0, 40)):
        extra = 1 if kind == "paper" else 0
        features = Features(kind, n_features=filters + extra, normalize=False)
        loudest = features(torch.from_numpy(tone(hertz, 0.5, 16000)))[:, :filters].mean(0).argmax()
        if kind == "logmel":
            scale = [1127 * math.log(1 + f / 700) for f in (20.0, hertz, 8000.0)]
        else:
            scale = [20.0, hertz, 8000.0]
        expected = (scale[1] - scale[0]) / (scale[2] - scale[0]) * (filters + 1) - 1
        assert abs(int(loudest) - expected) <= 1


def test_the_papers_features_are_80_filters_and_the_frames_energy():
    features = Features("paper", n_features=81, window_s=0.020, step_s=0.010, normalize=False)
    quiet, loud = torch.randn(16000) * 0.01, torch.randn(16000) * 0.1
    assert features(quiet).shape == (99, 81)
    gain = (features(loud)[:, 80].mean() - features(quiet)[:, 80].mean()) / math.log(10)
    assert float(gain) == pytest.approx(2, abs=0.05)  # ten times the amplitude


def test_normalised_features_ignore_the_level_and_survive_silence():
    features, sound = Features(), torch.randn(8000) * 0.1
    once, louder = features(sound), features(3 * sound)
    assert torch.allclose(once, louder, atol=1e-3)
    assert torch.allclose(once.mean(0), torch.zeros(26), atol=1e-5)
    assert torch.allclose(once.var(0, correction=0), torch.ones(26), atol=1e-3)
    assert features(torch.zeros(8000)).abs().max() < 1e-6


def test_features_come_back_from_their_settings_and_repeat_themselves():
    features, sound = Features("logmel", n_features=80), torch.randn(8000)
    assert Features(**asdict(features)) == features
    assert torch.equal(features(sound), Features(**asdict(features))(sound))


@pytest.mark.parametrize("kind", ["mfcc", "logmel", "paper"])
def test_features_have_the_same_bits_for_any_number_of_threads(kind: str):
    """Else a run would depend on how many workers share the cores."""
    features, before = Features(kind), torch.get_num_threads()
    try:
        for samples in range(1377, 40000, 7770):
            sound = torch.randn(samples, generator=torch.Generator().manual_seed(samples))
            found = []
            for threads in (1, 2, 4):
                torch.set_num_threads(threads)
                found.append(features(sound))
                assert torch.get_num_threads() == threads
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "plp"}, "mfcc, logmel or paper"),
        ({"n_features": 41}, "1 to 40"),
        ({"step_s": 0.0}, "step_s=0.0"),
        ({"sample_rate": 16}, "sample_rate=16"),
    ],
)
def test_impossible_feature_settings_are_refused(settings: dict[str, object], message: str):
    with pytest.raises(UserError, match=message):
        Features(**settings)  # type: ignore[arg-type]
