"""Ways to train a language model on one GPU, each a job: seconds of a step after the first ones.

Legend: B samples of a mini-batch, T tokens of a sample.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader

from benchmarks.loops import Timer, noted
from benchmarks.models import InMemory
from benchmarks.peers import optional
from hybridtrain import HybridStrategy
from hybridtrain.errors import UserError

WORDS = 8192
STEPS, FIRST = 11, 3
_LIMIT = 1e-4  # of the largest parameter: float32 in another order of summation


class Block(nn.Module):
    """Attention and a dense layer behind norms; 12 · width² parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 128)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        b, t, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, width))
        return x + self.down(torch.relu(self.up(self.norms[1](x))))


class Language(nn.Module):
    """Words in, the loss of the next word out."""

    def __init__(self, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of (B, T) words and the words behind them."""
        scores = self.head(self.blocks(self.words(x) + self.places))
        return cross_entropy(scores.flatten(0, 1).float(), y.flatten())


class Trained(pl.LightningModule):
    """The model with an optimizer."""

    def __init__(self, model: dict[str, int], make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.make = Language(**model), make

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        return self.net(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Over all parameters."""
        return self.make(self.parameters())


class DeviceTimer(Timer):
    """Looks at the clock when the device has done what it was given."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.count + 1 in (self.first, STEPS) and trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        super().on_train_batch_start()


def words(model: dict[str, int], n: int) -> tuple[Tensor, Tensor]:
    """Samples, the same in every run."""
    draw = torch.Generator().manual_seed(1)
    drawn = torch.randint(WORDS, (n, model["length"] + 1), generator=draw)
    return drawn[:, :-1], drawn[:, 1:]


# ---- Lightning's loop ---------------------------------------------------------------------------


def hybrid(
    model: dict[str, int], samples: int, options: dict[str, Any], accelerator: str = "cuda"
) -> float:
    """Ours, one worker."""
    fit(model, samples, HybridStrategy(**options), _adamw, accelerator)
    return noted()


def plain(model: dict[str, int], samples: int, accelerator: str = "cuda") -> float:
    """Lightning's single device, everything on it."""
    strategy = SingleDeviceStrategy(f"{accelerator}:0" if accelerator == "cuda" else accelerator)
    fit(model, samples, strategy, _fused, accelerator)
    return noted()


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
    module = Trained(model, make)
    workers = getattr(strategy, "workers_per_device", 1)
    epochs = options.pop("epochs", 1)
    data = InMemory(*words(model, STEPS // epochs * samples * workers))
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=accelerator,
        devices=1,
        max_epochs=epochs,
        callbacks=[DeviceTimer(FIRST)] if epochs == 1 else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"precision": "bf16-mixed"} | options,
    )
    pinned = accelerator == "cuda"
    trainer.fit(module, DataLoader(data, samples, collate_fn=_as_it_is, pin_memory=pinned))
    return module


def _as_it_is(batch: Any) -> Any:
    return batch


def difference(workers: int, options: dict[str, Any], accelerator: str = "cuda") -> float:
    """Between the parameters of so many workers and of one process, of the largest parameter.

    Raises:
        UserError: if it is more than rounding.
    """
    model = {"width": 64, "depth": 2, "length": 16}

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    ours = HybridStrategy(workers_per_device=workers, **options)
    same = {"precision": "32-true", "epochs": STEPS}
    found = fit(model, 8 // workers, ours, sgd, accelerator, **same)
    alone = SingleDeviceStrategy(f"{accelerator}:0" if accelerator == "cuda" else accelerator)
    wanted = fit(model, 8, alone, sgd, accelerator, **same)
    pairs = zip(found.parameters(), wanted.parameters(), strict=True)
    largest = max(float(p.detach().abs().max()) for p in wanted.parameters())
    relative = max(float((a.cpu() - b.cpu()).detach().abs().max()) for a, b in pairs) / largest
    limit = 1e-2 if "transport_dtype" in options else _LIMIT
    if not relative < limit:
        raise UserError(f"WRONG: parameters differ by {relative:.2g}, more than {limit:g}")
    return relative


# ---- torch alone --------------------------------------------------------------------------------


def torchao(model: dict[str, int], samples: int) -> float:
    """Its optimizer in host memory, in the loop one writes by hand."""
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


def deepspeed(model: dict[str, int], samples: int) -> float:
    """ZeRO stage 2 with the optimizer in host memory; its parameters on the device are bf16."""
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


def _timed(model: dict[str, int], samples: int, step: Callable[[Tensor, Tensor], None]) -> float:
    x, y = (each.pin_memory() for each in words(model, STEPS * samples))
    began = 0.0
    for number in range(STEPS):
        if number == FIRST:
            torch.cuda.synchronize()
            began = time.perf_counter()
        part = slice(number * samples, (number + 1) * samples)
        step(x[part].cuda(non_blocking=True), y[part].cuda(non_blocking=True))
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / (STEPS - FIRST)
