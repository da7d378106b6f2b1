"""What a module may be made of: parameters, buffers and layers of all kinds."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parity.case import Grade, Theme
from tests.parity.toys import IN_ORDER, Net, even, mlp, sgd

THEME = Theme("modules", even)
add = partial(THEME.add, expect=Grade.BITWISE)
UNUSED = "ddp_fork_find_unused_parameters_true"

# ---- parameters ---------------------------------------------------------------------------------


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return sgd(p for p in self.parameters() if p.requires_grad)


class FrozenInOptimizer(Net):
    """The optimizer gets everything, the frozen included."""

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1))
        self.net[0].requires_grad_(False)


class Tied(nn.Module):
    """One matrix used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.two(torch.tanh(self.one(x))))


class Unused(Net):
    def __init__(self) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1))
        self.unused = nn.Parameter(torch.ones(3))


class Alternating(Net):
    """A branch that takes part in every second mini-batch only, in all workers alike."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.net(x) + (self.branch(x) if batch_idx % 2 else 0)
        return nn.functional.mse_loss(out, y)


class OneRankOnly(Alternating):
    """A branch that takes part in one worker only: its gradient is averaged with zeros."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, 1 - self.global_rank)


class Thaws(Net):
    """``requires_grad`` changes in the middle of the training."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


add("frozen parameters", Frozen)
add("frozen parameters in the optimizer", FrozenInOptimizer)
add("tied parameters", partial(Net, net=Tied))
add("an unused parameter", Unused, ddp=UNUSED, wide=True)
add("parameters unused in some steps", Alternating, ddp=UNUSED, wide=True)
add("parameters unused in some workers", OneRankOnly, ddp=UNUSED, wide=True)
add(
    "requires_grad changes during training",
    Thaws,
    ddp=UNUSED,
    trainer=IN_ORDER,
    versus="union",
    expect=Grade.ROUNDING,
    reason="DDP never averages what was frozen when it was wrapped, so its ranks drift apart",
)

# ---- dtypes and memory formats ------------------------------------------------------------------


class Cast(nn.Module):
    """Works in another dtype than its input and output."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.dtype = mlp().to(dtype), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.to(self.dtype)).to(torch.float32)


class Mixed(nn.Module):
    """Three dtypes side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.plain = Cast(torch.float64), Cast(torch.bfloat16), mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x) + self.narrow(x) + self.plain(x)


class Complex(nn.Module):
    """A complex matrix between two real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, dtype=torch.complex64) * 0.5)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((x.to(torch.complex64) @ self.weight).abs())


class Convolutions(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        net = nn.Sequential(nn.Conv2d(1, 4, 2, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 2))
        self.net = net.to(memory_format=torch.channels_last) if last else net
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x.view(-1, 1, 2, 2)).flatten(1))


class Transposed(nn.Module):
    """A parameter that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4).t())
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(x @ self.weight))


add("float64 parameters", partial(Net, net=partial(Cast, torch.float64)))
# Three bfloat16 gradients, each rounded to 8 bits: DDP divides them before it adds, the host after.
add("bfloat16 parameters", partial(Net, net=partial(Cast, torch.bfloat16)), rtol=5e-2)
add("parameters of three dtypes", partial(Net, net=Mixed), rtol=5e-2, wide=True)
add("complex parameters", partial(Net, net=Complex))
add("convolutions", partial(Net, net=partial(Convolutions, False)))
add("channels_last", partial(Net, net=partial(Convolutions, True)))
add("a transposed parameter", partial(Net, net=Transposed))

# ---- layers with buffers ------------------------------------------------------------------------


def normalised(make: Any) -> nn.Module:
    first = nn.Linear(4, 16, bias=False)  # its gradient would be nothing but rounding
    return nn.Sequential(first, make(16), nn.Tanh(), nn.Linear(16, 1))


class Queue(nn.Module):
    """A buffer that is written in every step and read in the next, as in contrastive learning."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("queue", torch.zeros(8, 4))
        self.register_buffer("position", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.net(x) + 0.1 * torch.tanh(x @ self.queue.t()).sum(1, keepdim=True)
        if self.training:
            rows = (int(self.position) + torch.arange(len(x))) % len(self.queue)
            self.queue[rows] = x.detach()
            self.position += len(x)
        return out


class Momentum(Net):
    """A teacher that follows its pupil, moved in a hook: parameters that no optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = mlp().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + (self(batch[0]) - self.teacher(batch[0])).pow(2).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        pairs = zip(self.teacher.parameters(), self.net.parameters(), strict=True)
        with torch.no_grad():
            for teacher, pupil in pairs:
                teacher.lerp_(pupil, 0.1)


class Transient(Net):
    """A buffer that is not saved, and a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch[0].sum()
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.log("seen", self.seen)


add("BatchNorm", partial(Net, net=partial(normalised, nn.BatchNorm1d)), wide=True)
add(
    "BatchNorm while accumulating",
    partial(Net, net=partial(normalised, nn.BatchNorm1d)),
    trainer={"accumulate_grad_batches": 4},
)
add(
    "SyncBatchNorm",
    partial(Net, net=partial(normalised, nn.BatchNorm1d)),
    expect=Grade.ROUNDING,
    versus="union",
    reason="SyncBatchNorm has no CPU kernel under DDP; one large mini-batch is what it stands for",
    trainer=IN_ORDER | {"sync_batchnorm": True},
    ignore=("*num_batches_tracked*",),
    wide=True,
)
add("LayerNorm", partial(Net, net=partial(normalised, nn.LayerNorm)))
add(
    "spectral norm",
    partial(
        Net,
        net=lambda: nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1)
        ),
    ),
)
add(
    "weight norm",
    partial(
        Net,
        net=lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), nn.Linear(8, 1)
        ),
    ),
)
add("a queue in a buffer", partial(Net, net=Queue), wide=True)
add("a teacher that follows", Momentum, wide=True)
add("a buffer that is not saved", Transient)

