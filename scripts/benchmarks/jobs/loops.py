"""Ways to train a model, each a job: it returns the seconds of a step after the first ones.

``lightning``: Lightning's own loops under any strategy. ``ddp``: the loop one writes by hand around
torch's DistributedDataParallel. ``hogwild``: torch's example of workers that never wait.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from torch.nn.parallel import DistributedDataParallel

from benchmarks.jobs.models import MODELS, Trained, loader
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
        self.look()

    def look(self) -> None:
        """One more step has begun, or ended."""
        self.count += 1
        self.ended = time.perf_counter()
        if self.count == self.first:
            self.began = self.ended

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Workers that run freely have had as many steps as there was time for."""
        if self.tells and trainer.global_rank == 0:
            note((self.ended - self.began) / (self.count - self.first))


class UsersTimer(Timer):
    """Looks at the clock where a user would."""

    def on_train_batch_start(self, *_: Any) -> None:
        """Nothing."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.look()


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
    model: str,
    strategy: str,
    workers: int,
    seconds: float,
    fused: bool | None = None,
    as_users_do: bool = False,
) -> float:
    """Lightning's loop. ``strategy``: ``"single"``, ``"ddp"``, or a strategy of ours by its name.

    ``as_users_do``: data give single samples, and a callback reads the clock after each mini-batch.
    """
    steps = MODELS[model].steps(seconds)
    timer = (UsersTimer if as_users_do else Timer)(warm_up(steps))
    fitting = trainer(strategy_named(strategy), workers, timer)
    fitting.fit(Trained(model, fused), loader(model, steps, workers, as_users_do))
    return noted()


def trainer(strategy: Any, workers: int, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """One epoch on the CPU unless ``options`` say otherwise, and nothing that prints or writes."""
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    usual: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 1} | dict.fromkeys(quiet, False)
    return pl.Trainer(
        strategy=strategy, devices=workers, callbacks=list(callbacks), **usual | options
    )


def strategy_named(name: str) -> Any:
    """``single`` and ``ddp`` are Lightning's, the others ours."""
    match name:
        case "single":
            return SingleDeviceStrategy("cpu")
        case "ddp":
            return DDPStrategy(start_method="fork", process_group_backend="gloo")
    parts = StrategyRegistry[name]["init_params"]  # where every checkout has a strategy's parts
    return HybridStrategy(**parts, threads_per_worker=1)


class Steps(Protocol):
    """The part of an optimizer's interface that the loop uses."""

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
    with group(rank, workers, folder):
        net = DistributedDataParallel(MODELS[model].make())
        step_s = loop(net, MODELS[model].optimizer(net, fused), model, seconds)
        if rank == 0:
            note(step_s)


def local_sgd(model: str, workers: int, seconds: float, every: int = 8) -> float:
    """Each process trains on its own; every few steps all take the mean of their parameters."""
    arguments = (model, workers, seconds, every, str(Path.cwd()))
    mp.start_processes(_run_locally, arguments, nprocs=workers, start_method="fork")  # type: ignore[no-untyped-call]
    return noted()


def _run_locally(
    rank: int, model: str, workers: int, seconds: float, every: int, folder: str
) -> None:
    with group(rank, workers, folder):
        net = MODELS[model].make()
        optimizer = Averaging(MODELS[model].optimizer(net, None), net, workers, every)
        step_s = loop(net, optimizer, model, seconds)
        if rank == 0:
            note(step_s)


class Averaging:
    """An optimizer after whose every n-th step all processes have the mean of their parameters."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, net: torch.nn.Module, workers: int, every: int
    ) -> None:
        self._optimizer, self._parameters = optimizer, list(net.parameters())
        self._workers, self._every, self._steps = workers, every, 0

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self._optimizer.step()
        self._steps += 1
        if self._steps % self._every == 0:
            mean = torch.nn.utils.parameters_to_vector(self._parameters)
            dist.all_reduce(mean)
            torch.nn.utils.vector_to_parameters(mean.div_(self._workers), self._parameters)


@contextmanager
def group(rank: int, workers: int, folder: str) -> Iterator[None]:
    """Join a gloo process group of all processes, with the same seed in each."""
    store = dist.FileStore(f"{folder}/store", workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    torch.manual_seed(0)
    yield
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
