"""Reads record files (:mod:`hybridtrain.engine.recording.record_file`), also those of killed runs.

A damaged file raises one error that says where the damage is. The reader decodes only JSON and
numbers, so a record cannot make it run code.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Annotated, Any

import numpy as np

from hybridtrain.engine.recording.record_file import (
    CELL_BYTES,
    CRC_BYTES,
    DUE,
    NOBODY,
    RECORD_NAME,
    TELLS,
    TITLE,
    TYPE,
    UPDATED,
    VERSION,
    WOKE,
    Record,
)
from hybridtrain.errors import UserError
from hybridtrain.util.files import open_input
from hybridtrain.util.option_types import EACH, Count, NotNegative, Range, Rule, misfit
from hybridtrain.util.own_directory import why_not_own

Cells = np.ndarray[Any, np.dtype[np.void]]
Numbers = np.ndarray[Any, np.dtype[Any]]

_LARGEST_RECORD_BYTES = 2**33  # 300 million events
_LARGEST_PIECE_BYTES = 2**24
_TITLE_BYTES = len(TITLE % 1)
_NUMBER = slice(19, 22)  # of the version, in the title
_ALIKE = 0.75  # bytes of a damaged title that are still right, at least
_CRC = struct.Struct("<I")
_PIECE_CRC = struct.Struct("<8xI")


def _is_below(path: str) -> bool:
    return not (PurePath(path).is_absolute() or ".." in PurePath(path).parts)


_Below = Annotated[str, Rule("that is a path below the run's directory", _is_below)]
_Threads = Annotated[int, Range(1, 2**16)]
_CONFIGURED = {  # by the command line
    "config": {
        "seed": Annotated[int, Range(0, 2**32 - 1)] | None,
        "ckpt": str | None,
        "trainer": dict,
        "model?": dict,
        "data?": dict | None,
        "strategy": dict,
        "logger": dict | None,
    },
    "drawn_seed": Count | None,
    "checkpoints": [_Below],
    "directory": str,
    "run_dir": str,
    "ckpt?": str,
}
_ABOUT = (Annotated[dict[str, Any], Rule("", lambda about: "config" not in about)], _CONFIGURED)
_HEADER = {
    "kinds": [str],
    "workers": Annotated[int, Range(1, NOBODY - 1)],
    "hosts?": [Count],
    "steps?": Annotated[int, Range(1, 2**31)],
    **dict.fromkeys(("threads", "server_threads"), _Threads),
    **dict.fromkeys(("policy", "correction?", "exchange?", "update?", "state_dtype?"), str),
    "requirements": {"parameters": str, "together?": Count},
    "versions": {EACH: str},
    "code": {EACH: str},
    "about": _ABOUT,
}
_STATS = {
    "updates": Count,
    "training_s": NotNegative,
    "samples_per_s": NotNegative,
    "waiting_share": [NotNegative],
    "dropped": [Count],
    "staleness": {"mean": NotNegative, "max": Count},
    "hosts?": [{EACH: NotNegative}],
}
_TOLD = {
    "header": _HEADER,
    "begin?": {"parameters": str, "bytes?": Count},
    "end?": {"parameters": str | None, "optimizers": str, "stats?": _STATS},
    EACH: {"kind?": str, "length?": Count, "items?": str, "batch?": Count},  # of data, saving
}


def find_record(run: str | Path) -> Path:
    """The record in a run directory (the newest, if it holds several runs), or the file itself.

    Raises:
        UserError: if there is none.
    """
    run = Path(run)
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


class _Damaged(Exception):
    """Position in bytes, and kind of damage."""

    def __init__(self, at: int, what: str) -> None:
        super().__init__(f"at byte {at}: {what}")


def read_record(path: str | Path, most_events: int | None = None) -> Record:
    """Read a record, also an incomplete one; with ``most_events`` only its beginning.

    Raises:
        UserError: if the file is no record, of another version, damaged, or without a header.
    """
    path = Path(path)
    with open_input(path, "the record", _LARGEST_RECORD_BYTES) as file:
        content = file.read(-1 if most_events is None else most_events * CELL_BYTES)
        foreign = why_not_own(file, path, "replay")
    try:
        return replace(_record(path, content), foreign=foreign)
    except _Damaged as damage:
        raise UserError(f"{path}: the record is damaged {damage}") from None


def service_times(run: str | Path) -> dict[int, list[float]]:
    """Computing time of mini-batches in seconds, per worker, in their order.

    Counted from a release to the next push, without waiting (meetings, the mean of all gradients)
    and without validation. If a worker makes several steps of its own between two contributions, it
    is the mean of these.

    Args:
        run: a run's directory, or its record.

    Raises:
        UserError: if there is no record, a worker has pushed nothing, or workers of a host have
            acted as one (``inside``).
    """
    return batch_times(read_record(find_record(Path(run))))


def batch_times(record: Record) -> dict[int, list[float]]:
    """:func:`service_times` of a record that has been read."""
    if record.header["requirements"].get("together", 1) > 1:
        raise UserError(
            f"{record.path}: the run had inside, under which workers of a host meet without the "
            "server, and its record says nothing of that; give a run without inside"
        )
    pushes, size = record.of_kind("Push"), batch_size_of(record)
    found = {}
    for worker in range(record.n_workers):
        own = pushes[pushes["worker"] == worker]
        counts = own["samples"] > 0  # else it only fetches parameters: its time is the next one's
        sums = np.bincount(np.cumsum(counts) - counts, own["own_s"], len(own))[: counts.sum()]
        found[worker] = (sums / batches_in(record, own["samples"][counts], size)).tolist()
    return _known(record, found)


def batches_in(record: Record, samples: Numbers, size: float) -> Numbers:
    """How many mini-batches of ``size`` have made contributions of so many samples."""
    own_steps = record.header.get("steps", 1) > 1
    return np.maximum(1, np.rint(samples / size)) if own_steps else np.ones(len(samples))


def batch_size_of(record: Record) -> float:
    """Samples in a usual mini-batch, of accumulated ones together; 0: nothing was trained on."""
    samples = record.of_kind("Push")["samples"]
    samples = samples[samples > 0]
    if not len(samples) or (steps := int(record.header.get("steps", 1))) == 1:
        return usual(samples) if len(samples) else 0.0
    config, most = record.header["about"].get("config", {}), float(samples.max())
    given = 1
    for group, name in (("data", "batch_size"), ("trainer", "accumulate_grad_batches")):
        value = (config.get(group) or {}).get(name)  # a user's own data may mean anything by it
        given *= value if type(value) is int and value > 0 else 1
    return given if 1 <= most / given <= steps else most / steps


def usual(sizes: Numbers) -> float:
    """The size that half of the mini-batches have, or their median.

    Of two that half of them have, it is the larger: the last one of an epoch is a rest.
    """
    values, counts = np.unique(sizes, return_counts=True)
    often = values[2 * counts >= len(sizes)]
    return float(often.max()) if len(often) else float(np.median(sizes))


def times_of(record: Record) -> dict[int, list[float]]:
    """Computing time before each push, also before one without a contribution."""
    pushes = record.of_kind("Push")
    times = {
        worker: pushes["own_s"][pushes["worker"] == worker].astype(np.float64).tolist()
        for worker in range(record.n_workers)
    }
    return _known(record, times)


def _known(record: Record, times: dict[int, list[float]]) -> dict[int, list[float]]:
    for worker, found in times.items():
        if not found:
            raise UserError(
                f"{record.path}: worker {worker} has pushed nothing in this run, so its service "
                "times are not known"
            )
    return times


def _record(path: Path, content: bytes) -> Record:
    _check_title(path, content)
    cells = np.frombuffer(content, TYPE, len(content) // CELL_BYTES)
    told: dict[str, Any] = {}
    keep = np.ones(len(cells), bool)
    keep[:1] = False
    for first, after, text in _pieces(content, cells):
        keep[first:after] = False
        if text is not None:
            told |= _json(first * CELL_BYTES, text)
    if "header" not in told:
        raise UserError(f"{path}: the record ends before it has said what was run")
    if (wrong := misfit(told, _TOLD, "record")) is not None:
        raise _Damaged(CELL_BYTES, wrong)
    kinds, n_workers = tuple(told["header"]["kinds"]), told["header"]["workers"]
    if len(hosts := told["header"].get("hosts", range(n_workers))) != n_workers:
        raise _Damaged(CELL_BYTES, f"it has the hosts of {len(hosts)} of {n_workers} workers")
    places = np.flatnonzero(keep)
    _check_events(cells[keep], places * CELL_BYTES, kinds, n_workers)
    return Record(path, told, cells[keep], kinds, len(content))


def _check_title(path: Path, content: bytes) -> None:
    """Refuse a file without the title of this version of the format."""
    title = content[:_TITLE_BYTES]
    ours = TITLE % VERSION
    if 0 < len(content) < CELL_BYTES and ours.startswith(title):
        raise UserError(f"{path}: the record ends before it has said what was run")
    alike = [one == other for one, other in zip(title, ours, strict=False)]
    if len(content) < CELL_BYTES or sum(alike) < _ALIKE * len(ours):
        raise UserError(f"{path}: this file is no record of a run")
    if zlib.crc32(title) != _CRC.unpack_from(content, _TITLE_BYTES)[0]:
        raise _Damaged((*alike, False).index(False), "its title is not as it was written")
    number = title[_NUMBER].decode(errors="replace").strip()
    if number != str(VERSION):
        raise UserError(
            f"{path}: this is a record of version {number}; this version of hybridtrain reads "
            f"version {VERSION}"
        )


def _pieces(content: bytes, cells: Cells) -> Iterator[tuple[int, int, bytes | None]]:
    """Check all cells; yields each piece of JSON: its first cell, the cell after it, and its text.

    The text is ``None`` if the file ends within it.
    """
    view, crcs, kinds = memoryview(content), cells["crc"].tolist(), cells["kind"].tolist()
    number, before = 1, crcs[0]
    while number < len(crcs):
        at = number * CELL_BYTES
        if zlib.crc32(view[at : at + CELL_BYTES - CRC_BYTES], before) != crcs[number]:
            raise _Damaged(at, "the checksum of a cell is wrong")
        before = crcs[number]
        number += 1
        if kinds[number - 1] == TELLS:
            length, start = int(cells["print"][number - 1]), number * CELL_BYTES
            after = number + -(-length // CELL_BYTES)
            text = view[start : after * CELL_BYTES]
            whole = len(text) == (after - number) * CELL_BYTES
            if whole and zlib.crc32(text) != _PIECE_CRC.unpack_from(view, at)[0]:
                raise _Damaged(start, "the checksum of what was said is wrong")
            yield number - 1, after, bytes(text[:length]) if whole else None
            number = after


def _json(at: int, text: bytes) -> dict[str, Any]:
    try:
        piece = json.loads(zlib.decompressobj().decompress(text, _LARGEST_PIECE_BYTES))
    except (ValueError, zlib.error, RecursionError, MemoryError):
        piece = None
    if not isinstance(piece, dict):
        raise _Damaged(at, "a piece of it cannot be read")
    return piece


def _check_events(events: Cells, at: Any, kinds: Sequence[str], n_workers: int) -> None:
    """Refuse events that no run can have recorded.

    Args:
        at: their positions in bytes.
    """
    nobodys, pushes = (
        [n for n, k in enumerate(kinds) if k in names]
        for names in ((WOKE, DUE, UPDATED), ("Push",))
    )
    stranger = np.where(
        np.isin(events["kind"], nobodys), events["worker"] != NOBODY, events["worker"] >= n_workers
    )
    at_s, own_s = events["at_s"], events["own_s"]
    found = {
        "an event of an unknown kind": events["kind"] >= len(kinds),
        "an event of a worker that there was not": stranger,
        "a cell that is none": events["made"] > np.isin(events["kind"], pushes),
        "an event at no time": ~(np.isfinite(at_s) & (at_s >= np.maximum.accumulate(at_s))),
        "a contribution that took no time": ~(np.isfinite(own_s) & (own_s >= 0)),
        "a contribution of no size": ~(np.isfinite(events["samples"]) & (events["samples"] >= 0)),
    }
    for what, bad in found.items():
        if bad.any():
            raise _Damaged(int(at[int(np.argmax(bad))]), what)
