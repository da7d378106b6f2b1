"""The speech data for Lightning: any source, checked, as bucketed batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.alphabet import Alphabet
from hybridtrain.tasks.speech.augment import Augment
from hybridtrain.tasks.speech.features import Features, one_thread
from hybridtrain.tasks.speech.sources.fsdd import Fsdd
from hybridtrain.tasks.speech.sources.manifest import CsvManifest, LibriSpeech
from hybridtrain.tasks.speech.sources.synth import SpokenDigits
from hybridtrain.tasks.speech.sources.utterance import SPLITS, Source, Utterance, frames_needed
from hybridtrain.util.option_types import Natural, Positive, typed

# ---- mini-batches of equally long utterances, as a data set whose items are whole batches -------
# Utterances are sorted by length and cut into batches once, so that little is padded; what is
# shuffled is the order of the batches. As each *item* is a batch, ``DataLoader(batches,
# batch_size=None, shuffle=True)`` is an ordinary loader over a map-style data set: any sampler that
# Lightning or a strategy puts in deals out whole batches, and every utterance is seen exactly once
# per epoch.
#
# Shapes: B utterances, T frames of the longest, F features, S labels of the longest transcript.

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


@dataclass(eq=False, repr=False)
class SpeechBatches(Dataset[Batch]):
    """Item i is the i-th batch, a dict (see ``collate``).

    ``epoch`` is asked for the current epoch whenever a batch is augmented. With ``skip_bad`` an
    utterance whose sound turns out damaged is left out with a warning instead of ending the run.
    """

    utterances: list[Utterance]
    batch_size: int
    features: Features
    alphabet: Alphabet
    augment: Augment | None = None
    epoch: Callable[[], int] = int
    frames_per_output: int = 1
    skip_bad: bool = False

    def __post_init__(self) -> None:
        self.frames = [self.features.frames(u.samples) for u in self.utterances]
        self.batches = bucketed(self.frames, self.batch_size)
        self._cache: dict[int, Tensor] = {}  # utterance: (T, F)
        self._cache_left = CACHE_BYTES

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, item: int) -> Batch:
        return self._collated(self.batches[item], self.augment)

    def longest(self) -> Batch:
        """The batch with the most frames, padding included; not augmented."""
        size = [len(b) * max(self.frames[i] for i in b) for b in self.batches]
        return self._collated(self.batches[size.index(max(size))], None)

    def _collated(self, batch: Sequence[int], augment: Augment | None) -> Batch:
        with one_thread():  # the augmentation's sums too
            items = [self._item(i, augment) for i in batch]
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
        return augment.generator(self.epoch(), 2 * index + stage)

    def __getstate__(self) -> dict[str, Any]:
        """For loader processes: they live for one epoch and need its number, not the trainer."""
        return self.__dict__ | {"epoch": partial(int, self.epoch()), "_cache": {}}


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


log = logging.getLogger(__name__)
MOST_NAMED = 20  # of the utterances that were skipped
SLOW = 5000  # utterances; above, a progress bar (0.1 ms per file on a local disk, more on others)


class SpeechDataModule(pl.LightningDataModule):
    """Utterances of a ``source`` as mini-batches of ``features``, bucketed by length.

    ``alphabet``: characters, an ``alphabet.txt``, or None for English. ``skip_bad`` leaves bad
    utterances out (``skipped`` lists them by split) instead of raising ``UserError``.
    ``frames_per_output``: feature frames per output of the model; None asks the trainer's module
    for an attribute of that name, else 1. ``num_workers`` loader processes start anew each epoch
    and forget cached features, so they pay off only where reading is slow.
    """

    @typed("data.")
    def __init__(
        self,
        source: Source,
        features: Features | None = None,
        augment: Augment | None = None,
        alphabet: Alphabet | str | None = None,
        batch_size: Positive = 16,
        eval_batch_size: Positive = 32,
        num_workers: Natural = 0,
        skip_bad: bool = False,
        frames_per_output: Positive | None = None,
    ) -> None:
        super().__init__()
        self.source = source
        self.features = features or Features()
        self.augment = augment
        self.alphabet = Alphabet.of(alphabet)
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.skip_bad = skip_bad
        self.frames_per_output = frames_per_output
        self.skipped: dict[str, list[str]] = {}
        self._sets: dict[str, SpeechBatches] = {}

    def prepare_data(self) -> None:
        """Once per machine, before any worker: make what the source has to make."""
        self.source.prepare()

    def setup(self, stage: str | None = None) -> None:
        """List and check the splits that ``stage`` needs; a second call does nothing.

        Raises ``UserError`` for an empty training or validation set and for bad utterances.
        """
        needed = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}
        for split in needed.get(stage or "", SPLITS):
            self.batches(split)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Batches of the training split, in a new order each epoch."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Batches of the validation split, shortest first."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Batch] | list[Any]:
        """Batches of the test split, shortest first; no loader if the source has no test set."""
        return self._loader("test") if len(self.batches("test")) else []

    def longest_batch(self) -> Batch:
        """The training batch with the most frames, padding included."""
        return self.batches("train").longest()

    def batches(self, split: str) -> SpeechBatches:
        """The data set of ``split``; sets it up if that was not done."""
        if split not in self._sets:
            self._sets[split] = self._load(split)
        return self._sets[split]

    def _loader(self, split: str, shuffle: bool = False) -> DataLoader[Batch]:
        batches: Any = self.batches(split)
        return DataLoader(batches, batch_size=None, shuffle=shuffle, num_workers=self.num_workers)

    def _load(self, split: str) -> SpeechBatches:
        found = self.source.utterances(split)
        if not found and split != "test":
            raise UserError(f"the {split} set of {self.source} is empty: name files with content")
        stride = self._stride()
        good, self.skipped[split] = check_all(
            found, self.alphabet, self.features, stride, self.skip_bad
        )
        _tell_skipped(split, self.skipped[split], len(found))
        train = split == "train"
        return SpeechBatches(
            good,
            self.batch_size if train else self.eval_batch_size,
            self.features,
            self.alphabet,
            self.augment if train else None,
            self._epoch,
            stride,
            self.skip_bad,
        )

    def _stride(self) -> int:
        if self.frames_per_output is not None:
            return self.frames_per_output
        module = getattr(self.trainer, "lightning_module", None)
        return int(getattr(module, "frames_per_output", 1))

    def _epoch(self) -> int:
        return self.trainer.current_epoch if self.trainer is not None else 0


@rank_zero_only
def _tell_skipped(split: str, bad: list[str], n_found: int) -> None:
    """Warn on rank 0 only: all workers check the same files."""
    if bad:
        more = f"\n  and {len(bad) - MOST_NAMED} more" if len(bad) > MOST_NAMED else ""
        names = "".join(f"\n  {line}" for line in bad[:MOST_NAMED])
        log.warning("%s: skipped %d of %d utterances:%s%s", split, len(bad), n_found, names, more)


def spoken_digits(**options: Any) -> SpeechDataModule:
    """``data=spoken_digits``: options of ``SpokenDigits`` and ``SpeechDataModule`` in one."""
    return _build(SpokenDigits, options)


def csv(**options: Any) -> SpeechDataModule:
    """``data=csv``: options of ``CsvManifest`` and ``SpeechDataModule`` in one."""
    return _build(CsvManifest, options)


def librispeech(**options: Any) -> SpeechDataModule:
    """``data=librispeech``: options of ``LibriSpeech`` and ``SpeechDataModule`` in one."""
    return _build(LibriSpeech, options)


def fsdd(**options: Any) -> SpeechDataModule:
    """``data=fsdd``: options of ``Fsdd`` and ``SpeechDataModule`` in one."""
    return _build(Fsdd, options)


def _build(source: Any, options: dict[str, Any]) -> SpeechDataModule:
    """Split flat options into those of the source and those of the data module."""
    names = {field.name for field in fields(source)}
    own = {name: value for name, value in options.items() if name in names}
    rest = {name: value for name, value in options.items() if name not in names}
    return SpeechDataModule(source(**own), **rest)


# ---- checks before training ----------------------------------------------------------------------


def check(
    utterance: Utterance, alphabet: Alphabet, features: Features, frames_per_output: int = 1
) -> Utterance:
    """The utterance with its length filled in; ``UserError`` if a model cannot learn from it.

    Only headers are read. ``frames_per_output``: feature frames per output of the model.
    """
    try:
        if utterance.fault:
            raise UserError(utterance.fault)
        if not utterance.transcript.strip():
            raise UserError(f"the transcript of {utterance.name} is empty")
        labels = alphabet.encode(utterance.transcript)
        samples = utterance.measure(features.sample_rate)
        _require_room(utterance, labels, features.frames(samples), frames_per_output)
    except UserError as error:
        where = f"{utterance.origin}: " if utterance.origin else ""
        raise UserError(f"{where}{error}") from error
    return replace(utterance, samples=samples)


def check_all(
    found: list[Utterance],
    alphabet: Alphabet,
    features: Features,
    frames_per_output: int = 1,
    skip_bad: bool = False,
) -> tuple[list[Utterance], list[str]]:
    """The good utterances, and one message for each that was skipped.

    Without ``skip_bad`` the first bad one raises ``UserError``; with it, all bad ones do.
    """
    good: list[Utterance] = []
    problems: list[str] = []
    for utterance in _with_progress(found):
        try:
            good.append(check(utterance, alphabet, features, frames_per_output))
        except UserError as error:
            if not skip_bad:
                raise UserError(f"{error} (data.skip_bad=true leaves such files out)") from error
            problems.append(str(error))
    if problems and not good:
        raise UserError(f"all {len(problems)} utterances are bad; the first: {problems[0]}")
    return good, problems


def _require_room(
    utterance: Utterance, labels: list[int], frames: int, frames_per_output: int
) -> None:
    needed = frames_needed(labels, frames_per_output)
    if needed > frames:
        raise UserError(
            f"the transcript {utterance.transcript!r} is too long for {utterance.name}: its"
            f" {len(labels)} characters need {needed} feature frames, the sound has {frames}"
        )


def _with_progress(found: list[Utterance]) -> Iterator[Utterance] | Iterable[Utterance]:
    if len(found) < SLOW or found[0].clips[0].path.endswith(".npy"):
        return found
    from rich.progress import track

    return track(found, description="Checking the audio files", transient=True)
