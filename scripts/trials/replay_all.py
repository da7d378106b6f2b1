"""Record a run under every policy, replay it in one process, and count the bits that differ.

    python scripts/trials/replay_all.py [--updates 1000] [--workers 4] [--only ssp async]
                                        [--json FILE]

Each run is an ordinary one of ``python -m hybridtrain`` (the digits, worker processes on the CPU).
What is counted are the bits of the parameters in the checkpoint that the run itself has left,
against those that the replay has come to; the replay's own verdict (every gradient, the optimizers'
states) stands beside it. Exit status 1 if a single bit differs.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from hybridtrain.cli.replay_run import fitting, rebuilt, workplace
from hybridtrain.engine.recording import Record, find_record, read_record
from hybridtrain.lightning.replay.replay_fit import replay_fit

BATCHES = 48  # of an epoch, all workers together
# What is said on the command line -> mini-batches that make an update, of W workers, or more.
WAYS: dict[str, str] = {
    "strategy=synchronous": "1",
    "strategy=hybrid": "W",
    "strategy=backup": "W-1",
    "strategy=backup strategy.policy.k=auto": "W",
    "strategy=k_async strategy.policy.k=2": "2",
    "strategy=k_batch_sync strategy.policy.k=2": "2",
    "strategy=k_batch_async strategy.policy.k=2": "2",
    "strategy=softsync": "W",
    "strategy=ssp": "2",
    "strategy=async": "1",
    "strategy=switch strategy.policy.at_update=100": "2",
    "strategy=async strategy.correction=dc_asgd_adaptive": "1",
}


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    way: str
    updates: int
    events: int
    bytes_per_event: float
    staleness: float
    dropped: int
    bits: int  # of the parameters, all of them
    differing: int
    verdict: str
    recorded_s: float  # of training
    replayed_s: float  # of everything but imports


def main() -> int:
    """Run all, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=1000, help="at least (default 1000)")
    parser.add_argument("--workers", type=int, default=4, help="W (default 4)")
    parser.add_argument("--only", nargs="*", help="ways that contain one of these words")
    parser.add_argument("--json", help="also write the figures to this file")
    given = parser.parse_args()
    ways = [w for w in WAYS if not given.only or any(word in w for word in given.only)]
    print(f"{'strategy':44}updates  events  B/event  stale dropped  bits that differ  seconds")
    lines = []
    for way in ways:
        lines.append(line(way, given.updates, given.workers))
        print(text(lines[-1]), flush=True)
    if given.json:
        content = json.dumps([asdict(each) for each in lines], indent=2)
        Path(given.json).write_text(content + "\n")
    return int(any(each.differing or each.verdict != "equal" for each in lines))


def line(way: str, updates: int, workers: int) -> Line:
    """One run, and the same again."""
    with tempfile.TemporaryDirectory(prefix="hybridtrain-") as folder:
        record(way, updates, workers, Path(folder))
        found = read_record(find_record(Path(folder)))
        began = time.perf_counter()
        parameters, verdict = replayed(found)
        took_s = time.perf_counter() - began
        kept = torch.load(Path(folder) / "checkpoints" / "last.ckpt", weights_only=True)
    stats = found.told["end"]["stats"]
    return Line(
        way=way.replace("strategy=", "").replace("strategy.", ""),
        updates=stats["updates"],
        events=len(found.cells),
        bytes_per_event=found.n_bytes / len(found.cells),
        staleness=stats["staleness"]["mean"],
        dropped=sum(stats["dropped"]),
        bits=sum(8 * value.nbytes for value in parameters.values()),
        differing=sum(differing(value, kept["state_dict"][k]) for k, value in parameters.items()),
        verdict=verdict,
        recorded_s=stats["training_s"],
        replayed_s=took_s,
    )


def record(way: str, updates: int, workers: int, folder: Path) -> None:
    """Train, in a process with workers of its own."""
    per_update = {"W": workers, "W-1": workers - 1}.get(WAYS[way]) or int(WAYS[way])
    epochs = math.ceil(updates * per_update / BATCHES)
    options = [
        *("task=digits", *way.split(), f"trainer.devices={workers}", "trainer.accelerator=cpu"),
        *(f"trainer.max_epochs={epochs}", "trainer.check_val_every_n_epoch=10", "test=false"),
        "task.metric=null",
        *("trainer.enable_progress_bar=false", f"hydra.run.dir={folder}"),
        *("callbacks.checkpoint.monitor=null", "+callbacks.checkpoint.every_n_epochs=1"),
        "+callbacks.checkpoint.save_on_train_epoch_end=true",
    ]
    command = [sys.executable, "-m", "hybridtrain", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr}")


def replayed(record: Record) -> tuple[dict[str, torch.Tensor], str]:
    """The parameters that a replay comes to, and what it says itself."""
    with workplace(record) as folder:
        parts = rebuilt(record, folder)
        report = replay_fit(record, parts.trainer, parts.module, **fitting(record, parts))
    return parts.module.state_dict(), report.parted or ("equal" if report.whole else "cut short")


def differing(one: torch.Tensor, other: torch.Tensor) -> int:
    """Bits."""
    bits = (one.view(torch.uint8) if one.ndim else one[None].view(torch.uint8)).flatten()
    others = (other.view(torch.uint8) if other.ndim else other[None].view(torch.uint8)).flatten()
    return sum(int(byte).bit_count() for byte in (bits ^ others).tolist() if byte)


def text(line: Line) -> str:
    """One line of the table."""
    return (
        f"{line.way:44}{line.updates:7}{line.events:8}{line.bytes_per_event:9.1f}"
        f"{line.staleness:7.2f}{line.dropped:8}{line.differing:8} of {line.bits:8}"
        f"{line.recorded_s:6.0f} → {line.replayed_s:.0f}"
        + ("" if line.verdict == "equal" else f"  {line.verdict}")
    )


if __name__ == "__main__":
    sys.exit(main())
