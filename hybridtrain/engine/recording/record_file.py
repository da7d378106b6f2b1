"""The file format of a record: one cell of 28 bytes per event.

Theory of operation. The first cell is the title, with the format's version. Every other cell is an
event: the kind of message that the server received, the worker, the time, a checksum of the
content, and (for a push) the worker's computing time and number of samples. A push is marked if
workers have made its update, so that the server has not received it. Updates and dropped
contributions are cells after the event that has led to them; a cell of kind ``WAITED`` precedes the
push of a worker that has waited before it sent it. A cell of kind ``TELLS`` precedes a piece of
JSON, compressed and padded to whole cells: the first describes the run (``header``), later ones the
data and the initial parameters, the last the end of the run. Cells are only appended, so the file
of a killed run is a valid record of its beginning.

Each cell ends with a CRC-32 that continues the one of the cell before; a ``TELLS`` cell also has
the JSON's. So the reader (:mod:`hybridtrain.engine.recording.record_reader`) detects and locates
flipped bits, lost cells and moved cells.
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

RECORD_NAME = "record.bin"
VERSION = 3
CELL_BYTES = 28
CRC_BYTES = 4  # of a cell, at its end
TELLS = 255  # the kind of a cell that precedes JSON
NOBODY = 65535  # the worker of an event without one
WOKE, DUE = "Woke", "Due"  # the kinds of such events
# The server has made an update; a worker's contribution does not count; a worker has waited before
# it sent its next push. A replay needs none of them.
UPDATED, DROPPED, WAITED = "Updated", "Dropped", "Waited"
OUTCOMES = (UPDATED, DROPPED, WAITED)

TITLE = b"hybridtrain record %3d\n\n"
_CRC = struct.Struct("<I")
_CELL = struct.Struct("<BBHIdff")
_PIECE = struct.Struct("<BxHII12x")  # kind, nobody, bytes that follow, their checksum
TYPE = np.dtype(
    [
        ("kind", "u1"),
        ("made", "u1"),  # 1: of a push, whose update workers have made
        ("worker", "<u2"),
        ("print", "<u4"),  # checksum of the content; of TELLS: bytes that follow
        ("at_s", "<f8"),  # since the record began
        ("own_s", "<f4"),  # of a push: the worker's computing time since its release; or waited
        ("samples", "<f4"),  # of a push
        ("crc", "<u4"),
    ]
)
assert len(TITLE % 1) == _CELL.size == _PIECE.size == CELL_BYTES - CRC_BYTES
assert TYPE.itemsize == CELL_BYTES


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """One event that the server received. ``number`` counts from 0.

    ``made``: a push that it has not received, because workers have made the update.
    """

    number: int
    kind: str
    worker: int
    print: int
    at_s: float
    made: bool = False


@dataclass(frozen=True)
class Record:
    """The content of a record file.

    ``told``: the pieces of JSON, merged; ``cells``: the events in their order; ``whole``: the run
    was not broken off; ``foreign``: why the classes that it names are not to be made.
    """

    path: Path
    told: dict[str, Any]
    cells: np.ndarray[Any, np.dtype[np.void]]
    kinds: tuple[str, ...] = field(default=())
    n_bytes: int = 0  # of the whole file
    foreign: str | None = None

    @property
    def whole(self) -> bool:
        return "end" in self.told

    @property
    def header(self) -> dict[str, Any]:
        return self.told["header"]

    @property
    def strategy(self) -> dict[str, str]:
        """The parts of the run's strategy by name."""
        names = ("policy", "correction", "exchange", "update", "state_dtype")
        return {name: str(self.header[name]) for name in names if name in self.header}

    @property
    def in_place(self) -> bool:
        """Whether workers stepped the masters themselves, in an unrecorded order."""
        return bool(self.header["requirements"]["parameters"] == "shared")

    @property
    def n_workers(self) -> int:
        return int(self.header["workers"])

    @property
    def hosts(self) -> list[int]:
        """The host of each worker."""
        return list(self.header.get("hosts") or [0] * self.n_workers)

    @property
    def n_hosts(self) -> int:
        return 1 + max(self.hosts)

    def events(self) -> Iterator[RecordEvent]:
        """All events in their order."""
        for number, cell in enumerate(self.cells):
            kind, worker = self.kinds[cell["kind"]], int(cell["worker"])
            content, made = (int(cell["print"]), float(cell["at_s"])), bool(cell["made"])
            yield RecordEvent(number, kind, worker, *content, made)

    def of_kind(self, kind: str) -> np.ndarray[Any, np.dtype[np.void]]:
        """The cells of one kind of event."""
        if kind not in self.kinds:
            return self.cells[:0]
        return self.cells[self.cells["kind"] == self.kinds.index(kind)]


class Writer:
    """Appends to a new record file.

    Each cell is written unbuffered (about a microsecond), so that it survives a kill of this
    process. A write error ends the record, not the run.

    Args:
        path: the file.
        kinds: the names of the kinds of events, in the order of their numbers.
    """

    def __init__(self, path: Path, kinds: Sequence[str]) -> None:
        self._number = {kind: number for number, kind in enumerate(kinds)}
        self.refusal: OSError | None = None
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._crc = 0
        self._append(TITLE % VERSION)

    def tell(self, told: Mapping[str, Any]) -> None:
        """Append a piece of JSON."""
        text = zlib.compress(json.dumps(told, ensure_ascii=False).encode(errors="surrogatepass"), 9)
        padded = text + bytes(-len(text) % CELL_BYTES)
        self._append(_PIECE.pack(TELLS, NOBODY, len(text), zlib.crc32(padded)), padded)

    def event(
        self,
        kind: str,
        worker: int,
        print: int,
        at_s: float,
        own_s: float,
        samples: float,
        made: bool = False,
    ) -> None:
        """Append an event."""
        self._append(_CELL.pack(self._number[kind], made, worker, print, at_s, own_s, samples))

    def _append(self, cell: bytes, more: bytes = b"") -> None:
        if self.refusal is not None:
            return
        self._crc = zlib.crc32(cell, self._crc)
        content = cell + _CRC.pack(self._crc) + more
        try:
            while content:
                content = content[os.write(self._fd, content) :]
        except OSError as error:
            self.refuse(error)

    def refuse(self, error: OSError) -> None:
        """End the record here, because of the first of these."""
        self.refusal = self.refusal or error

    def close(self) -> None:
        """Close the file; once is enough."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
