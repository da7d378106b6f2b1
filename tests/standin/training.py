"""Fits whose workers compute on the stand-in."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from hybridtrain import HybridStrategy
from tests.lightning.toys import fit
from tests.standin.accelerator import StandInAccelerator
from tests.standin.state import N_DEVICES


def fit_apart(
    workers: int, *args: Any, strategy: dict[str, Any] | None = None, **options: Any
) -> tuple[pl.LightningModule, pl.Trainer]:
    """Two workers on a device each, more of them on one. The rest as ``toys.fit`` has it."""
    share = 1 if workers <= N_DEVICES else workers
    return fit(
        HybridStrategy(workers_per_device=share, **(strategy or {})),
        options.pop("devices", workers // share),
        *args,
        **{"accelerator": StandInAccelerator()} | options,
    )
