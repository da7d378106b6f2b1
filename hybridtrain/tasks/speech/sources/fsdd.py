"""``data=fsdd``: the Free Spoken Digit Dataset, single digits composed into sequences.

Recordings are named ``{digit}_{speaker}_{take}.wav``. By the data set's own convention takes 0 to 4
are the test split; takes 5 to 9 are validation here, the others training. A sequence joins
recordings of one speaker and one split with short pauses: "three one four". The sequences follow
from the seed alone, and each recording of a split is used at least ``passes`` times before the
split ends, every speaker's recordings in a new random order each pass.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.sources.utterance import AudioClip, Source, Utterance, check_bounds
from hybridtrain.util.option_types import Checked, NotNegative, Positive

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NAME = re.compile(r"(\d)_([^_]+)_(\d+)\.(?:wav|flac)")
TEST_TAKES = range(5)
VAL_TAKES = range(5, 10)


@dataclass(frozen=True, slots=True)
class FsddRecording:
    """One spoken digit."""

    path: str
    digit: int
    speaker: str
    take: int


@dataclass(frozen=True)
class Fsdd(Checked, Source):
    """``root``: the data set's folder (with ``recordings/`` inside), or the recordings' own.

    ``min_digits`` to ``max_digits`` per sequence, pauses of ``min_gap_s`` to ``max_gap_s``;
    ``train_sequences`` per epoch; ``passes``: how often validation and test use each recording.
    """

    root: str | None = None
    min_digits: Positive = 1
    max_digits: Positive = 6
    min_gap_s: NotNegative = 0.0
    max_gap_s: NotNegative = 0.2
    train_sequences: Positive = 4000
    passes: Positive = 1
    seed: int = 0
    prefix = "data."

    def utterances(self, split: str) -> list[Utterance]:
        """The sequences of ``split``, shuffled; the same for the same settings and files."""
        check_bounds(self, "digits", "gap_s")
        rng = random.Random(f"{self.seed}/{split}")  # a string seed is hashed, stable everywhere
        recordings = [r for r in self._recordings() if _split(r.take) == split]
        speakers = sorted({r.speaker for r in recordings})
        wanted = -(-self.train_sequences // max(1, len(speakers))) if split == "train" else 0
        found = [
            sequence
            for speaker in speakers
            for sequence in self._compose(
                [r for r in recordings if r.speaker == speaker], wanted, rng
            )
        ]
        rng.shuffle(found)
        chosen = found[: self.train_sequences] if split == "train" else found
        return [_utterance(split, i, s, gaps) for i, (s, gaps) in enumerate(chosen)]

    def _compose(
        self, recordings: list[FsddRecording], wanted: int, rng: random.Random
    ) -> Iterator[tuple[list[FsddRecording], list[float]]]:
        """At least ``wanted`` sequences that use every recording at least ``passes`` times."""
        pool: list[FsddRecording] = []
        to_use, made = self.passes * len(recordings), 0
        while to_use > 0 or made < wanted:
            count = rng.randint(self.min_digits, self.max_digits)
            if wanted == 0:  # a held-out recording is not used once more to fill the last sequence
                count = max(self.min_digits, min(count, to_use))
            while len(pool) < count:
                pool.extend(rng.sample(recordings, len(recordings)))
            sequence, pool = pool[:count], pool[count:]
            gaps = [rng.uniform(self.min_gap_s, self.max_gap_s) for _ in sequence]
            to_use, made = to_use - count, made + 1
            yield sequence, [0.0, *gaps[1:]]

    def _recordings(self) -> list[FsddRecording]:
        if not self.root:
            raise UserError("data=fsdd needs data.root=<the folder with recordings/>")
        root = Path(self.root).expanduser()
        folder = root / "recordings" if (root / "recordings").is_dir() else root
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        named = [(file, NAME.fullmatch(file.name)) for file in files]
        found = [
            FsddRecording(str(file), int(name[1]), name[2], int(name[3]))
            for file, name in named
            if name
        ]
        if not found:
            raise UserError(
                f"data.root={self.root}: no recordings named digit_speaker_take.wav in {folder}"
                " (the Free Spoken Digit Dataset: 3_theo_14.wav)"
            )
        return found


def _split(take: int) -> str:
    if take in TEST_TAKES:
        return "test"
    return "val" if take in VAL_TAKES else "train"


def _utterance(
    split: str, index: int, sequence: list[FsddRecording], gaps: list[float]
) -> Utterance:
    files = "+".join(Path(r.path).stem for r in sequence)
    clips = tuple(
        AudioClip(r.path, gap_s=round(gap, 4)) for r, gap in zip(sequence, gaps, strict=True)
    )
    text = " ".join(WORDS[r.digit] for r in sequence)
    return Utterance(f"fsdd/{split}/{index:05d}: {files}", text, clips, speaker=sequence[0].speaker)
