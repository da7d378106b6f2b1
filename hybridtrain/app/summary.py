"""What came of a run: a few lines for a person, ``summary.json`` for programs."""

from __future__ import annotations

import json
import math
import os
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybridtrain.app.monitor import STATS_FILE, RunStats

SUMMARY_FILE = "summary.json"


@dataclass(slots=True)
class Summary:
    """The content of ``summary.json``. ``exit`` is the exit status; 128 + n after signal n."""

    strategy: str
    workers: int
    device: str
    updates: int = 0
    samples: int = 0
    samples_per_s: float = 0.0  # of training time, validation and start-up left out
    wall_s: float = 0.0  # of everything, start-up and test included
    waiting_share: list[float | None] = field(default_factory=list)  # (W,) 0 to 1; None: unknown
    staleness: dict[str, float] = field(default_factory=lambda: {"mean": 0.0, "max": 0.0})
    left_out: dict[str, list[int]] = field(default_factory=dict)  # fault -> by worker
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint: str | None = None
    exit: int = 0

    def take(self, stats: RunStats) -> None:
        """Fill in the numbers a strategy or the monitor has kept."""
        self.updates = int(stats["updates"])
        self.samples = round(stats["samples"])
        self.samples_per_s = round(float(stats["samples_per_s"]), 3)
        self.workers = int(stats["workers"])
        known = [round(float(x), 4) for x in stats["waiting_share"]]
        self.waiting_share = [*known] if known else [None] * self.workers
        self.staleness = {k: round(float(x), 4) for k, x in stats["staleness"].items()}
        self.left_out = dict(stats["left_out"])


def left_stats(directory: Path) -> RunStats | None:
    """Take up the numbers that the monitor left in the run directory, if it did."""
    path = directory / STATS_FILE
    try:
        stats: RunStats = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    path.unlink(missing_ok=True)
    return stats


def write(summary: Summary, directory: Path) -> None:
    """Write ``summary.json``; numbers that JSON cannot hold become null."""
    text = json.dumps(_plain(asdict(summary)), indent=2)
    (directory / SUMMARY_FILE).write_text(text + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def lines(summary: Summary, directory: Path, tensorboard: bool) -> list[str]:
    """The summary as aligned text."""
    how = {0: "Finished", 130: "Interrupted", 143: "Terminated"}.get(summary.exit, "Failed")
    workers = f"{summary.workers} worker{'s' * (summary.workers != 1)}"
    head = (
        f"{how} after {_duration(summary.wall_s)}: {summary.strategy}, {workers}, {summary.device}"
    )
    waiting = ", ".join(f"{100 * x:.1f}" for x in summary.waiting_share if x is not None)
    rows = [
        ("updates", f"{summary.updates}"),
        ("samples", f"{summary.samples}, {summary.samples_per_s:.4g} a second"),
        ("waiting", f"{waiting} % of the time, worker by worker" if waiting else ""),
        ("staleness", _staleness(summary)),
        ("left out", _left_out(summary)),
        *((name, f"{value:.6g}") for name, value in summary.metrics.items()),
        ("checkpoint", short(summary.checkpoint) if summary.checkpoint else "none"),
        ("to go on", _go_on(summary)),
        ("logs", short(directory)),
    ]
    if tensorboard:
        rows.append(("TensorBoard", f"tensorboard --logdir {shlex.quote(short(directory))}"))
    width = max(len(name) for name, _ in rows)
    return [head, *(f"  {name.ljust(width)}  {text}" for name, text in rows if text)]


def _go_on(summary: Summary) -> str:
    if summary.exit == 0 or summary.checkpoint is None:
        return ""
    return f"the same command with ckpt={shlex.quote(short(summary.checkpoint))}"


def _staleness(summary: Summary) -> str:
    mean, most = summary.staleness.get("mean", 0.0), summary.staleness.get("max", 0.0)
    return f"{mean:.2f} updates on average, {most:.0f} at most" if most else ""


def _left_out(summary: Summary) -> str:
    kinds = {"nonfinite": "not finite", "oom": "out of memory"}
    return "; ".join(
        f"{sum(each)} contributions {kinds.get(fault, fault)}, "
        f"worker by worker {', '.join(map(str, each))}"
        for fault, each in summary.left_out.items()
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)} min {rest:.0f} s" if minutes else f"{rest:.1f} s"


def short(path: str | Path) -> str:
    """The path as seen from the working directory, where it lies below it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
