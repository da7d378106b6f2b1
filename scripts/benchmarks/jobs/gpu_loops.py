"""Ways to train a language model on one GPU, each a job: what a step takes after the first ones.

Each may use all cores of the host, whatever it does with them.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.jobs.gpu_models import Homeless, Language, Trained, words
from benchmarks.jobs.loops import Timer, trainer
from benchmarks.jobs.models import InMemory, as_it_is
from benchmarks.jobs.peers import optional
from hybridtrain import HybridStrategy
from hybridtrain.errors import UserError

STEPS, FIRST = 11, 3
_LIMIT = 1e-4  # of the largest parameter: float32 in another order of summation
_FILE = "figures.json"

Figures = dict[str, float]  # step_s, samples_per_s, peak_bytes (of the device, in one worker)


class OneWay(HybridStrategy):
    """Brings no state of optimizers home: it takes longer than the steps, as weights do."""

    def before_checkpoint(self) -> None:
        """Nothing is asked of the server."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Nothing."""
        return {}


class DeviceTimer(Timer):
    """Looks at the clock when the device has done what it was given."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.count + 1 in (self.first, STEPS) and trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        super().on_train_batch_start()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Worker 0 leaves the figures to the process that has started it."""
        if trainer.global_rank == 0:
            step_s = (self.ended - self.began) / (self.count - self.first)
            Path(_FILE).write_text(json.dumps({"step_s": step_s, "peak_bytes": peak_bytes()}))


