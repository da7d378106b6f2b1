"""One spoken sentence: where its sound lies, what is said, and how it is loaded."""

from __future__ import annotations

import itertools
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hybridtrain.errors import UserError
from hybridtrain.util.files import check_input

# ---- sound files --------------------------------------------------------------------------------
# Sound files: WAV, FLAC and whatever else libsndfile reads, any sample rate, to mono tensors.

try:
    import soundfile
    import soxr
except ImportError as error:
    raise UserError(
        f"speech needs the package {error.name}: pip install 'hybridtrain[speech]'"
    ) from error

RATES_HZ = (1_000, 1_000_000)
LONGEST_S = 12 * 3600
LOUDEST = 2.0**16  # floating point files may exceed 1; NaN and 1e30 are damage
UNKNOWN_SIZES = (0, 0x7FFFFFFF, 0xFFFFFFFF)  # what writers to a pipe put for "until the end"


def probe(path: str | Path) -> tuple[int, int]:
    """Samples per channel and rate in Hz, by the header; see that the sound it promises is there.

    Raises ``UserError`` that names the file if it is missing, not audio, empty, truncated, longer
    than 12 hours, or of a rate that no recorder has.
    """
    check_input(path, "the audio file")
    try:
        with soundfile.SoundFile(str(path)) as file:
            frames, rate = file.frames, file.samplerate
            if frames > 0:
                _require_end(path, file)
    except (soundfile.SoundFileError, OSError) as error:
        raise UserError(_why(path, error)) from error
    if frames <= 0:
        raise UserError(f"the audio file {path} holds no sound")
    if not RATES_HZ[0] <= rate <= RATES_HZ[1] or frames > LONGEST_S * rate:
        raise UserError(
            f"the audio file {path} says that it has {frames} samples at {rate} Hz; a rate is "
            f"{RATES_HZ[0]:,} to {RATES_HZ[1]:,} Hz, and a sound has at most {LONGEST_S // 3600} "
            "hours: convert or cut it"
        )
    return frames, rate


def load_audio(path: str | Path, sample_rate: int, start: int = 0, frames: int = -1) -> Tensor:
    """Samples of ``path`` as float32 mono in [-1, 1] at ``sample_rate``, shape (N,).

    ``start`` and ``frames`` cut a piece, counted at the file's own rate (-1: to the end).
    Channels are averaged, other rates are converted by soxr. Raises ``UserError`` naming the file.
    """
    expected = probe(path)[0] - start if frames < 0 else frames
    try:
        samples, rate = soundfile.read(str(path), expected, start, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError) as error:
        raise UserError(_why(path, error)) from error
    if len(samples) < expected:
        raise UserError(f"the audio file {path} is truncated: {len(samples)} of {expected} samples")
    if not np.abs(samples).max(initial=0.0) < LOUDEST:
        raise UserError(f"the audio file {path} holds numbers that are no sound: write it again")
    return resample(samples.mean(axis=1, dtype=np.float32), rate, sample_rate)


def resample(samples: np.ndarray, rate: int, sample_rate: int) -> Tensor:
    """(N,) float32 at ``rate`` to a tensor of ``resampled_length(N, ...)`` at ``sample_rate``."""
    if rate != sample_rate:
        samples = soxr.resample(samples, rate, sample_rate)
    return torch.from_numpy(np.ascontiguousarray(samples, dtype=np.float32))


def resampled_length(frames: int, rate: int, sample_rate: int) -> int:
    """How many samples ``resample`` makes of ``frames``."""
    return int(frames * sample_rate / rate + 0.5)


def _require_end(path: str | Path, file: soundfile.SoundFile) -> None:
    """libsndfile shortens a truncated WAV silently, but cannot seek to the end of other formats."""
    if file.format.startswith("WAV"):
        missing = _missing_wav_bytes(Path(path))
        if missing > 0:
            raise UserError(
                f"the audio file {path} is truncated: {missing} bytes of sound are missing"
            )
    elif file.seekable():
        file.seek(file.frames - 1)


def _missing_wav_bytes(path: Path) -> int:
    """How many bytes the data chunk promises beyond the file's end (0 if it is whole)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(12)  # "RIFF", size, "WAVE"
        while len(header := file.read(8)) == 8:
            name, length = struct.unpack("<4sI", header)
            if name == b"data":
                return 0 if length in UNKNOWN_SIZES else max(0, file.tell() + length - size)
            file.seek(length + length % 2, 1)
    return 0


def _why(path: str | Path, error: Exception) -> str:
    return f"cannot read the audio file {path} ({str(error).rstrip('.')}): damaged or not audio"


SPLITS = ("train", "val", "test")
SHARD_RATE = 16000  # Hz, of every .npy shard
GAP_RMS = 1e-3  # -60 dB: a pause in a quiet room; digital silence would be an outlier


@dataclass(frozen=True, slots=True)
class AudioClip:
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

    ``samples`` is its length at the features' sample rate, 0 until ``check`` has measured it.
    ``fault`` says what is wrong with its line there, if anything is.
    """

    name: str
    transcript: str
    clips: tuple[AudioClip, ...]
    origin: str = ""
    filesize: int = 0  # bytes
    speaker: str = ""
    samples: int = 0
    fault: str = ""

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


def check_bounds(source: object, *names: str) -> None:
    """Check that ``min_NAME`` is not above ``max_NAME``; raises ``UserError``."""
    for name in names:
        low, high = (getattr(source, f"{end}_{name}") for end in ("min", "max"))
        if low > high:
            raise UserError(
                f"data.min_{name}={low}, data.max_{name}={high}: need min_{name} <= max_{name}"
            )


def _length(clip: AudioClip, sample_rate: int) -> int:
    frames = clip.frames if clip.frames >= 0 else _probe(clip.path)[0] - clip.start
    parts = round(clip.gap_s * _rate(clip)), frames
    return sum(resampled_length(n, _rate(clip), sample_rate) for n in parts)


def _rate(clip: AudioClip) -> int:
    return SHARD_RATE if clip.path.endswith(".npy") else _probe(clip.path)[1]


def _gap(clip: AudioClip, sample_rate: int, draw: torch.Generator) -> Tensor:
    """Noise with the bandwidth of the recording: its end must not be audible."""
    noise = GAP_RMS * torch.randn(round(clip.gap_s * _rate(clip)), generator=draw)
    return resample(noise.numpy(), _rate(clip), sample_rate)


_probe = lru_cache(maxsize=100_000)(probe)  # composed sequences use a recording many times


def _samples(clip: AudioClip, sample_rate: int) -> Tensor:
    if not clip.path.endswith(".npy"):
        return load_audio(clip.path, sample_rate, clip.start, clip.frames)
    cut = _shard(clip.path)[clip.start : clip.start + clip.frames]
    return resample(cut.astype(np.float32) / 32768, SHARD_RATE, sample_rate)


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
