"""What a run has written, in a form that can be compared."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_EVENTS = re.compile(r"events\.out\.tfevents\..*")  # time, host and process are in the name
_VERSION = ("pytorch-lightning_version",)


def contents(folder: Path) -> dict[str, Any]:
    """Relative path -> what is in it."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = _EVENTS.sub("events", str(path.relative_to(folder))).replace(".", "_")
        read = _READERS.get("events" if "tfevents" in path.name else path.suffix, _size_only)
        found[name] = read(path)
    return found


def _checkpoint(path: Path) -> Any:
    content = torch.load(path, map_location="cpu", weights_only=False)
    return {key: value for key, value in content.items() if key not in _VERSION}


def _table(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as lines:
        return [{k: _number(v) for k, v in row.items()} for row in csv.DictReader(lines)]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _scalars(path: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def _size_only(path: Path) -> str:
    return "a file"


_READERS: dict[str, Callable[[Path], Any]] = {
    ".ckpt": _checkpoint,
    ".csv": _table,
    ".yaml": Path.read_text,
    "events": _scalars,
}