def peak_bytes() -> int:
    """The most that this process has had of the device at a time."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0


def use_all_cores() -> None:
    """Use all cores in this process, and in whatever it starts or loads (DeepSpeed's own kernels).

    The benchmark's other parts have one thread in each process.
    """
    cores = len(os.sched_getaffinity(0))
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(cores))
    torch.set_num_threads(cores)


# ---- Lightning's loop ---------------------------------------------------------------------------


def hybrid(
    model: dict[str, int],
    samples: int,
    options: dict[str, Any],
    accelerator: str = "cuda",
    clip: float | None = None,
) -> Figures:
    """Ours; ``samples`` for each worker, of which there is one unless ``options`` say more.

    ``clip``: the largest norm of the gradient.
    """
    strategy = OneWay(**options)
    return _in_lightning(model, samples, strategy, _adamw, accelerator, gradient_clip_val=clip)


def plain(
    model: dict[str, int], samples: int, accelerator: str = "cuda", clip: float | None = None
) -> Figures:
    """Lightning's single device, everything on it."""
    alone = _alone(accelerator)
    return _in_lightning(model, samples, alone, _fused, accelerator, gradient_clip_val=clip)


def ddp(model: dict[str, int], samples: int, accelerator: str = "cuda") -> Figures:
    """Lightning's ``ddp`` with one process, everything on the device."""
    return _in_lightning(model, samples, DDPStrategy(), _fused, accelerator)


def _alone(accelerator: str) -> SingleDeviceStrategy:
    return SingleDeviceStrategy(f"{accelerator}:0" if accelerator == "cuda" else accelerator)


def _in_lightning(
    model: dict[str, int],
    samples: int,
    strategy: Any,
    make: Any,
    accelerator: str,
    **options: Any,
) -> Figures:
    use_all_cores()
    fit(model, samples, strategy, make, accelerator, kind=Homeless, **options)
    found: Figures = json.loads(Path(_FILE).read_text())
    together = samples * getattr(strategy, "workers_per_device", 1)
    return found | {"samples_per_s": together / found["step_s"]}


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def fit(
    model: dict[str, int], samples: int, strategy: Any, make: Any, accelerator: str, **options: Any
) -> Trained:
    """Train for some steps, in bf16 arithmetic unless something else is said.

    In several ``epochs`` each is one step, of the same samples, so that their order is no matter.
    """
    module = options.pop("kind", Trained)(model, make)
    workers = getattr(strategy, "workers_per_device", 1)
    epochs = options.pop("epochs", 1)
    data = InMemory(*words(model, STEPS // epochs * samples * workers))
    timers = [DeviceTimer(FIRST)] if epochs == 1 else []
    usual = {"precision": "bf16-mixed", "accelerator": accelerator, "max_epochs": epochs}
    pinned = accelerator == "cuda"
    batches = DataLoader(data, samples, collate_fn=as_it_is, pin_memory=pinned)
    trainer(strategy, 1, *timers, **usual | options).fit(module, batches)
    return module


def difference(workers: int, options: dict[str, Any], accelerator: str = "cuda") -> float:
    """Between the parameters of so many workers and of one process, of the largest parameter.

    Raises:
        UserError: if it is more than rounding.
    """
    model, sgd = _SMALL, _sgd
    ours = HybridStrategy(workers_per_device=workers, **options)
    same = {"precision": "32-true", "epochs": STEPS}
    found = fit(model, 8 // workers, ours, sgd, accelerator, **same)
    wanted = fit(model, 8, _alone(accelerator), sgd, accelerator, **same)
    return _relative(found, wanted, 1e-2 if "transport_dtype" in options else _LIMIT)


def difference_behind(accelerator: str = "cuda") -> float:
    """As ``difference``, between ``pipe_sgd`` with one worker and a loop written by hand."""
    warm_up, clip = 2, 0.5
    ours = HybridStrategy({"name": "pipe_sgd", "warm_up": warm_up})
    same: dict[str, Any] = {"precision": "32-true", "gradient_clip_val": clip}
    found = fit(_SMALL, 8, ours, _sgd, accelerator, **same)
    masters, read = (Trained(_SMALL, _sgd).to(accelerator) for _ in range(2))
    optimizer = masters.configure_optimizers()
    x, y = (each.to(accelerator) for each in words(_SMALL, STEPS * 8))
    for step in range(STEPS):
        part, newest = slice(8 * step, 8 * step + 8), copy.deepcopy(masters.state_dict())
        if step <= warm_up:
            read.load_state_dict(newest)
        read.zero_grad()
        read.net(x[part], y[part]).backward()
        for master, own in zip(masters.parameters(), read.parameters(), strict=True):
            master.grad = own.grad
        torch.nn.utils.clip_grad_norm_(masters.parameters(), clip)
        optimizer.step()
        read.load_state_dict(newest)
    return _relative(found, masters, _LIMIT)


_SMALL = {"width": 64, "depth": 2, "length": 16}


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _relative(found: torch.nn.Module, wanted: torch.nn.Module, limit: float) -> float:
    pairs = zip(found.parameters(), wanted.parameters(), strict=True)
    largest = max(float(p.detach().abs().max()) for p in wanted.parameters())
    relative = max(float((a.cpu() - b.cpu()).detach().abs().max()) for a, b in pairs) / largest
    if not relative < limit:
        raise UserError(f"WRONG: parameters differ by {relative:.2g}, more than {limit:g}")
    return relative


# ---- torch alone --------------------------------------------------------------------------------


def torchao(model: dict[str, int], samples: int) -> Figures:
    """Its optimizer in host memory, in the loop one writes by hand."""
    use_all_cores()
    kind = optional("torchao.optim").CPUOffloadOptimizer
    net = Language(**model).cuda()
    optimizer = kind(net.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)

    def step(x: Tensor, y: Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return _timed(model, samples, step)


def deepspeed(model: dict[str, int], samples: int) -> Figures:
    """ZeRO stage 2 with the optimizer in host memory; its parameters on the device are bf16."""
    use_all_cores()  # before its kernels are loaded, which have an OpenMP of their own
    engine_of = optional("deepspeed").initialize
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    net = Language(**model)
    offload = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": samples,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": offload},
    }
    engine, *_ = engine_of(model=net, model_parameters=net.parameters(), config=config)

    def step(x: Tensor, y: Tensor) -> None:
        engine.backward(engine(x, y))
        engine.step()

    return _timed(model, samples, step)


def _timed(model: dict[str, int], samples: int, step: Callable[[Tensor, Tensor], None]) -> Figures:
    x, y = (each.pin_memory() for each in words(model, STEPS * samples))
    began = 0.0
    for number in range(STEPS):
        if number == FIRST:
            torch.cuda.synchronize()
            began = time.perf_counter()
        part = slice(number * samples, (number + 1) * samples)
        step(x[part].cuda(non_blocking=True), y[part].cuda(non_blocking=True))
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - began) / (STEPS - FIRST)
    return {"step_s": step_s, "samples_per_s": samples / step_s, "peak_bytes": peak_bytes()}
