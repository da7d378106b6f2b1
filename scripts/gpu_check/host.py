"""Host memory: whether any is left behind, and page-locking where little of it is allowed."""

from __future__ import annotations

import json
import os
import resource
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpu_check import bus, fits
from gpu_check.check import Found
from hybridtrain import HybridStrategy
from hybridtrain.engine.memory.limits import available_bytes

_NOBODY = 65534
_SAMPLES = 64  # of an epoch, and of a mini-batch 8
_LOOKS = 5  # in a fit
_NOISE = 2**24  # bytes; less is not looked for


# ---- what is left behind -------------------------------------------------------------------------


class Looks(pl.Callback):
    """Writes down how much memory is available, at equal distances of a worker's steps."""

    def __init__(self, place: str, every: int) -> None:
        self.place, self.every = place, every

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Note the available memory, in the first worker."""
        if trainer.is_global_zero and trainer.global_step % self.every == 0:
            with Path(self.place).open("a", encoding="utf-8") as file:
                file.write(f"{_available()}\n")


def growth(device: str = "cuda", n_fits: int = 5, n_steps: int = 300, width: int = 4096) -> Found:
    """``MemAvailable`` over the steps of a fit, and after each of several fits in one process."""
    n_bytes = sum(p.nbytes for p in _net(width).parameters())
    within: list[list[int]] = []
    after: list[int] = []
    for number in range(n_fits):
        place = f"looks-{number}.txt"
        _fit(device, width, n_steps, Looks(str(Path(place).absolute()), n_steps // _LOOKS))
        within.append([int(line) for line in Path(place).read_text(encoding="utf-8").split()])
        after.append(_available())
    return judged(after, within, n_bytes)


def judged(after: Sequence[int], within: Sequence[Sequence[int]], n_bytes: int) -> Found:
    """Memory that is kept is missing again each time; what others take of it, now and then.

    So it counts as kept where between any two looks more than half of the parameters' bytes went.
    The first fit, and the first look in each, come before everything is there.

    Args:
        after: bytes available after each fit.
        within: bytes available in each fit, in the order of its steps.
        n_bytes: of the model's parameters.
    """
    lost = [_least_fall(after[1:]), *(_least_fall(each[1:]) for each in within)]
    figures = {"after": list(after), "within": [list(each) for each in within], "bytes": n_bytes}
    wrong = [each > max(n_bytes / 2, _NOISE) for each in lost]
    text = (
        f"{len(after)} fits of a model of {n_bytes / 2**20:.0f} MiB: {_fall(after[1:])} MiB less "
        f"available from fit to fit, {_fall(within[-1][1:])} from look to look in the last"
    )
    if wrong[0]:
        text += "; a fit leaves memory behind"
    if any(wrong[1:]):
        text += "; steps take more and more memory"
    return Found(text, not any(wrong), figures)


def _least_fall(looks: Sequence[int]) -> float:
    return min((before - then for before, then in pairwise(looks)), default=0)


def _fall(looks: Sequence[int]) -> str:
    """On average, in MiB."""
    return f"{(looks[0] - looks[-1]) / max(1, len(looks) - 1) / 2**20:.0f}"


def _available() -> int:
    """Bytes of host memory that could be had without swapping."""
    found = available_bytes()
    if found is None:
        raise OSError("neither /proc/meminfo nor a control group says how much memory there is")
    return found


def _net(width: int) -> nn.Module:
    layers = [nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 1)]
    return nn.Sequential(*layers)


def _fit(device: str, width: int, n_steps: int, *callbacks: pl.Callback) -> None:
    x = torch.randn(_SAMPLES, 16, generator=torch.Generator().manual_seed(1))
    trainer = pl.Trainer(
        strategy=HybridStrategy(),
        accelerator=device,
        devices=1,
        max_epochs=-1,
        max_steps=n_steps,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    module = fits.Net(_net(width), partial(torch.optim.Adam, lr=1e-4))
    trainer.fit(module, DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), 8))


# ---- page-locking --------------------------------------------------------------------------------


def little_lockable(device: str = "cuda", kib: int = 64, n_bytes: int = 2**30) -> Found:
    """Under a low ``ulimit -l``: whether memory is page-locked all the same, and what a fit says.

    Root may lock what it likes, so then it is tried as nobody, too.
    """
    as_root = os.geteuid() == 0
    probes = {"root" if as_root else "user": _probed(device, kib, n_bytes, None)}
    if as_root:
        probes["nobody"] = _probed(device, kib, n_bytes, _NOBODY)
    fitted = fits.in_a_fork(partial(_warned, kib=kib), device, 60.0)
    return concluded(probes, fitted, kib)


def concluded(probes: dict[str, dict[str, Any]], fitted: tuple[bool, str], kib: int) -> Found:
    """A fit must train, and warn if its memory is refused.

    Args:
        probes: user -> figures of ``bus.probe``, or ``error``.
        fitted: of the first of these users: whether the fit has ended well; its warning, or what
            was wrong.
        kib: the limit.
    """
    said = [_told(user, figures) for user, figures in probes.items()]
    text, figures = f"ulimit -l {kib}: {'; '.join(said)}", {**probes, "fit": fitted[1]}
    if not fitted[0]:
        return Found(f"{text}; a fit fails: {fitted[1].splitlines()[-1]}", False, figures)
    first = next(iter(probes.values()))
    if first.get("refused") and not fitted[1]:
        return Found(f"{text}; a fit does not say so", False, figures)
    text += "; a fit trains" + (" and says what it costs" if fitted[1] else "")
    return Found(text, "error" not in first, figures)


def _told(user: str, figures: dict[str, Any]) -> str:
    if "error" in figures:
        return f"as {user} not tried ({figures['error']})"
    slow = figures["pageable"]["up_GB_s"]
    if figures["refused"]:
        return f"as {user} refused ({figures['refused']}), copies go at {slow:.1f} GB/s"
    fast = figures["locked"]["up_GB_s"]
    return f"as {user} page-locked all the same, {fast:.1f} GB/s (else {slow:.1f})"


def _probed(device: str, kib: int, n_bytes: int, user: int | None) -> dict[str, Any]:
    def probe(kind: str) -> str:
        _limit(kib)
        if user is not None:
            os.setuid(user)
        return json.dumps(asdict(bus.probe(n_bytes, kind)))

    right, said = fits.in_a_fork(probe, device, 30.0)
    figures: dict[str, Any] = json.loads(said)["figures"] if right else {}
    return figures if right else {"error": said.splitlines()[-1]}


def _warned(device: str, kib: int) -> str:
    """The warning of a fit, if there is one."""
    _limit(kib)
    place = Path("said.txt").absolute()

    def note(message: Any, *_: Any, **__: Any) -> None:
        with place.open("a", encoding="utf-8") as file:  # workers do so, too
            file.write(f"{message}\n")

    place.touch()
    warnings.showwarning = note
    wide = nn.Sequential(nn.Linear(16, 2**14), nn.Tanh(), nn.Linear(2**14, 1))  # 1 MiB
    fits.fit(fits.Net(wide, partial(torch.optim.SGD, lr=1e-6)), device)
    lines = place.read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if "could not be page-locked" in line), "")


def _limit(kib: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1024 * kib, most))
