"""One spoken sentence: where its sound lies, what is said, and how it is loaded."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hybridtrain.tasks.speech.sources.audio import load_audio, probe, resample, resampled_length

SPLITS = ("train", "val", "test")
SHARD_RATE = 16000  # Hz, of every .npy shard
GAP_RMS = 1e-3  # -60 dB: a pause in a quiet room; digital silence would be an outlier


@dataclass(frozen=True, slots=True)
class Clip:
    """A piece of a sound file, or of an int16 ``.npy`` shard at 16 kHz.

    ``start`` and ``frames`` are samples at the file's own rate (``frames`` -1: to its end);
    ``gap_s`` is the pause before the piece, filled with quiet noise.
    """

    path: str
    start: int = 0
    frames: int = -1
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Utterance:
    """``name`` is what logs and reports call it; ``origin`` is where it is listed (file, line).

    ``samples`` is its length at the features' sample rate, 0 until ``checks`` has measured it.
    """

    name: str
    transcript: str
    clips: tuple[Clip, ...]
    origin: str = ""
    filesize: int = 0  # bytes
    speaker: str = ""
    samples: int = 0

    def measure(self, sample_rate: int) -> int:
        """Length in samples at ``sample_rate``, from headers only; ``UserError`` if unreadable."""
        return sum(_length(clip, sample_rate) for clip in self.clips)

    def load(self, sample_rate: int) -> Tensor:
        """The sound, float32 (N,) in [-1, 1]; the same every time. ``UserError`` if unreadable."""
        noise = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        pieces: list[Tensor] = []
        for clip in self.clips:
            if clip.gap_s > 0:
                pieces.append(_gap(clip, sample_rate, noise))
            pieces.append(_samples(clip, sample_rate))
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


class Source(Protocol):
    """Where utterances come from."""

    def prepare(self) -> None:
        """Make what is needed once per machine, before workers start; by default nothing."""

    def utterances(self, split: str) -> list[Utterance]:
        """All utterances of ``train``, ``val`` or ``test``, in the source's own order.

        An empty list is an optional split that was not given. Raises ``UserError``.
        """


def _length(clip: Clip, sample_rate: int) -> int:
    gap = resampled_length(round(clip.gap_s * _rate(clip)), _rate(clip), sample_rate)
    if clip.frames >= 0:
        return gap + resampled_length(clip.frames, _rate(clip), sample_rate)
    return gap + resampled_length(_probe(clip.path).frames - clip.start, _rate(clip), sample_rate)


def _rate(clip: Clip) -> int:
    return SHARD_RATE if clip.path.endswith(".npy") else _probe(clip.path).rate


def _gap(clip: Clip, sample_rate: int, draw: torch.Generator) -> Tensor:
    """Noise with the bandwidth of the recording: its end must not be audible."""
    noise = GAP_RMS * torch.randn(round(clip.gap_s * _rate(clip)), generator=draw)
    return resample(noise.numpy(), _rate(clip), sample_rate)


_probe = lru_cache(maxsize=100_000)(probe)  # composed sequences use a recording many times


def _samples(clip: Clip, sample_rate: int) -> Tensor:
    if not clip.path.endswith(".npy"):
        return load_audio(clip.path, sample_rate, clip.start, clip.frames)
    cut = _shard(clip.path)[clip.start : clip.start + clip.frames]
    samples = torch.from_numpy(cut.astype(np.float32)) / 32768
    if sample_rate == SHARD_RATE:
        return samples
    return resample(samples.numpy(), SHARD_RATE, sample_rate)


@lru_cache(maxsize=256)
def _shard(path: str) -> np.ndarray:
    """Mapped, not read: all workers of a host share its pages."""
    return np.load(Path(path), mmap_mode="r")


def frames_needed(labels: list[int], frames_per_output: int) -> int:
    """Fewest feature frames with which CTC can write ``labels``.

    One output per label, and one blank between equal neighbours; a model gives one output per
    ``frames_per_output`` frames, rounded up.
    """
    repeats = sum(a == b for a, b in itertools.pairwise(labels))
    outputs = len(labels) + repeats
    return max(0, outputs - 1) * frames_per_output + 1
