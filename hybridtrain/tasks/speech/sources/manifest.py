"""``data=csv``: the manifests of DeepSpeech and Coqui STT.

A CSV file with a header line and the columns ``wav_filename`` (absolute, or relative to the CSV),
``wav_filesize`` (bytes, used for the order only, 0 if absent) and ``transcript``; other columns
are ignored. Several files are merged and sorted by ascending ``wav_filesize``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.sources.utterance import AudioClip, Source, Utterance
from hybridtrain.util.files import text_lines
from hybridtrain.util.option_types import Checked, Natural
from hybridtrain.util.tables import TableRow, read_table, whole_number

REQUIRED = ("wav_filename", "transcript")
LARGEST_BYTES = 2**50  # of a sound file
HELD_OUT = 20  # without data.val every 20th training row is kept for validation

Files = str | Sequence[str] | None


@dataclass(frozen=True)
class CsvManifest(Checked, Source):
    """``train``, ``val``, ``test``: one file, several separated by commas, or a list.

    ``reverse_*`` turns the order round (longest first) and ``limit_*`` keeps the first so many
    rows after that (0: all), as in DeepSpeech. Without ``val`` every 20th training row is held out
    for validation; without ``test`` there is no test set.
    """

    train: Files = None
    val: Files = None
    test: Files = None
    limit_train: Natural = 0
    limit_val: Natural = 0
    limit_test: Natural = 0
    reverse_train: bool = False
    reverse_val: bool = False
    reverse_test: bool = False
    prefix = "data."

    def utterances(self, split: str) -> list[Utterance]:
        """Rows of ``split``; ``UserError`` names file and line."""
        if not _paths(self.train):
            raise UserError("data=csv needs data.train=<file.csv> (several: separate by commas)")
        if split == "test" or _paths(self.val):
            return self._read(split)
        rows = self._read("train")
        if len(rows) < 2:
            raise UserError("one training row is too few to hold one out: set data.val=<file.csv>")
        step = min(HELD_OUT, len(rows))
        kept_out = range(step - 1, len(rows), step)
        if split == "val":
            return self._ordered([rows[i] for i in kept_out], split)
        return [row for i, row in enumerate(rows) if i not in kept_out]

    def _read(self, split: str) -> list[Utterance]:
        rows = [row for path in _paths(getattr(self, split)) for row in read_manifest(path)]
        return self._ordered(rows, split)

    def _ordered(self, rows: list[Utterance], split: str) -> list[Utterance]:
        rows.sort(key=lambda row: row.filesize, reverse=getattr(self, f"reverse_{split}"))
        return rows[: getattr(self, f"limit_{split}") or None]


def read_manifest(path: Path) -> list[Utterance]:
    """All rows of one CSV file in file order; ``UserError`` if it is not a manifest."""
    rows = read_table(path, "the manifest", REQUIRED, ("wav_filesize",))
    return [_utterance(path, row) for row in rows]


def _utterance(path: Path, row: TableRow) -> Utterance:
    """The row's utterance; where the row makes no sense, its ``fault`` says so."""
    name, size = (row.cells.get(column, "") for column in ("wav_filename", "wav_filesize"))
    filesize, fault = whole_number(size or "0"), row.fault
    if not fault and not name:
        fault = "wav_filename is empty"
    if filesize is None or not 0 <= filesize < LARGEST_BYTES:
        fault = f"wav_filesize={size[:40]!r} is not a number of bytes"
    return Utterance(
        file := str(path.parent / name),  # an absolute name stays itself
        row.cells.get("transcript", ""),
        (AudioClip(file),),
        f"{path}, line {row.line}",
        0 if fault else filesize or 0,
        fault=fault,
    )


def _names(given: Files) -> list[str]:
    """One name, several separated by commas, or a list."""
    names = given.split(",") if isinstance(given, str) else given or ()
    return [name.strip() for name in names if name.strip()]


def _paths(files: Files) -> list[Path]:
    return [Path(name).expanduser() for name in _names(files)]


# ---- data=librispeech: the corpus as it is unpacked (Panayotov et al. 2015) ---------------------
# ``root/<split>/<speaker>/<chapter>/`` holds ``<speaker>-<chapter>-<number>.flac`` and one
# ``<speaker>-<chapter>.trans.txt`` with lines ``<speaker>-<chapter>-<number> THE TRANSCRIPT``.


@dataclass(frozen=True)
class LibriSpeech(Source):
    """``root`` is the folder with ``train-clean-100`` and so on, or the one above it.

    ``train``, ``val``, ``test``: folder names under root, one, several separated by commas, or a
    list. Transcripts are lower-cased.
    """

    root: str | None = None
    train: str | Sequence[str] = "train-clean-100"
    val: str | Sequence[str] = "dev-clean"
    test: str | Sequence[str] = "test-clean"

    def utterances(self, split: str) -> list[Utterance]:
        """All utterances of the folders that ``split`` names, sorted by name."""
        return [
            utterance
            for name in _names(getattr(self, split))
            for transcripts in self._transcripts(name)
            for utterance in _lines(transcripts)
        ]

    def _transcripts(self, name: str) -> list[Path]:
        if not self.root:
            raise UserError("data=librispeech needs data.root=<the folder with train-clean-100>")
        root = Path(self.root).expanduser()
        for folder in (root / name, root / "LibriSpeech" / name):
            if found := sorted(folder.glob("*/*/*.trans.txt")):
                return found
        raise UserError(
            f"data.root={self.root}: no {name}/<speaker>/<chapter>/*.trans.txt there (set data.root"
            " to the unpacked LibriSpeech folder, data.train, data.val, data.test to folders in it)"
        )


def _lines(transcripts: Path) -> list[Utterance]:
    return [
        _of_line(transcripts, number, line)
        for number, line in text_lines(transcripts, "the transcripts")
        if line.strip()
    ]


def _of_line(transcripts: Path, number: int, line: str) -> Utterance:
    key, text = [*line.split(maxsplit=1), ""][:2]
    file = transcripts.with_name(f"{key}.flac")
    size = file.stat().st_size if file.exists() else 0  # a missing file is reported by the checks
    origin = f"{transcripts}, line {number}"
    return Utterance(
        str(file), text.strip().lower(), (AudioClip(str(file)),), origin, size, key.split("-")[0]
    )
