"""``data=spoken_digits``: spoken digit sequences, synthesised on the spot by espeak-ng.

Every utterance ("three one four") has its own voice, speed, pitch, level, microphone and noise. All
of it follows from the settings and the seed: the plan is drawn here, and each shard of 250
utterances is spoken by a fresh process (see ``espeak.py``), so that the same settings give the same
bits on any number of cores. The result lies in the cache folder under a key made of the settings:

    <root>/spoken_digits/<key>/manifest.json, train-00.npy, train-01.npy, ..., val-00.npy, ...

A run makes a corpus in a temporary folder and renames it, under a lock. The manifest holds a
SHA-256 per shard; a corpus that does not agree with it is made again, with one warning.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.sources import espeak
from hybridtrain.tasks.speech.sources.espeak import SpokenUtterance
from hybridtrain.tasks.speech.sources.fsdd import WORDS
from hybridtrain.tasks.speech.sources.utterance import SPLITS, AudioClip, Utterance, check_bounds
from hybridtrain.util.cleanup import removed_in_the_end
from hybridtrain.util.option_types import Checked, Positive

log = logging.getLogger(__name__)
FORMAT = 1  # part of the key: raise it when the same settings mean other sound
SHARD = 250  # utterances per process
TRACT = 1.2  # training voices are shifted up or down by up to 20 %: many more speakers


ACCENTS = (
    "en",
    "en-us",
    "en-gb-scotland",
    "en-gb-x-gbclan",
    "en-gb-x-gbcwmd",
    "en-gb-x-rp",
    "en-029",
    "en-us-nyc",
)

TRAIN = """
Alex Alicia Andrea Denis Diogo Gene Gene2 Henrique Hugo Jacky Lee Marco Mario Mike Reed
RicishayMax RicishayMax2 RicishayMax3 adam anika announcer antonio aunty benjamin boris ed edward
edward2 f1 f4 grandma grandpa ian iven iven2 iven3 iven4 klatt klatt3 klatt4 klatt5 klatt6 m1 m2
m3 m6 m7 m8 max michel miguel mike2 pablo paul pedro shelby steph steph2 steph3 travis victor
"""
VAL = """
Michael belinda david f3 gustave marcelo norbert sandro
"""
TEST = """
Andy Annie Nguyen f2 f5 john linda m4 m5 quincy rob robert
"""

SPEAKERS = {"train": TRAIN.split(), "val": VAL.split(), "test": TEST.split()}


@dataclass(frozen=True)
class SpokenDigits(Checked):
    """How many utterances per split, digits per utterance, and where they are kept.

    ``root`` None is ``$XDG_CACHE_HOME/hybridtrain`` or ``~/.cache/hybridtrain``. ``min_snr_db`` to
    ``max_snr_db``: how far the noise lies below the speech. Speakers differ between the splits.
    """

    root: str | None = None
    train: Positive = 4000
    val: Positive = 150
    test: Positive = 300
    min_digits: Positive = 1
    max_digits: Positive = 6
    min_snr_db: float = 15.0
    max_snr_db: float = 40.0
    seed: int = 0
    prefix = "data."

    def prepare(self) -> None:
        """Make the corpus unless it is there and whole (checked by its hashes)."""
        check_bounds(self, "digits", "snr_db")
        folder = self.folder()
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(folder.parent):
                if not self._is_whole(folder):
                    self._make(folder)
        except OSError as error:
            raise UserError(
                f"cannot write the speech cache {folder}: {error} (set data.root to a folder of"
                " yours with 300 MB free)"
            ) from error

    def utterances(self, split: str) -> list[Utterance]:
        """The utterances of ``split``; makes the corpus if ``prepare`` was not called."""
        folder = self.folder()
        if not (folder / "manifest.json").is_file():
            self.prepare()
        rows = _manifest(folder)["utterances"][split]
        return [
            Utterance(
                f"spoken_digits/{split}/{i:05d} ({row['speaker']})",
                row["text"],
                (AudioClip(str(folder / row["shard"]), row["start"], row["frames"]),),
                filesize=2 * row["frames"],
                speaker=row["speaker"],
            )
            for i, row in enumerate(rows)
        ]

    def folder(self) -> Path:
        """Where this corpus lies, whether it has been made or not."""
        settings = {name: float(value) for name, value in asdict(self).items() if name != "root"}
        voices = [ACCENTS, SPEAKERS]
        text = json.dumps([FORMAT, SHARD, TRACT, settings, voices], sort_keys=True)
        return _root(self.root) / "spoken_digits" / hashlib.sha256(text.encode()).hexdigest()[:16]

    def _is_whole(self, folder: Path) -> bool:
        if not folder.exists():
            return False
        try:
            shards = _manifest(folder)["sha256"]
            if shards and all(_sha256(folder / name) == shards[name] for name in shards):
                return True
        except (OSError, ValueError, KeyError, TypeError):
            pass
        log.warning("the speech cache %s is damaged: making it again", folder)
        return False

    def _make(self, folder: Path) -> None:
        if find_spec("espeakng_loader") is None:
            raise UserError(
                "data=spoken_digits needs espeak-ng: pip install 'hybridtrain[synth]', or name"
                " other data: data=fsdd data.root=<folder>, data=csv data.train=<file.csv>"
            )
        new = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        with removed_in_the_end(new):
            self._fill(new)
            shutil.rmtree(folder, ignore_errors=True)
            new.rename(folder)
        _manifest.cache_clear()

    def _fill(self, folder: Path) -> None:
        plan = {split: self._plan(split) for split in SPLITS}
        shards = {
            f"{split}-{first // SHARD:02d}.npy": plan[split][first : first + SHARD]
            for split in SPLITS
            for first in range(0, len(plan[split]), SHARD)
        }
        lengths = speak_shards(folder, shards)
        utterances: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
        for name, jobs in shards.items():
            utterances[name.split("-")[0]].extend(_rows(name, jobs, lengths[name]))
        manifest = {
            "sha256": {name: _sha256(folder / name) for name in shards},
            "utterances": utterances,
        }
        (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")

    def _plan(self, split: str) -> list[SpokenUtterance]:
        rng = random.Random(f"{self.seed}/{split}")  # a string seed is hashed, stable everywhere
        speakers = SPEAKERS[split]
        count: int = getattr(self, split)
        tract = TRACT if split == "train" else 1.0  # the held-out speakers stay what they are
        return [self._job(rng, speakers[i % len(speakers)], tract) for i in range(count)]

    def _job(self, rng: random.Random, speaker: str, tract: float) -> SpokenUtterance:
        words = rng.choices(WORDS, k=rng.randint(self.min_digits, self.max_digits))
        return SpokenUtterance(
            text=rng.choice((" ", " ", " ", ", ")).join(words),  # a comma is a pause
            voice=f"{rng.choice(ACCENTS)}+{speaker}",
            words_per_minute=rng.randint(120, 200),
            pitch=rng.randint(30, 70),
            pitch_range=rng.randint(20, 80),
            tract=round(rng.uniform(1 / tract, tract), 4),
            level_db=round(rng.uniform(-32, -18), 2),
            snr_db=round(rng.uniform(self.min_snr_db, self.max_snr_db), 2),
            tilt=round(rng.uniform(0, 2), 2),
            tone_db=tuple(round(rng.uniform(-6, 6), 2) for _ in range(6)),
            silence_s=(round(rng.uniform(0.03, 0.2), 3), round(rng.uniform(0.03, 0.2), 3)),
            seed=rng.getrandbits(31),
        )


def _root(root: str | None) -> Path:
    if root:
        return Path(root).expanduser().resolve()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hybridtrain"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder itself: one process makes a corpus, and no lock file is left."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _rows(shard: str, jobs: list[SpokenUtterance], lengths: list[int]) -> list[dict[str, Any]]:
    rows, start = [], 0
    for job, frames in zip(jobs, lengths, strict=True):
        text = job.text.replace(",", "")
        rows.append(
            {"shard": shard, "start": start, "frames": frames, "text": text, "speaker": job.voice}
        )
        start += frames
    return rows


@lru_cache(maxsize=4)
def _manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_COLUMNS = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


def speak_shards(folder: Path, shards: dict[str, list[SpokenUtterance]]) -> dict[str, list[int]]:
    """Write ``folder/name`` for each shard; returns its utterances' lengths in samples, by name.

    Raises ``RuntimeError`` with the engine's message if a process fails. An error or Ctrl-C ends
    all processes.
    """
    processes: list[subprocess.Popen[str]] = []
    shown = Progress(*_COLUMNS, console=Console(stderr=True), transient=True)
    with shown as bar, ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        task = bar.add_task("Speaking the digits", total=sum(map(len, shards.values())))

        def speak(name: str) -> list[int]:
            process = _start(folder / name)
            processes.append(process)
            assert process.stdin and process.stdout and process.stderr
            with process:
                json.dump([asdict(job) for job in shards[name]], process.stdin)
                process.stdin.close()
                lengths = []
                for line in process.stdout:
                    lengths.append(int(line))
                    bar.advance(task)
                errors = process.stderr.read()
            if process.returncode != 0:
                raise RuntimeError(f"espeak-ng failed on {name}: {errors.strip()[-1000:]}")
            return lengths

        try:
            return dict(zip(shards, pool.map(speak, shards), strict=True))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()
            raise


def _start(out: Path) -> subprocess.Popen[str]:
    # -P: the script's own folder holds modules that must not hide others
    command = [sys.executable, "-P", espeak.__file__, str(out)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
