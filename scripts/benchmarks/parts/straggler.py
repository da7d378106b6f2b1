"""One worker slower than the others: what is left of everybody's own speed.

Real processes, real Lightning, a small network. Each mini-batch is made to last: every worker
sleeps ``step_s`` in it, the last one ``slower`` times as long, as if its device were that much
slower. Sleeping takes no core; what is measured is waiting, not arithmetic. With 2 workers, one of
them 3 times slower, those who wait for all do 2 mini-batches in the time of 3, those who wait for
nobody 4: the ratio cannot exceed 2.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.frame import Frame
from benchmarks.jobs.loops import trainer
from benchmarks.rows import Goal, Row, Skipped
from benchmarks.runs import Job
from hybridtrain.cli.hydra_config import compose_config


def rows(frame: Frame) -> Iterator[Row | Skipped]:
    """Workers that run freely against those who wait."""
    slower = 3.0
    work = f"one of 2 workers {slower:g}x slower (it sleeps; 50 ms a mini-batch elsewhere)"
    goal = Goal(1.7, 1.95)
    against = [(_job(frame, "hybrid", slower), goal)]
    ours = _job(frame, "async", slower)
    yield from frame.alternate(work, ours, against, unit="ms/mini-batch", note="ideal 2")


def _job(frame: Frame, strategy: str, slower: float) -> Job:
    seconds = frame.options.seconds * (1 if frame.options.quick else 1.5)
    arguments = {"strategy": strategy, "slower": slower, "seconds": seconds}
    return Job(strategy, "benchmarks.parts.straggler:mini_batch_s", arguments)


def mini_batch_s(strategy: str, slower: float, seconds: float) -> float:
    """A job: seconds for each mini-batch that counts, of whichever worker."""
    work = Work(0.05, slower, seconds, epochs=1, batch_size=32, width=256)
    return work.batch_size / measure(strategy, 2, work).samples_per_s


@dataclass(frozen=True)
class Work:
    """The training that every run does.

    ``slower``: how many times as long the last worker takes. ``seconds``: how long an epoch would
    last if nobody ever waited and only the sleep took time.
    """

    step_s: float
    slower: float
    seconds: float
    epochs: int
    batch_size: int
    width: int

    def rate(self, workers: int) -> float:
        """Mini-batches per second of all workers, as the sleep alone allows."""
        return (workers - 1 + 1 / self.slower) / self.step_s

    def samples(self, workers: int) -> int:
        """Samples in an epoch."""
        return round(self.seconds * self.rate(workers)) * self.batch_size


@dataclass(frozen=True)
class Measured:
    """One run. Speeds in samples per second; ``ideal`` is None where nobody tells who waits."""

    strategy: str
    workers: int
    samples_per_s: float
    ideal: float | None
    share: float | None  # of the ideal
    own: list[float]
    waited: list[float]  # share of each worker's time
    samples: list[float]
    nominal: float  # what the sleep alone would allow, all workers together


class Delayed(pl.LightningModule):
    """A small classifier, whose every mini-batch lasts as long as it is told."""

    def __init__(self, work: Work, workers: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, work.width), nn.ReLU(), nn.Linear(work.width, 10))
        self.work, self.workers = work, workers

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The sleep is the device's time; the slow worker is the last."""
        slow = self.trainer.global_rank == self.workers - 1
        time.sleep(self.work.step_s * (self.work.slower if slow else 1.0))
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Watch(pl.Callback):
    """Notes in ``folder`` how long this worker trained, waited, and on how many samples."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.began = self.waited = self.samples = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, and listen to how long the server takes to answer."""
        client = getattr(trainer.strategy, "client", None)
        if client is not None:
            answer = client.inbox.answer

            def timed(*arguments: Any, **named: Any) -> Any:
                asked = time.monotonic()
                try:
                    return answer(*arguments, **named)
                finally:
                    self.waited += time.monotonic() - asked

            client.inbox.answer = timed
        self.began = time.monotonic()
        self.waited = 0.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        """Count."""
        self.samples += len(batch[0])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All have met at the end of the last epoch."""
        notes = {"began": self.began, "ended": time.monotonic(), "samples": self.samples}
        notes |= {"waited": self.waited, "known": hasattr(trainer.strategy, "client")}
        path = Path(self.folder, f"{trainer.global_rank}.json")
        path.write_text(json.dumps(notes))


def measure(strategy: str, workers: int, work: Work, *options: str) -> Measured:
    """One run in processes of its own; ``options``: as typed behind the strategy."""
    torch.manual_seed(0)
    n = work.samples(workers)
    data = TensorDataset(torch.randn(n, 64), torch.randint(10, (n,)))
    with tempfile.TemporaryDirectory() as folder:
        row = compose_config([f"strategy={strategy}", f"run_dir={folder}", *options])
        strategy_row = instantiate(row.strategy, _convert_="all")
        options = {"max_epochs": work.epochs, "default_root_dir": folder}
        fitting = trainer(strategy_row, workers, Watch(folder), **options)
        fitting.fit(Delayed(work, workers), DataLoader(data, work.batch_size, shuffle=True))
        notes = [json.loads(Path(folder, f"{i}.json").read_text()) for i in range(workers)]
    return measured(strategy, work, notes, n * work.epochs)


def measured(
    strategy: str, work: Work, notes: Sequence[dict[str, float]], counted: int
) -> Measured:
    """``counted``: samples that are in the result, each once, however often it was tried."""
    took = max(x["ended"] for x in notes) - min(x["began"] for x in notes)
    own = [x["samples"] / (x["ended"] - x["began"] - x["waited"]) for x in notes]
    speed = counted / took
    known = all(x["known"] for x in notes)
    return Measured(
        strategy=strategy,
        workers=len(notes),
        samples_per_s=speed,
        ideal=sum(own) if known else None,
        share=speed / sum(own) if known else None,
        own=own,
        waited=[x["waited"] / (x["ended"] - x["began"]) for x in notes],
        samples=[x["samples"] for x in notes],
        nominal=work.rate(len(notes)) * work.batch_size,
    )
