"""What the GPUs that were chosen are not: alike, or made for the precision that was asked for."""

from __future__ import annotations

import os

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from hybridtrain.lightning.run_context import RunContext
from hybridtrain.memory.limits import Gpu, gpus

_UNEQUAL = 1.2  # times as much memory
_BF16_FROM = 8  # compute capability


def check_devices(strategy: RunContext) -> None:
    """Warns, once for all devices. Nothing is asked of CUDA."""
    found = chosen(strategy.parallel_devices or [])
    sizes = sorted(gpu.n_bytes for gpu in found if gpu.n_bytes)
    unequal = bool(sizes) and sizes[-1] > _UNEQUAL * sizes[0]
    if unequal and strategy.data_options.batch_sizes is None:
        each = ", ".join(f"{size / 2**30:.0f}" for size in sizes)
        rank_zero_warn(
            f"the devices are not alike (they have {each} GiB), and all get mini-batches of the "
            "same size, which the smallest must hold and the slowest decides the time of; give "
            "each its own with batch_size_per_worker=[...], or use strategy=async"
        )
    old = [gpu for gpu in found if 0 < gpu.major < _BF16_FROM]
    precision = str(getattr(strategy.precision_plugin, "precision", ""))
    if old and "bf16" in precision:
        rank_zero_warn(
            f"precision={precision!r} was given, which {len(old)} of the {len(found)} devices can "
            f"only imitate, slowly (compute capability {old[0].major}, and {_BF16_FROM} is "
            "needed); use precision='16-mixed' or '32-true'"
        )


def chosen(devices: list[torch.device]) -> list[Gpu]:
    """What is known of those; nothing where it is not known which of the machine's they are.

    ``CUDA_VISIBLE_DEVICES`` may name UUIDs or parts of GPUs (``MIG-...``), and unless
    ``CUDA_DEVICE_ORDER`` says otherwise, CUDA numbers unlike devices by their speed.
    """
    there, wanted = gpus(), [d.index or 0 for d in devices if d.type == "cuda"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    usual = [str(number) for number in range(len(there))]
    names = usual if visible is None else [name.strip() for name in visible.split(",")]
    if not all(name.isdecimal() and int(name) < len(there) for name in names):
        return []
    by_place = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not by_place and len(set(there)) > 1 and len(wanted) < len(there):
        return []
    return [there[int(names[number])] for number in wanted if number < len(names)]
