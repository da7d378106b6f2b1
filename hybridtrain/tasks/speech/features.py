"""Sound to feature frames: MFCC as in DeepSpeech, log-mel, or the 2014 paper's filter banks.

Shapes: N samples, T frames, F features, K frequency bins, M filters.

A frame is ``window_s`` long and begins every ``step_s``; nothing is padded on the left or right, so
T = 1 + floor((N - window) / step) in samples, and a sound shorter than one window counts as one.
The three kinds:

- ``mfcc``: what TensorFlow's ``audio_spectrogram`` and ``mfcc`` compute for Mozilla DeepSpeech and
  Coqui STT: Hann window, *magnitudes* in 40 triangular mel filters from 20 Hz to half the sample
  rate, log, and the first F coefficients of the orthogonal cosine transform (DCT-II), c0 included.
- ``logmel``: log of the *power* in F such mel filters.
- ``paper``: Deep Speech (Hannun et al. 2014): log power in F - 1 linearly spaced filters, then the
  log energy of the frame. The paper's frames are 20 ms every 10 ms, F = 81.

The logarithm's floor is the noise of 16-bit rounding (TensorFlow: 1e-12), so that digital silence,
which no microphone records, does not outweigh everything else.

With ``normalize`` every feature has mean 0 and variance 1 over the utterance. DeepSpeech feeds raw
MFCC; the normalised ones learn faster, do not depend on the microphone's level, and make 0 the
natural value of padding and of SpecAugment's masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import torch
from torch import Tensor

from hybridtrain.errors import UserError
from hybridtrain.util.option_types import Above0, Checked, Positive, Range

LOWEST_HZ = 20.0
MFCC_FILTERS = 40
LONGEST_S, MOST_STEPS = 1.0, 64  # of a window: all frames together are so many times the sound
FLOOR = 1e-4  # magnitude that 16-bit rounding alone has: digital silence counts as such noise


@dataclass(frozen=True)
class Features(Checked):
    """Callable: float32 mono samples in [-1, 1], (N,), to float32 features, (T, F).

    ``n_features`` is F: coefficients (mfcc), filters (logmel), filters + 1 (paper).
    Raises ``UserError`` for an unknown kind or sizes that cannot be.
    """

    kind: Literal["mfcc", "logmel", "paper"] = "mfcc"
    sample_rate: Annotated[int, Range(1000, 1_000_000)] = 16000  # Hz
    n_features: Positive = 26
    window_s: Above0 = 0.032
    step_s: Above0 = 0.020
    normalize: bool = True
    prefix = "data.features."

    def __post_init__(self) -> None:
        super().__post_init__()
        most = MFCC_FILTERS if self.kind == "mfcc" else 512
        least = 2 if self.kind == "paper" else 1
        if not least <= self.n_features <= most:
            raise UserError(
                f"data.features.n_features={self.n_features}: {self.kind} takes {least} to {most}"
            )
        if min(self.window_s, self.step_s) * self.sample_rate < 2:
            raise UserError(
                f"data.features.window_s={self.window_s}, step_s={self.step_s}: both must be"
                " positive times in seconds (DeepSpeech: 0.032 and 0.020)"
            )
        if self.window_s > LONGEST_S or self.window_s > MOST_STEPS * self.step_s:
            raise UserError(
                f"data.features.window_s={self.window_s}, step_s={self.step_s}: a window has at"
                f" most {LONGEST_S:g} s and {MOST_STEPS} steps (DeepSpeech: 0.032 and 0.020)"
            )

    @property
    def window(self) -> int:
        """Samples of a frame."""
        return round(self.window_s * self.sample_rate)

    @property
    def step(self) -> int:
        """Samples from the beginning of a frame to that of the next."""
        return round(self.step_s * self.sample_rate)

    def frames(self, n_samples: int) -> int:
        """T, the number of frames of a sound of ``n_samples`` samples at ``sample_rate``."""
        return 1 + max(0, n_samples - self.window) // self.step

    def __call__(self, samples: Tensor) -> Tensor:
        """(N,) float32 in [-1, 1] to (T, F) float32, the same bits for any number of threads."""
        with one_thread():
            frames = self._frames(samples)
            return _normalized(frames) if self.normalize else frames

    def _frames(self, samples: Tensor) -> Tensor:
        power = self._power(samples)
        match self.kind:
            case "mfcc":
                return (power.sqrt() @ self._filters).clamp_min(FLOOR).log() @ self._cosines
            case "logmel":
                return (power @ self._filters).clamp_min(FLOOR**2).log()
            case _:
                energy = power.sum(1, keepdim=True)
                return torch.cat([power @ self._filters, energy], 1).clamp_min(FLOOR**2).log()

    def _power(self, samples: Tensor) -> Tensor:
        """(N,) to the power spectrogram (T, K)."""
        missing = self.window - samples.shape[0]
        if missing > 0:
            samples = torch.nn.functional.pad(samples, (0, missing))
        framed = samples.unfold(0, self.window, self.step) * torch.hann_window(self.window)
        spectrum = torch.fft.rfft(framed, n=2 * (self._filters.shape[0] - 1))
        return torch.view_as_real(spectrum).square().sum(-1)

    @cached_property
    def _cosines(self) -> Tensor:
        """DCT-II as TensorFlow's mfcc scales it: every row sqrt(2 / M), (M, F)."""
        n = torch.arange(MFCC_FILTERS, dtype=torch.float64)[:, None] + 0.5
        k = torch.arange(self.n_features, dtype=torch.float64)[None, :]
        scale, angle = math.sqrt(2 / MFCC_FILTERS), math.pi / MFCC_FILTERS
        return (scale * torch.cos(angle * n * k)).float()

    @cached_property
    def _filters(self) -> Tensor:
        """Triangles (K, M) over the bins of the shortest FFT that leaves no filter empty."""
        count = {"mfcc": MFCC_FILTERS, "logmel": self.n_features, "paper": self.n_features - 1}
        n_fft = 1 << (self.window - 1).bit_length()
        while True:
            filters = self._triangles(n_fft, count[self.kind])
            if bool((filters.sum(0) > 0).all()):
                return filters
            n_fft *= 2

    def _triangles(self, n_fft: int, count: int) -> Tensor:
        hertz = torch.arange(n_fft // 2 + 1, dtype=torch.float64) * self.sample_rate / n_fft
        scale = _hertz if self.kind == "paper" else _mel
        lowest, highest = torch.tensor([LOWEST_HZ, self.sample_rate / 2], dtype=torch.float64)
        position = scale(hertz)  # (K,)
        edges = torch.linspace(
            float(scale(lowest)), float(scale(highest)), count + 2, dtype=torch.float64
        )
        width = edges[1] - edges[0]
        rise = 1 - (position[:, None] - edges[None, 1:-1]).abs() / width  # (K, M)
        return rise.clamp_min(0).float()


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums and matrix products of several threads round differently (1e-6 was seen)."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _hertz(hertz: Tensor) -> Tensor:
    return hertz


def _mel(hertz: Tensor) -> Tensor:
    return 1127.0 * torch.log1p(hertz / 700.0)


def _normalized(frames: Tensor) -> Tensor:
    """Mean 0, variance 1 per feature over time; a constant feature becomes 0."""
    centred = frames - frames.mean(0)
    return centred / (centred.square().mean(0).sqrt() + 1e-5)
