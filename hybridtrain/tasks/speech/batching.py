"""Mini-batches of equally long utterances, as a data set whose items are whole batches.

Utterances are sorted by length and cut into batches once, so that little is padded; what is
shuffled is the order of the batches. As each *item* is a batch, ``DataLoader(batches,
batch_size=None, shuffle=True)`` is an ordinary loader over a map-style data set: any sampler that
Lightning or a strategy puts in deals out whole batches, and every utterance is seen exactly once
per epoch.

Shapes: B utterances, T frames of the longest, F features, S labels of the longest transcript.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.alphabet import Alphabet
from hybridtrain.tasks.speech.augment import Augment
from hybridtrain.tasks.speech.features import Features, one_thread
from hybridtrain.tasks.speech.sources.utterance import Utterance, frames_needed

log = logging.getLogger(__name__)
CACHE_BYTES = 256 << 20  # of features per process; the rest is computed each time

Batch = dict[str, Any]


def bucketed(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices into ``lengths``, sorted by length, in batches; an incomplete one is the shortest's.

    Equal lengths keep their order: the same input gives the same batches.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    first = len(order) % batch_size
    head = [order[:first]] if first else []
    return head + [order[i : i + batch_size] for i in range(first, len(order), batch_size)]


class SpeechBatches(Dataset[Batch]):
    """Item i is the i-th batch, a dict (see ``collate``).

    ``epoch`` is asked for the current epoch whenever a batch is augmented. With ``skip_bad`` an
    utterance whose sound turns out damaged is left out with a warning instead of ending the run.
    """

    def __init__(
        self,
        utterances: list[Utterance],
        batch_size: int,
        features: Features,
        alphabet: Alphabet,
        augment: Augment | None = None,
        epoch: Callable[[], int] = int,
        frames_per_output: int = 1,
        skip_bad: bool = False,
    ) -> None:
        self.utterances = utterances
        self.frames = [features.frames(u.samples) for u in utterances]
        self.batches = bucketed(self.frames, batch_size)
        self.features = features
        self.alphabet = alphabet
        self.augment = augment
        self.frames_per_output = frames_per_output
        self.skip_bad = skip_bad
        self._epoch = epoch
        self._cache: dict[int, Tensor] = {}  # utterance: (T, F)
        self._cache_left = CACHE_BYTES

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, item: int) -> Batch:
        with one_thread():  # the augmentation's sums too
            items = [self._item(i, self.augment) for i in self.batches[item]]
        return collate([item for item in items if item is not None])

    def longest(self) -> Batch:
        """The batch with the most frames, padding included; not augmented."""
        size = [len(b) * max(self.frames[i] for i in b) for b in self.batches]
        batch = self.batches[size.index(max(size))]
        items = [self._item(i, None) for i in batch]
        return collate([item for item in items if item is not None])

    def _item(self, index: int, augment: Augment | None) -> tuple[Tensor, Tensor, Utterance] | None:
        """Features (T, F), labels (S,), and what they are of."""
        utterance = self.utterances[index]
        labels = self.alphabet.encode(utterance.transcript)
        try:
            features = self._features(index, augment)
        except UserError as error:
            if not self.skip_bad:
                raise
            log.warning("skipped: %s", error)
            return None
        if augment is not None:
            at_least = frames_needed(labels, self.frames_per_output)
            features = augment.frames(features, self._draw(augment, index, 1), at_least)
        return features, torch.tensor(labels), utterance

    def _features(self, index: int, augment: Augment | None) -> Tensor:
        """(T, F), from the cache unless the sound itself is augmented."""
        if augment is not None and augment.touches_sound:
            samples = self.utterances[index].load(self.features.sample_rate)
            return self.features(augment.sound(samples, self._draw(augment, index, 0)))
        if (cached := self._cache.get(index)) is not None:
            return cached
        features = self.features(self.utterances[index].load(self.features.sample_rate))
        if features.nbytes <= self._cache_left:
            self._cache[index] = features
            self._cache_left -= features.nbytes
        return features

    def _draw(self, augment: Augment, index: int, stage: int) -> torch.Generator:
        return augment.generator(self._epoch(), 2 * index + stage)

    def __getstate__(self) -> dict[str, Any]:
        """For loader processes: they live for one epoch and need its number, not the trainer."""
        return self.__dict__ | {"_epoch": partial(int, self._epoch()), "_cache": {}}


def collate(items: list[tuple[Tensor, Tensor, Utterance]]) -> Batch:
    """Pad with zeros to one batch.

    ``features`` (B, T, F) float32, ``feature_lengths`` (B,), ``targets`` (B, S),
    ``target_lengths`` (B,) int64, ``transcripts`` and ``files`` lists of B strings.
    """
    if not items:
        raise UserError("a whole batch of sound files is damaged: repair or remove them")
    features, labels, utterances = zip(*items, strict=True)
    return {
        "features": pad_sequence(list(features), batch_first=True),
        "feature_lengths": torch.tensor([len(f) for f in features]),
        "targets": pad_sequence(list(labels), batch_first=True),
        "target_lengths": torch.tensor([len(t) for t in labels]),
        "transcripts": [u.transcript for u in utterances],
        "files": [u.name for u in utterances],
    }
