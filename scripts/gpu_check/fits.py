"""Short fits of what has gone wrong before, or may, only where there is a GPU.

All are run in one process, each in a fork of it, so that none begins with what another has left.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpu_check.check import Found
from hybridtrain import HybridStrategy

Fit = Callable[[str], str]


class Net(pl.LightningModule):
    """A regression; ``make`` gets the parameters and returns an optimizer."""

    def __init__(self, net: nn.Module | None = None, make: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = net or nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
        self.make = make or partial(torch.optim.SGD, lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The mean squared error."""
        x, y = batch
        loss = nn.functional.mse_loss(self.predict(x).float(), y)
        self.log("loss", loss)
        return loss

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 16) to (B, 1)."""
        return self.net(x)

    def configure_optimizers(self) -> Any:
        """One."""
        return self.make(self.parameters())


class Recurrent(Net):
    """An LSTM, whose weights lie in one storage on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.out = nn.LSTM(4, 32, batch_first=True), nn.Linear(32, 1)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """Four words of four numbers each."""
        return self.out(self.net(x.view(-1, 4, 4))[0][:, -1])


class Half(Net):
    """Parameters in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.net = self.net.bfloat16()

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """In bf16."""
        return self.net(x.bfloat16())


class Unlucky(Net):
    """Something happens to worker 1, once, in its third step."""

    def __init__(self, what: Callable[[torch.device], Any]) -> None:
        super().__init__()
        self.what, self.happened = what, torch.zeros(1).share_memory_()  # of all workers

    def on_after_backward(self) -> None:
        """Run the given function once, in worker 1, after the backward pass of step 2."""
        if self.global_rank == 1 and self.global_step == 2 and not self.happened:
            self.happened.fill_(1)
            self.what(self.device)


def fit(
    module: pl.LightningModule,
    device: str,
    strategy: dict[str, Any] | None = None,
    steps: int | None = 8,
    **options: Any,
) -> pl.Trainer:
    """Two workers on the one device; the parameters must be finite in the end."""
    before = is_initialized(device)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(64, 16, generator=draw)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        strategy=HybridStrategy(workers_per_device=2, **(strategy or {})),
        accelerator=device,
        devices=1,
        max_epochs=2,
        **{"enable_checkpointing": False} | quiet | options,
    )
    trainer.fit(module, DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), 8))
    assert steps in (None, trainer.global_step), f"{trainer.global_step} steps, not {steps}"
    assert all(p.isfinite().all() for p in module.parameters()), "parameters are not finite"
    assert all(p.device.type == "cpu" for p in module.parameters()), "parameters are not at home"
    assert before or not is_initialized(device), "fit has initialised the device in this process"
    return trainer


def is_initialized(device: str) -> bool:
    """Whether forked workers could no longer use it."""
    return device != "cpu" and bool(torch.get_device_module(device).is_initialized())


def gap(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def monitored(device: str) -> str:
    """A ModelCheckpoint with a score, then a second fit: nothing initialises CUDA here."""
    for _ in range(2):
        callback = ModelCheckpoint("checkpoints", monitor="loss")
        fit(Net(), device, enable_checkpointing=True, callbacks=[callback])
        assert callback.best_model_score is not None, "no score came home"
    return "two fits, CUDA not initialised in the calling process"


def fused_half(device: str) -> str:
    """Gradients are unscaled, whoever would have done it."""
    precision = "16-mixed" if device == "cuda" else "bf16-mixed"
    found = [Net(make=partial(torch.optim.SGD, lr=0.01, fused=fused)) for fused in (False, True)]
    for module in found:
        fit(module, device, precision=precision)
    apart = gap(*found)
    assert apart < 1e-5, f"fused and plain differ by {apart:.2g}"
    return f"fused and plain differ by {apart:.1g}"


def recurrent(device: str) -> str:
    """Weights that share a storage."""
    return _as_on_the_cpu(Recurrent, device)


def half_model(device: str) -> str:
    """The same of a model in bf16."""
    return _as_on_the_cpu(Half, device)


def _as_on_the_cpu(kind: Callable[[], Net], device: str) -> str:
    here, there = kind(), kind()
    fit(here, "cpu")
    fit(there, device)
    return _near(here, there, "the CPU", 1e-2)


def _near(one: Net, other: Net, what: str, limit: float) -> str:
    apart = gap(one, other)
    assert apart < limit, f"{what} differs by {apart:.2g}"
    return f"{what} differs by {apart:.1g}"


def compiled(device: str) -> str:
    """``torch.compile`` of the net; the workers compile."""
    plain, module = Net(), Net()
    module.predict = torch.compile(module.net)  # type: ignore[method-assign]
    fit(plain, device)
    fit(module, device)
    return _near(plain, module, "compiled", 1e-3)


def backward_before(device: str) -> str:
    """A backward on the CPU in the calling process, whose threads a fork does not have."""
    module = Net()
    module.net(torch.ones(2, 16)).sum().backward()
    module.zero_grad()
    fit(module, device)
    return "a backward on the CPU before fit does no harm"


def asked_before(device: str) -> str:
    """CUDA's availability asked before."""
    there = torch.cuda.is_available()
    fit(Net(), device)
    return f"is_available() said {there} before fit"


