"""Augmentation of the training sound and its features.

On the sound: volume, and white noise. On the features: tempo (the frames are stretched or squeezed
by linear interpolation, which changes the duration but not the pitch), and SpecAugment's masks
(Park et al. 2019): blocks of frames, and bands of features, set to 0, the mean of normalised
features. All is drawn from (seed, epoch, utterance) alone, so that a run is
reproducible to the bit whatever the number of workers and the order of the batches.

Shapes: N samples, T frames, F features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from hybridtrain.util.option_types import Checked, Decay, Natural, NotNegative


@dataclass(frozen=True)
class Augment(Checked):
    """Each range is drawn from uniformly; 0 (or None) switches a change off.

    ``tempo`` 0.1 is 0.9 to 1.1 times the speed; ``time_masks`` blocks of up to ``time_width``
    frames and ``frequency_masks`` bands of up to ``frequency_width`` features; ``volume_db`` 6 is
    -6 to +6 dB; ``noise_db`` 10 puts noise 10 to 50 dB (always 40 dB of range) below the sound.
    """

    tempo: Decay = 0.1
    time_masks: Natural = 2
    time_width: Natural = 8
    frequency_masks: Natural = 1
    frequency_width: Natural = 4
    volume_db: NotNegative = 0.0
    noise_db: float | None = None
    seed: int = 0

    prefix = "data.augment."

    @property
    def touches_sound(self) -> bool:
        """Whether features must be computed anew each epoch."""
        return self.volume_db > 0 or self.noise_db is not None

    def generator(self, epoch: int, index: int) -> Generator:
        """The source of randomness of utterance ``index`` in ``epoch``."""
        mixed = ((self.seed * 1_000_003 + epoch) * 1_000_003 + index) % (1 << 63)
        return Generator().manual_seed(mixed)

    def sound(self, samples: Tensor, draw: Generator) -> Tensor:
        """(N,) to (N,)."""
        if self.noise_db is not None:
            below_db = self.noise_db + 40 * _uniform(draw)
            rms = float(samples.square().mean().sqrt()) * 10 ** (-below_db / 20)
            samples = samples + rms * torch.randn(samples.shape, generator=draw)
        if self.volume_db > 0:
            samples = samples * 10 ** (self.volume_db * (2 * _uniform(draw) - 1) / 20)
        return samples.clamp(-1, 1) if self.touches_sound else samples

    def frames(self, features: Tensor, draw: Generator, at_least: int = 1) -> Tensor:
        """(T, F) to (T', F) with T' not below ``at_least`` (nor T' < T if T is below it)."""
        if self.tempo > 0:
            features = self._stretched(features, draw, at_least)
        features = features.clone()
        for _ in range(self.time_masks):
            start, end = _block(len(features), min(self.time_width, len(features) // 4), draw)
            features[start:end] = 0
        for _ in range(self.frequency_masks):
            start, end = _block(features.shape[1], self.frequency_width, draw)
            features[:, start:end] = 0
        return features

    def _stretched(self, features: Tensor, draw: Generator, at_least: int) -> Tensor:
        length = len(features)
        speed = 1 + self.tempo * (2 * _uniform(draw) - 1)
        wanted = max(round(length / speed), min(at_least, length))
        if wanted == length:
            return features
        rows = features.T[None]  # (1, F, T)
        return torch.nn.functional.interpolate(rows, wanted, mode="linear")[0].T


def _uniform(draw: Generator) -> float:
    return float(torch.rand((), generator=draw))


def _block(length: int, widest: int, draw: Generator) -> tuple[int, int]:
    """A random block of 0 to ``widest`` of ``length`` places."""
    width = min(int(_uniform(draw) * (widest + 1)), length)
    start = int(_uniform(draw) * (length - width + 1))
    return start, start + width
