"""How much of a device's memory one worker may take, and what is said where it was not enough."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from hybridtrain.errors import UserError
from hybridtrain.util.number_checks import is_number
from hybridtrain.worker.device import KINDS

_ASKED = re.compile(r"Tried to allocate ([\d.]+ \w+)")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """``fraction``: of the device, for each worker; ``None``: an equal share where several have it.

    Raises:
        UserError: if that makes no sense.
    """

    fraction: float | None = None

    @classmethod
    def of(cls, fraction: Any) -> DeviceMemory:
        """Checked."""
        if fraction is None:
            return cls()
        if not is_number(fraction) or not 0 < fraction <= 1:
            raise UserError(
                f"device_memory_fraction={fraction!r} was given; it must be a number above 0 and "
                "up to 1 (the share of its device that each worker may take), or null: an equal "
                "share where several workers have one device"
            )
        return cls(float(fraction))

    def share(self, workers_per_device: int) -> float | None:
        """What a worker is held to; ``None``: nothing is set."""
        if self.fraction is not None:
            return self.fraction
        return 1 / workers_per_device if workers_per_device > 1 else None

    def hold(self, device: torch.device, workers_per_device: int) -> None:
        """From now on this process gets no more of the device."""
        share = self.share(workers_per_device)
        if device.type in KINDS and share is not None:
            torch.get_device_module(device).set_per_process_memory_fraction(share, device)


def out_of_memory(error: BaseException, strategy: Any) -> str:
    """What was asked for, what there is, and what would take less."""
    device, workers = strategy.root_device, strategy.workers_per_device
    advice = ["smaller mini-batches (your DataLoader's batch_size, or batch_size_per_worker)"]
    if device.type not in KINDS:
        return f"What takes less: {advice[0]}."
    if workers > 1:
        advice.append(f"fewer workers on a device (workers_per_device={workers} now)")
    if strategy.device_memory.fraction is not None:
        advice.append(f"a larger device_memory_fraction ({strategy.device_memory.fraction:g} now)")
    if "bf16" not in str(getattr(strategy.precision_plugin, "precision", "")):
        advice.append("Trainer(precision='bf16-mixed')")
    return f"{_numbers(error, strategy)}What takes less: {', '.join(advice)}."


def _numbers(error: BaseException, strategy: Any) -> str:
    asked = _ASKED.search(str(error))
    said = f"{asked[1]} were asked for" if asked else "Memory was asked for"
    device = strategy.root_device
    try:
        free, total = torch.get_device_module(device).mem_get_info(device)
    except (RuntimeError, AttributeError):  # a device that has failed tells nothing
        return f"{said}. "
    share = strategy.device_memory.share(strategy.workers_per_device)
    held = "" if share is None else f", of which each worker may take {total * share / 2**30:.2f}"
    return f"{said}; {free / 2**30:.2f} of {device}'s {total / 2**30:.2f} GiB are free{held}. "
