"""Ways to train a model, each a job: it returns the seconds of a step after the first ones.

``lightning``: Lightning's own loops under any strategy. ``ddp``: the loop one writes by hand around
torch's DistributedDataParallel. ``hogwild``: torch's example of workers that never wait.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Protocol

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
    """Worker 0 notes how long its steps took, from the ``first`` one on.

    Args:
        first: what comes before is warm-up.
        tells: whether this process is to; worker 0 of those that Lightning knows does.
    """

    def __init__(self, first: int, tells: bool = True) -> None:
        self.first, self.tells, self.count = first, tells, 0
        self.began = self.ended = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """Look at the clock. At the end of a step a callback could look at parameters: ours would
        wait there for what it otherwise does not need yet."""
        self.count += 1
        self.ended = time.perf_counter()
        if self.count == self.first:
            self.began = self.ended

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Workers that run freely have had as many steps as there was time for."""
        if self.tells and trainer.global_rank == 0:
            note((self.ended - self.began) / (self.count - self.first))


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
    fitting = trainer(_strategy(strategy), workers, Timer(warm_up(steps)))
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


class Steps(Protocol):
    """What the loop needs of an optimizer."""

    def zero_grad(self) -> None: ...

    def step(self) -> object: ...


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
    torch.manual_seed(0)
    net = DistributedDataParallel(MODELS[model].make())
    optimizer = MODELS[model].optimizer(net, fused)
    step_s = loop(net, optimizer, model, seconds)
    if rank == 0:
        note(step_s)
    dist.barrier()
    dist.destroy_process_group()


def loop(net: torch.nn.Module, optimizer: Steps, model: str, seconds: float) -> float:
    """The loop one writes by hand; seconds of a step."""
    spec = MODELS[model]
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
    return (time.perf_counter() - began) / (steps - first)


def hogwild(model: str, workers: int, seconds: float) -> float:
    """The pattern of torch's ``examples/mnist_hogwild``: shared parameters, no lock, no waiting.

    Each process has an optimizer of its own, with moments of its own.
    """
    net = MODELS[model].make().share_memory()
    mp.start_processes(  # type: ignore[no-untyped-call]
        _run_free, (net, model, seconds), nprocs=workers, start_method="fork"
    )
    return noted()


def _run_free(rank: int, net: torch.nn.Module, model: str, seconds: float) -> None:
    optimizer = MODELS[model].optimizer(net, True)
    step_s = loop(net, optimizer, model, seconds)
    if rank == 0:
        note(step_s)
