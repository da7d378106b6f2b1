"""How much of a device's memory one worker may take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hybridtrain.lightning.devices.device_needs import DeviceNeeds
from hybridtrain.worker.device import KINDS


@dataclass(slots=True)
class DeviceMemory:
    """``fraction``: of the device, for each worker; ``None``: as they need, where several have it.

    Those begin with equal shares. As soon as all of them have measured what they need, each may
    take that and an equal part of what is left.
    """

    fraction: float | None = None
    needs: DeviceNeeds | None = None  # of the run under way, where workers have devices
    _last: dict[str, Any] | None = None  # figures of the last run

    @contextmanager
    def measured(self, devices: Sequence[torch.device], n_workers: int) -> Iterator[None]:
        """In the calling process, while workers run: they tell one another what they need."""
        self._last = None
        if not devices or devices[0].type not in KINDS:
            yield
            return
        self.needs = needs = DeviceNeeds(n_workers, len(devices))
        try:
            yield
        finally:
            self._last, self.needs = needs.figures(), None
            needs.close()

    def figures(self) -> dict[str, Any]:
        """For ``run_stats()``: what each worker has needed, of how much."""
        return (self._last or {}) if self.needs is None else self.needs.figures()

    def share(self, workers_per_device: int, worker: int = 0) -> float | None:
        """What a worker is held to; ``None``: nothing is set."""
        if self.fraction is not None or workers_per_device == 1:
            return self.fraction
        measured = None if self.needs is None else self.needs.share(worker)
        return 1 / workers_per_device if measured is None else measured

    def hold(self, device: torch.device, workers_per_device: int, worker: int) -> None:
        """From now on this process gets no more of the device."""
        share = self.share(workers_per_device, worker)
        if device.type in KINDS and share is not None:
            torch.get_device_module(device).set_per_process_memory_fraction(share, device)

    def measure(self, device: torch.device, workers_per_device: int, worker: int) -> None:
        """Tell the others what this worker has needed so far, and let shares follow."""
        if self.needs is not None:
            module = torch.get_device_module(device)
            _, total = module.mem_get_info(device)
            self.needs.note(worker, module.max_memory_reserved(device), total)
            self.hold(device, workers_per_device, worker)