# ---- layers of other kinds ----------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.rnn, self.head = kind(2, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x.view(-1, 2, 2))[0][:, -1])


class Embedding(nn.Module):
    """Indices made of the signs of the input."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 4, sparse=sparse)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        powers = torch.tensor([1, 2, 4, 8], device=x.device)
        return self.head(self.table(((x > 0) * powers).sum(1)))


class SparseNet(pl.LightningModule):
    """SparseAdam for the table, Adam for the rest: manual, as two optimizers are."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = Embedding(True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        head = sgd(self.net.head.parameters())
        table = list(self.net.table.parameters())
        return torch.optim.SparseAdam(table, lr=0.01), head


class OnlyTable(Net):
    """Automatic optimization of a sparse table by SparseAdam; the head is frozen."""

    def __init__(self) -> None:
        super().__init__(net=partial(Embedding, True))
        self.net.head.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(list(self.net.table.parameters()), lr=0.01)


class Checkpointed(nn.Module):
    """Activations are computed again in backward, dropout's random numbers too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Tanh())
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class Configured(Net):
    """Its layers are made in ``configure_model``, in the workers."""

    def __init__(self) -> None:
        super().__init__(net=nn.Identity)
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = mlp()


class Compiled(Net):
    """``torch.compile`` inside the module."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.compiled, self.backend = None, backend

    def on_fit_start(self) -> None:
        self.compiled = torch.compile(self.net, backend=self.backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) if self.compiled is None else self.compiled(x)


class Lists(nn.Module):
    """Parameters in lists and dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4, 4) / 2) for _ in range(2)])
        self.heads = nn.ParameterDict({"one": nn.Parameter(torch.randn(4, 1))})
        self.layers = nn.ModuleDict({"last": nn.Linear(1, 1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return self.layers["last"](x @ self.heads["one"])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x[:, None, :]))[:, 0]


class Noise(nn.Module):
    """Random numbers of torch, Python and NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import random

        import numpy as np

        if self.training:
            x = (
                x
                + 0.1 * torch.randn_like(x)
                + 0.1 * random.random()
                + 0.1 * float(np.random.rand())
            )
        return self.net(x)


add("LSTM", partial(Net, net=partial(Recurrent, nn.LSTM)))
add("GRU", partial(Net, net=partial(Recurrent, nn.GRU)))
add("an embedding", partial(Net, net=partial(Embedding, False)))
add(
    "a sparse embedding, SGD",
    partial(Net, partial(torch.optim.SGD, lr=0.1), net=partial(Embedding, True)),
)
add(
    "a sparse embedding, Adagrad",
    partial(Net, partial(torch.optim.Adagrad, lr=0.1), net=partial(Embedding, True)),
    expect=Grade.ROUNDING,
    reason="duplicate rows of a sparse gradient are summed in another order",
)
add("a sparse embedding, SparseAdam", OnlyTable)
add("a sparse embedding, two optimizers", SparseNet, wide=True)
add(
    "dropout",
    partial(Net, net=lambda: nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))),
    wide=True,
)
add("random numbers of three libraries", partial(Net, net=Noise))
add("activations computed again", partial(Net, net=Checkpointed))
add("configure_model", Configured, ignore=("module", "module.*"))  # a forked ddp loses the layers
add("torch.compile, eager", partial(Compiled, "eager"))
add("torch.compile, aot_eager", partial(Compiled, "aot_eager"), limit_s=60.0)
add("parameters in lists", partial(Net, net=Lists))
add("attention", partial(Net, net=Attention))
