"""The file of a record: cells of 24 bytes, one for each event.

Theory of operation. A record begins with a cell that says what it is. Every other cell is an event:
what kind of message the server was handed, by which worker, when, a checksum of what was brought,
and (for a push) how long the worker had computed and for how many samples. A cell of kind ``TELLS``
announces a piece of JSON instead, compressed and padded to whole cells: the first says what was run
(``header``), later ones what has become known (the data, the initial parameters), the last how it
ended. Cells are appended as they happen and never changed, so that whatever is left of a killed
run's file is a record of its beginning.

Reading decodes JSON and numbers and nothing else: no record can make its reader run code.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hybridtrain.errors import UserError

RECORD_NAME = "record.bin"
VERSION = 1
CELL_BYTES = 24
TELLS = 255  # the kind of a cell that announces JSON
NOBODY = 65535  # the worker of an event that is nobody's

_LARGEST_PIECE_BYTES = 2**26
_FIRST = b"hybridtrain record %3d\n\n" % VERSION
_CELL = struct.Struct("<BxHIdff")
_TYPE = np.dtype(
    [
        ("kind", "u1"),
        ("free", "u1"),
        ("worker", "<u2"),
        ("print", "<u4"),  # checksum of what was brought; of TELLS: bytes that follow
        ("at_s", "<f8"),  # since the record began
        ("own_s", "<f4"),  # of a push: what the worker has computed since its release
        ("samples", "<f4"),  # of a push
    ]
)
assert len(_FIRST) == _CELL.size == _TYPE.itemsize == CELL_BYTES


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that the server was handed. ``number`` counts from 0."""

    number: int
    kind: str
    worker: int
    print: int
    at_s: float


@dataclass(frozen=True)
class Record:
    """What a file holds.

    ``told`` are the pieces of JSON, merged; ``cells`` the events, in their order; ``whole`` says
    whether the run came to its own end.
    """

    path: Path
    told: dict[str, Any]
    cells: np.ndarray[Any, np.dtype[np.void]]
    kinds: tuple[str, ...] = field(default=())
    n_bytes: int = 0  # of the whole file

    @property
    def whole(self) -> bool:
        return "end" in self.told

    @property
    def header(self) -> dict[str, Any]:
        header: dict[str, Any] = self.told["header"]
        return header

    @property
    def n_workers(self) -> int:
        return int(self.header["workers"])

    def events(self) -> Iterator[Event]:
        """One by one."""
        for number, cell in enumerate(self.cells):
            kind, worker = self.kinds[cell["kind"]], int(cell["worker"])
            yield Event(number, kind, worker, int(cell["print"]), float(cell["at_s"]))

    def of_kind(self, kind: str) -> np.ndarray[Any, np.dtype[np.void]]:
        """The cells of one kind of event."""
        if kind not in self.kinds:
            return self.cells[:0]
        return self.cells[self.cells["kind"] == self.kinds.index(kind)]


class Writer:
    """Appends to a new file.

    Nothing is held back: each cell is handed to the system at once (about a microsecond), where it
    outlives this process. A disk that refuses it ends the record, not the run.

    Args:
        path: the file.
        kinds: the names of the kinds of events, in the order of their numbers.
    """

    def __init__(self, path: Path, kinds: Sequence[str]) -> None:
        self._number = {kind: number for number, kind in enumerate(kinds)}
        self.refusal: OSError | None = None
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._append(_FIRST)

    def tell(self, told: Mapping[str, Any]) -> None:
        """A piece of JSON."""
        text = zlib.compress(json.dumps(told, ensure_ascii=False).encode(), 9)
        padding = bytes(-len(text) % CELL_BYTES)
        self._append(_CELL.pack(TELLS, NOBODY, len(text), 0.0, 0.0, 0.0) + text + padding)

    def event(
        self, kind: str, worker: int, print: int, at_s: float, own_s: float, samples: float
    ) -> None:
        """One event."""
        self._append(_CELL.pack(self._number[kind], worker, print, at_s, own_s, samples))

    def _append(self, content: bytes) -> None:
        if self.refusal is not None:
            return
        try:
            while content:
                content = content[os.write(self._fd, content) :]
        except OSError as error:
            self.refusal = error

    def close(self) -> None:
        """No more is written."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# ---- reading ------------------------------------------------------------------------------------


def find_record(run: Path) -> Path:
    """The record of a run directory (the newest, if it was trained in several times), or the file.

    Raises:
        UserError: if there is none.
    """
    if run.is_file():
        return run
    found = sorted(run.glob(f"{Path(RECORD_NAME).stem}*.bin"), key=_age) if run.is_dir() else []
    if not found:
        what = "there is no record in it" if run.is_dir() else "there is no such directory"
        raise UserError(
            f"run={run}: {what}; give the directory of a run of python -m hybridtrain "
            "(not under strategy=ddp, whose processes speak to no server, nor with "
            "strategy.record=null), or a file that HybridStrategy(record=...) has written"
        )
    return found[-1]


def _age(path: Path) -> tuple[int, str]:
    return path.stat().st_mtime_ns, path.name


def read_record(path: Path) -> Record:
    """Read a record, or as much as there is of one.

    Raises:
        UserError: if this is no record, one of another version, or nothing but its first cell.
    """
    content = path.read_bytes()
    if content[:19] != _FIRST[:19]:
        raise UserError(f"{path}: this file is no record of a run")
    if content[:CELL_BYTES] != _FIRST:
        version = content[19:22].decode(errors="replace").strip()
        raise UserError(
            f"{path}: this is a record of version {version}; this version of hybridtrain reads "
            f"version {VERSION}"
        )
    n_cells = len(content) // CELL_BYTES
    cells = np.frombuffer(content, _TYPE, n_cells)
    told, keep = _told(path, content, cells)
    if "header" not in told:
        raise UserError(f"{path}: the record ends before it has said what was run")
    kinds = tuple(str(kind) for kind in told["header"]["kinds"])
    events = cells[keep]
    if len(events) and int(events["kind"].max()) >= len(kinds):
        raise UserError(f"{path}: the record is damaged (an event of an unknown kind)")
    return Record(path, told, events, kinds, len(content))


def _told(
    path: Path, content: bytes, cells: np.ndarray[Any, np.dtype[np.void]]
) -> tuple[dict[str, Any], np.ndarray[Any, np.dtype[np.bool]]]:
    """The pieces of JSON, merged, and which cells are events."""
    told: dict[str, Any] = {}
    keep = np.ones(len(cells), bool)
    keep[0] = False
    after = 0  # cells before this one have been read
    for number in np.flatnonzero(cells["kind"] == TELLS):
        if number < after:
            continue  # within a piece
        length, start = int(cells["print"][number]), (int(number) + 1) * CELL_BYTES
        after = int(number) + 1 - (-length // CELL_BYTES)
        keep[number:after] = False
        if start + length > len(content):
            break  # cut short
        told |= _json(path, content[start : start + length])
    return told, keep


def _json(path: Path, text: bytes) -> dict[str, Any]:
    try:
        piece = json.loads(zlib.decompressobj().decompress(text, _LARGEST_PIECE_BYTES))
    except (ValueError, zlib.error):
        piece = None
    if not isinstance(piece, dict):
        raise UserError(f"{path}: the record is damaged (a piece of it cannot be read)")
    return piece
