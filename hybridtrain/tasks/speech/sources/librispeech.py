"""``data=librispeech``: the corpus as it is unpacked (Panayotov et al. 2015).

``root/<split>/<speaker>/<chapter>/`` holds ``<speaker>-<chapter>-<number>.flac`` and one
``<speaker>-<chapter>.trans.txt`` with lines ``<speaker>-<chapter>-<number> THE TRANSCRIPT``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.sources.utterance import Clip, Source, Utterance
from hybridtrain.util.files import read_text


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
        names = getattr(self, split)
        folders = names.split(",") if isinstance(names, str) else names
        return [
            utterance
            for name in folders
            for transcripts in self._transcripts(name.strip())
            for utterance in _read(transcripts)
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


def _read(transcripts: Path) -> list[Utterance]:
    lines = read_text(transcripts, "the transcripts").splitlines()
    return [
        _utterance(transcripts, number, line)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _utterance(transcripts: Path, number: int, line: str) -> Utterance:
    key, _, text = line.strip().partition(" ")
    file = transcripts.with_name(f"{key}.flac")
    size = file.stat().st_size if file.exists() else 0  # a missing file is reported by the checks
    origin = f"{transcripts}, line {number}"
    return Utterance(
        str(file), text.strip().lower(), (Clip(str(file)),), origin, size, key.split("-")[0]
    )
