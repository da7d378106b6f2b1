"""Measure recording: microseconds an event, and the speed of runs with and without a record.

    python scripts/costs/record.py [--repeats 5]

The first table times what a record adds to each push, for rows of several sizes. The second trains
side by side, alternately with and without a record (A B B A A B ...), a network so small that
nearly all time is messages (the worst case), a network of 100 k parameters, and the digits: what
these parts are of a step; samples a second; and the processor time of the process that serves the
workers, which other load on the machine changes less, but which has the record's beginning and end
(0.1 s a run) in it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import pytorch_lightning as pl
import torch
from benchmarks.jobs.models import Trained, loader
from torch.utils.data import DataLoader, TensorDataset

from costs.training import WORKERS, fit, pairs_asked_for
from hybridtrain import HybridStrategy
from hybridtrain.engine.memory import Layout, Store
from hybridtrain.engine.protocol.checksums import GradientRows, checksum_of
from hybridtrain.engine.protocol.messages import GradientPush
from hybridtrain.engine.recording import read_record
from hybridtrain.engine.recording.record_file import Writer
from hybridtrain.engine.recording.recorder import KINDS
from hybridtrain.tasks.digits import DigitsData, DigitsModule


class Tiny(pl.LightningModule):
    """Five numbers to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> int:
    """Print both tables."""
    repeats = pairs_asked_for(__doc__, 5)
    print("parameters   µs an event")
    costs = {size: per_event_us(size) for size in (1_000, 100_000, 10_000_000)}
    for size, cost in costs.items():
        print(f"{size:10,}{cost:14.1f}", flush=True)
    print("\ntask    policy  B/event  of a step  server's CPU µs a push: with, without", end="")
    print("   speed with / without")
    for name, run in (("tiny", tiny), ("100 k", mlp), ("digits", digits)):
        for policy in ("hybrid", "async"):
            told = side_by_side(partial(run, policy), repeats, costs[100_000])
            print(f"{name:8}{policy:8}{told}", flush=True)
    return 0


def per_event_us(size: int) -> float:
    """The median of what one push takes, its gradient row being in no cache of ours."""
    layout = Layout.of([("weight", torch.zeros(size))])
    store = Store(layout, 2, private_parameters=True)
    rows, push, taken = GradientRows(store), GradientPush(0, 32.0), []
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder) / "record.bin", KINDS)
        for n in range(300):
            store.gradients[n % 2][torch.float32].add_(1.0)
            began = time.perf_counter()
            seen = checksum_of(push, n % 2, rows)
            writer.event("Push", n % 2, seen, began, 0.01, 32.0)
            taken.append(time.perf_counter() - began)
        writer.close()
    return 1e6 * statistics.median(taken)


def side_by_side(run: Any, repeats: int, event_us: float) -> str:
    """Alternating runs."""
    ratios, busy, shares, n_bytes = [], [], [], 0.0
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            places = [folder, None] if repeat % 2 else [None, folder]
            done = {place: run(place) for place in places}
            found = read_record(Path(folder) / "record.bin")
        pushes = len(found.of_kind("Push"))
        busy.append([1e6 * done[place].busy_s / pushes for place in (folder, None)])
        ratios.append(done[folder].samples_per_s / done[None].samples_per_s)
        n_bytes = found.n_bytes / len(found.cells)
        in_step_us = WORKERS * event_us * len(found.cells) / pushes  # the server does one at a time
        shares.append(1e-4 * in_step_us / done[None].step_s)
    with_us, without_us = map(statistics.median, zip(*busy, strict=True))
    pairs = " ".join(f"{ratio:.3f}" for ratio in ratios)
    ratio, share = statistics.median(ratios), statistics.median(shares)
    return f"{n_bytes:7.1f}{share:10.3f} %{with_us:30.1f}{without_us:9.1f}{ratio:9.3f} ({pairs})"


@dataclass(frozen=True)
class Done:
    """Figures of one run; ``busy_s``: processor time of this process."""

    samples_per_s: float
    step_s: float
    busy_s: float


def tiny(policy: str, place: str | None) -> Done:
    """Two epochs of a thousand mini-batches."""
    x = torch.randn(4000, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    return trained(policy, place, Tiny(), loader, 2)


def mlp(policy: str, place: str | None) -> Done:
    """Two epochs of 1500 mini-batches of a worker, without a loader's costs."""
    return trained(policy, place, Trained("mlp-100k", None), loader("mlp-100k", 1500, WORKERS), 2)


def digits(policy: str, place: str | None) -> Done:
    """Six epochs of 48 mini-batches."""
    module = DigitsModule(optimizer=partial(torch.optim.Adam, lr=0.002))
    return trained(policy, place, module, DigitsData(batch_size=30), 6)


def trained(policy: str, place: str | None, module: Any, data: Any, epochs: int) -> Done:
    """Train it."""
    began = time.process_time()
    stats = fit(HybridStrategy(policy, record=place), module, data, epochs)
    step_s = statistics.mean(stats["step_s"])
    return Done(stats["samples_per_s"], step_s, time.process_time() - began)


if __name__ == "__main__":
    sys.exit(main())