def narrow(device: str) -> str:
    """Gradients that travel as bf16."""
    plain, module = Net(), Net()
    fit(plain, device)
    fit(module, device, {"transport_dtype": "bf16"})
    return _near(plain, module, "bf16 transport", 1e-2)


def own_parameters(device: str, scheme: dict[str, Any]) -> str:
    """Workers with an Adam of their own, whose states are saved in a checkpoint."""
    here, there = (Net(make=partial(torch.optim.Adam, lr=1e-3)) for _ in range(2))
    for module, where in ((here, "cpu"), (there, device)):
        saving = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint("checkpoints")]}
        fit(module, where, scheme, **saving)
    return _near(here, there, "the CPU", 1e-3)


def free(device: str) -> str:
    """Nobody waits for anybody; two fits."""
    for _ in range(2):
        fit(Net(), device, {"policy": "async"}, steps=16)
    return "two fits of 16 updates"


def full(device: str) -> str:
    """A worker that is out of memory goes on without a mini-batch."""
    if device == "cpu":
        return "left out on a CPU"
    module = Unlucky(lambda place: None)
    module.training_step = partial(_ask_for_too_much, module)  # type: ignore[method-assign]
    trainer = fit(module, device, {"on_oom": "drop"})
    left_out = trainer.strategy.run_stats()["left_out"]  # type: ignore[attr-defined]
    assert left_out == {"oom": [0, 1]}, f"left out: {left_out}"
    return "one mini-batch was left out"


def _ask_for_too_much(module: Unlucky, batch: Any, batch_idx: int) -> torch.Tensor:
    if module.global_rank == 1 and not module.happened:
        module.happened.fill_(1)
        torch.empty(2**45, dtype=torch.uint8, device=module.device)
    return Net.training_step(module, batch, batch_idx)


def failed(device: str, choice: str) -> str:
    """A device that has failed for good ends its worker, and nobody else."""
    module = Unlucky(_break)
    trainer = fit(module, device, {"on_failure": choice}, steps=None)
    samples = trainer.strategy.run_stats()["samples"]  # type: ignore[attr-defined]
    assert samples == 2 * 64, f"{samples} samples counted, not 128"
    return f"{trainer.global_step} updates, each sample counted once"


def _break(device: torch.device) -> None:
    """An index that is not there: on a GPU an assertion that no later call gets over."""
    if fails := getattr(torch.get_device_module(device), "fail", None):
        fails()  # of the tests' stand-in
    print(torch.zeros(4, device=device)[torch.tensor([1 << 20], device=device)].cpu())


FITS: dict[str, Fit] = {
    "ModelCheckpoint(monitor)": monitored,
    "is_available() before": asked_before,
    "CPU backward before": backward_before,
    "half precision, fused SGD": fused_half,
    "LSTM": recurrent,
    "bf16 model": half_model,
    "bf16 transport": narrow,
    "async": free,
    "local SGD": partial(own_parameters, scheme={"exchange": {"name": "movement", "every": 3}}),
    "EASGD": partial(own_parameters, scheme={"exchange": {"name": "elastic", "every": 3}}),
    "out of memory": full,
    "a failed device, continue": partial(failed, choice="continue"),
    "a failed device, restart": partial(failed, choice="restart"),
    "torch.compile": compiled,
}


def run(device: str = "cuda", limit_s: float = 60.0, only: tuple[str, ...] = ()) -> Found:
    """Each in a fork."""
    said: dict[str, str] = {}
    wrong: list[str] = []
    for name, one in FITS.items():
        if only and name not in only:
            continue
        right, said[name] = in_a_fork(one, device, limit_s)
        print(f"{name}: {said[name]}", flush=True)
        if not right:
            wrong.append(name)
    text = f"{len(said) - len(wrong)} of {len(said)} as they should be"
    first = "; ".join(f"{name}: {said[name].splitlines()[-1]}" for name in wrong)
    return Found(f"{text}; {first}" if wrong else text, not wrong, said)


def in_a_fork(one: Fit, device: str, limit_s: float) -> tuple[bool, str]:
    """Run a function in a forked process; return whether it is right, and its text or fault."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_tell, args=(one, device, there))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(limit_s) else (False, f"took more than {limit_s:.0f} s")
    except EOFError:
        return False, "its process died"
    finally:
        process.join(5.0)
        process.kill()
        process.join()


def _tell(one: Fit, device: str, there: Any) -> None:
    torch.set_num_threads(1)  # OpenMP's other threads are not in a fork, and would be waited for
    try:
        there.send((True, one(device)))
    except BaseException:
        there.send((False, traceback.format_exc(limit=-3)))
