"""The stand-in for a device, where a parity run computes on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.strategies import SingleDeviceStrategy

from hybridtrain import HybridStrategy
from hybridtrain.engine.worker.device import KINDS, transfers
from hybridtrain.engine.worker.device.cuda import CudaStreams
from tests.standin.accelerator import StandInAccelerator
from tests.standin.device import name_it
from tests.standin.state import N_DEVICES, NAME

APART = NAME


def sharing(options: Mapping[str, Any], n_devices: int) -> dict[str, Any]:
    """The same arguments of a trainer, with all workers on one device if there are too few."""
    new = dict(options)
    alone = not isinstance(new["strategy"], str) or new["strategy"] == "auto"
    if not alone and new["devices"] > n_devices:
        new["strategy"] = HybridStrategy(new["strategy"], workers_per_device=new["devices"])
        new["devices"] = 1
    return new


def on_the_stand_in(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same arguments of a trainer for the stand-in; for the rest of the process.

    Workers have a device each if there are so many, and share one otherwise. Buckets are so small
    that even these nets fill several.
    """
    name_it()
    KINDS[NAME] = CudaStreams
    transfers.LEAST_BYTES = 64
    new = dict(options) | {"accelerator": StandInAccelerator()}
    if options["strategy"] == "auto":
        new["strategy"] = SingleDeviceStrategy(torch.device(NAME, 0))
    else:
        new = sharing(new, N_DEVICES)
    if (precision := options.get("precision")) in (
        "16-mixed",
        "bf16-mixed",
    ):  # Lightning would take CUDA's
        del new["precision"]
        # Nothing overflows: that would depend on the size of a mini-batch, so on the reference.
        scaler = torch.amp.GradScaler(NAME, 2.0**8) if precision == "16-mixed" else None
        plugins = [*options.get("plugins", ()), MixedPrecision(precision, NAME, scaler)]
        new["plugins"] = plugins
    return new
