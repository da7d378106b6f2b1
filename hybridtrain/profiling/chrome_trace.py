"""A timeline in the Chrome trace-event format, which Perfetto (ui.perfetto.dev) opens.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: an object with
``traceEvents``; complete events (``"ph": "X"``) with begin ``ts`` and duration ``dur`` in
microseconds, in a process ``pid`` and a thread ``tid``, whose names are metadata (``"ph": "M"``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybridtrain.profiling.time_spans import Track


def write_trace(
    path: Path, server: Sequence[Track], workers: dict[int, Track], about: dict[str, Any]
) -> None:
    """One process for the server with a thread for each of its tracks, one for each worker.

    Args:
        path: the file; it is there as a whole or not at all.
        server: its tracks, or none.
        workers: by their numbers.
        about: put beside the events.
    """
    tracks = [(0, n, "server", track) for n, track in enumerate(server)]
    tracks += [(1 + w, 0, f"worker {w}", track) for w, track in sorted(workers.items())]
    begin_ns = min((min(track.begun) for *_, track in tracks if track.begun), default=0)
    unfinished = path.with_name(f".{path.name}.new")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ')
        file.write(json.dumps(about) + ',\n"traceEvents": [\n')
        for number, event in enumerate(_events(tracks, begin_ns)):
            file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")
    unfinished.replace(path)


def _events(
    tracks: Sequence[tuple[int, int, str, Track]], begin_ns: int
) -> Iterator[dict[str, Any]]:
    for pid, tid, process, track in tracks:
        if tid == 0:
            yield _named("process_name", pid, tid, {"name": process})
            yield _named("process_sort_index", pid, tid, {"sort_index": pid})
        yield _named("thread_name", pid, tid, {"name": track.name})
        step, note = ("version", "worker") if pid == 0 else ("step", "version")
        rows = zip(track.kind, track.begun, track.ended, track.steps, track.notes, strict=True)
        for kind, begun, ended, at, noted in rows:
            name, phase = track.kinds[kind]
            yield {
                "name": name,
                "cat": str(phase),
                "ph": "X",
                "ts": (begun - begin_ns) / 1e3,
                "dur": (ended - begun) / 1e3,
                "pid": pid,
                "tid": tid,
                "args": {step: at, note: noted},
            }


def _named(what: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}
