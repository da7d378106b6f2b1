"""Ways to train a model, each a job: it returns the seconds of a step after the first ones.

``lightning``: Lightning's own loops under any strategy. ``ddp``: the loop one writes by hand around
torch's DistributedDataParallel. ``prototype``: the same path as ours, bare.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import MODELS, Trained, loader
from hybridtrain import HybridStrategy

_FILE = "took.json"


class Timer(pl.Callback):
    """Worker 0 notes how long the steps took from the ``first`` one on.

    Args:
        first: what comes before is warm-up.
        last: the number of steps.
        tells: whether this process is to; worker 0 of those that Lightning knows does.
    """

    def __init__(self, first: int, last: int, tells: bool = True) -> None:
        self.first, self.last, self.tells = first, last, tells

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        """After the last, write."""
        if i + 1 == self.first:
            self.began = time.perf_counter()
        if i + 1 == self.last and trainer.global_rank == 0 and self.tells:
            note((time.perf_counter() - self.began) / (self.last - self.first))


def note(step_s: float) -> None:
    """Leave a figure to the process that has started this one."""
    Path(_FILE).write_text(json.dumps(step_s))


def noted() -> float:
    """The figure that was left."""
    return float(json.loads(Path(_FILE).read_text()))


def warm_up(steps: int) -> int:
    """How many of the steps do not count."""
    return max(2, steps // 5)


def lightning(
    model: str, strategy: str, workers: int, seconds: float, fused: bool | None = None
) -> float:
    """Lightning's loop. ``strategy``: ``"single"``, ``"ddp"``, or a policy of ours."""
    steps = MODELS[model].steps(seconds)
    fitting = trainer(_strategy(strategy), workers, Timer(warm_up(steps), steps))
    fitting.fit(Trained(model, fused), loader(model, steps, workers))
    return noted()


def trainer(strategy: Any, workers: int, *callbacks: pl.Callback) -> pl.Trainer:
    """One epoch, and nothing that prints or writes."""
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=workers,
        max_epochs=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _strategy(name: str) -> Any:
    match name:
        case "single":
            return SingleDeviceStrategy("cpu")
        case "ddp":
            return DDPStrategy(start_method="fork", process_group_backend="gloo")
    return HybridStrategy(name, threads_per_worker=1)


# ---- torch alone --------------------------------------------------------------------------------


def ddp(model: str, workers: int, seconds: float, fused: bool | None = True) -> float:
    """DistributedDataParallel over gloo without Lightning."""
    arguments = (model, workers, seconds, fused, str(Path.cwd()))
    mp.start_processes(_rank, arguments, nprocs=workers, start_method="fork")  # type: ignore[no-untyped-call]
    return noted()


def _rank(
    rank: int, model: str, workers: int, seconds: float, fused: bool | None, folder: str
) -> None:
    store = dist.FileStore(f"{folder}/store", workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    spec = MODELS[model]
    torch.manual_seed(0)
    net = DistributedDataParallel(spec.make())
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4, fused=fused)
    steps = spec.steps(seconds)
    first = warm_up(steps)
    x, y = spec.samples(8 * spec.batch_size)
    began = 0.0
    for step in range(steps):
        if step == first:
            began = time.perf_counter()
        part = slice((step % 8) * spec.batch_size, (step % 8 + 1) * spec.batch_size)
        optimizer.zero_grad()
        net(x[part], y[part]).backward()
        optimizer.step()
    if rank == 0:
        note((time.perf_counter() - began) / (steps - first))
    dist.barrier()
    dist.destroy_process_group()
