"""A fresh process that speaks one shard: ``python espeak.py OUT.npy < jobs.json``.

Theory of operation. espeak-ng keeps state between calls (the same text twice gives two lengths)
and draws breath and roughness from a generator that it seeds with the clock. Its output is
therefore reproducible only if one fresh process makes the same calls in the same order, in
*synchronous* mode, after ``espeak_ng_SetRandSeed``: that is this file. It imports nothing of the
package, so that a process starts in a few tenths of a second, and reports each finished utterance
as one line on standard output.

The library comes from the wheel ``espeakng-loader`` (the extra ``synth``); espeak-ng is GPL-3+, is
loaded at run time, and is no part of this package.

Shapes: N samples. A job is ``Job.__dict__``; OUT.npy is all utterances end to end, (sum N,) int16
at 16 kHz, and each line printed is that utterance's N.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import soxr

RATE = 16000  # Hz
SYNCHRONOUS = 2  # espeak's AUDIO_OUTPUT_SYNCHRONOUS: the callback runs inside espeak_Synth
CHARS_UTF8 = 1
SPEED, PITCH, PITCH_RANGE = 1, 3, 4  # espeak_PARAMETER
QUIET = 200  # of 32767: what counts as silence at the ends of an utterance
CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


@dataclass(frozen=True, slots=True)
class SpokenUtterance:
    """One utterance to speak, and the room and microphone it is heard through."""

    text: str
    voice: str
    words_per_minute: int
    pitch: int  # 0 to 100
    pitch_range: int  # 0 to 100
    tract: float  # all frequencies times this, as of a shorter (above 1) or longer vocal tract
    level_db: float  # of the speech, re full scale
    snr_db: float
    tilt: float  # noise power falls with frequency to this power: 0 white, 1 pink, 2 brown
    tone_db: tuple[float, ...]  # gains at equally spaced frequencies from 0 to 8 kHz
    silence_s: tuple[float, float]  # before and after
    seed: int


class Engine:
    """The espeak-ng library of this process; one only, it is full of globals."""

    def __init__(self) -> None:
        import espeakng_loader

        self._lib = ctypes.CDLL(espeakng_loader.get_library_path())
        data = espeakng_loader.get_data_path().encode()
        self.rate = self._lib.espeak_Initialize(SYNCHRONOUS, 0, data, 0)  # Hz
        if self.rate <= 0:
            raise RuntimeError(f"espeak-ng does not start (data at {data.decode()})")
        self._heard: list[np.ndarray] = []
        self._callback = CALLBACK(self._hear)  # kept: ctypes does not
        self._lib.espeak_SetSynthCallback(self._callback)

    def seed(self, seed: int) -> None:
        """Fix the engine's own randomness, and libc's, which one synthesiser of it uses."""
        self._lib.espeak_ng_SetRandSeed(ctypes.c_long(seed))
        ctypes.CDLL(None).srand(ctypes.c_uint(seed))

    def say(self, job: SpokenUtterance) -> np.ndarray:
        """(N,) int16 at ``rate``."""
        if self._lib.espeak_SetVoiceByName(job.voice.encode()) != 0:
            raise RuntimeError(f"espeak-ng has no voice {job.voice}")
        settings = ((SPEED, job.words_per_minute), (PITCH, job.pitch))
        for parameter, value in (*settings, (PITCH_RANGE, job.pitch_range)):
            self._lib.espeak_SetParameter(parameter, value, 0)
        self._heard.clear()
        text = job.text.encode()
        self._lib.espeak_Synth(text, len(text) + 1, 0, 1, 0, CHARS_UTF8, None, None)
        return np.concatenate(self._heard)

    def _hear(self, samples: Any, count: int, events: Any) -> int:
        if samples and count > 0:
            self._heard.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0


def record(spoken: np.ndarray, rate: int, job: SpokenUtterance) -> np.ndarray:
    """(N,) int16 at ``rate`` to (N',) at 16 kHz: trimmed, coloured, levelled, with noise."""
    loud = np.flatnonzero(np.abs(spoken.astype(np.int32)) > QUIET)
    trimmed = spoken[loud[0] : loud[-1] + 1].astype(np.float32) / 32768
    speech = soxr.resample(trimmed, rate * job.tract, RATE).astype(np.float64)
    before, after = (round(s * RATE) for s in job.silence_s)
    speech = np.pad(speech, (before, after))
    speech = _filtered(speech, _tone(job.tone_db))
    speech *= 10 ** (job.level_db / 20) / np.sqrt(np.mean(np.square(speech)))
    noise = _noise(len(speech), job.tilt, job.seed) * 10 ** ((job.level_db - job.snr_db) / 20)
    return np.round(np.clip(speech + noise, -1, 1) * 32767).astype(np.int16)


def _filtered(samples: np.ndarray, gain: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """(N,) multiplied by ``gain(hertz)`` in the frequency domain."""
    size = -(-len(samples) // 4096) * 4096  # of small prime factors: several times faster
    hertz = np.fft.rfftfreq(size, 1 / RATE)
    return np.fft.irfft(np.fft.rfft(samples, size) * gain(hertz), size)[: len(samples)]


def _tone(gains_db: tuple[float, ...]) -> Callable[[np.ndarray], np.ndarray]:
    """A gain that runs through ``gains_db`` at equally spaced frequencies from 0 to 8 kHz."""
    places = np.linspace(0, RATE / 2, len(gains_db))
    return lambda hertz: np.power(10, np.interp(hertz, places, gains_db) / 20)


def _noise(length: int, tilt: float, seed: int) -> np.ndarray:
    """(N,) with unit power; below 50 Hz the spectrum is flat."""
    white = np.random.default_rng(seed).standard_normal(length)
    noise = _filtered(white, lambda hertz: np.power(np.maximum(hertz, 50), -tilt / 2))
    return np.asarray(noise / np.sqrt(np.mean(np.square(noise))))


def main(out: str) -> None:
    """Speak the jobs of standard input into ``out``."""
    jobs = [SpokenUtterance(**job) for job in json.load(sys.stdin)]
    engine = Engine()
    recorded = []
    for job in jobs:
        engine.seed(job.seed)
        recorded.append(record(engine.say(job), engine.rate, job))
        print(len(recorded[-1]), flush=True)
    np.save(out, np.concatenate(recorded))


if __name__ == "__main__":
    main(sys.argv[1])
