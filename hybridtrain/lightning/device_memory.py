"""A worker's need of its device's memory, its share, and the advice where the device is full.

Each worker measures its need after its 1st, 2nd, 4th, ... mini-batch and at the end of each epoch:
the most that torch has reserved, cache included, the driver's part left out. All workers and the
calling process read these figures in shared memory.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hybridtrain.engine.worker.device import KINDS
from hybridtrain.util.anonymous_files import SharedBytes

_CELL = struct.Struct("qq")  # of each worker: its device's size, its need; 0: not measured yet
_ASKED = re.compile(r"Tried to allocate (([\d.]+) (bytes|[KMG]iB))")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class DeviceNeeds(SharedBytes):
    """Bytes that each worker has needed, in memory that all workers and the calling process share.

    Args:
        n_workers: W.
        n_devices: worker ``w`` computes on device ``w % n_devices``.
    """

    def __init__(self, n_workers: int, n_devices: int) -> None:
        self._n_workers, self._n_devices = n_workers, n_devices
        super().__init__(_CELL.size * n_workers)

    def note(self, worker: int, needed: int, total: int) -> None:
        """Record that the worker has needed ``needed`` of its device's ``total`` bytes."""
        place = _CELL.size * worker
        _CELL.pack_into(self.map, place, total, max(needed, self.of(worker)))

    def of(self, worker: int) -> int:
        """The worker's highest need so far, in bytes; 0: not measured yet."""
        return self._cell(worker)[1]

    def others(self, worker: int) -> dict[int, int]:
        """The other workers on the same device -> their needs as in ``of``."""
        first = worker % self._n_devices
        on_device = range(first, self._n_workers, self._n_devices)
        return {each: self.of(each) for each in on_device if each != worker}

    def share(self, worker: int) -> float | None:
        """Fraction of the device: the worker's need and an equal part of what no worker needs.

        ``None`` until all workers on the device have measured, or where their needs do not fit.
        """
        (total, own), others = self._cell(worker), self.others(worker).values()
        needed = own + sum(others)
        if not own or not all(others) or needed > total:
            return None
        return (own + (total - needed) / (1 + len(others))) / total

    def figures(self) -> dict[str, dict[str, list[int]]]:
        """For the run's summary; empty where no worker has measured."""
        total, needed = map(list, zip(*map(self._cell, range(self._n_workers)), strict=True))
        if not any(needed):
            return {}
        return {"device_memory": {"needed_bytes": needed, "total_bytes": total}}

    def _cell(self, worker: int) -> tuple[int, int]:
        total, needed = _CELL.unpack_from(self.map, _CELL.size * worker)
        return total, needed


@dataclass(slots=True)
class DeviceMemory:
    """Limits each worker to ``fraction`` of its device; ``None``: to its need, if workers share it.

    Workers on one device begin with equal shares. Once all have measured their needs, each may take
    its need and an equal part of the rest.
    """

    fraction: float | None = None
    needs: DeviceNeeds | None = None  # of the run under way, where workers have devices
    _last: dict[str, Any] | None = None  # figures of the last run

    @contextmanager
    def measured(self, devices: Sequence[torch.device], n_workers: int) -> Iterator[None]:
        """In the calling process: let workers share their measurements while they run."""
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
        """For ``run_stats()``: each worker's need and its device's size."""
        return (self._last or {}) if self.needs is None else self.needs.figures()

    def share(self, workers_per_device: int, worker: int = 0) -> float | None:
        """The fraction of its device that a worker may take; ``None``: no limit."""
        if self.fraction is not None or workers_per_device == 1:
            return self.fraction
        measured = None if self.needs is None else self.needs.share(worker)
        return 1 / workers_per_device if measured is None else measured

    def hold(self, device: torch.device, workers_per_device: int, worker: int) -> None:
        """Let torch refuse this process more than its share of the device."""
        share = self.share(workers_per_device, worker)
        if device.type in KINDS and share is not None:
            torch.get_device_module(device).set_per_process_memory_fraction(share, device)

    def measure(self, device: torch.device, workers_per_device: int, worker: int) -> None:
        """Publish this worker's need so far, and apply the share that follows."""
        if self.needs is not None:
            module = torch.get_device_module(device)
            _, total = module.mem_get_info(device)
            self.needs.note(worker, module.max_memory_reserved(device), total)
            self.hold(device, workers_per_device, worker)


@dataclass(frozen=True)
class DeviceUse:
    """One worker's use of its device.

    Args:
        memory: limits it.
        device: of the worker.
        workers_per_device: which share it.
        worker: its number on this host.
        precision: of the trainer.
        module: of the worker.
    """

    memory: DeviceMemory
    device: torch.device
    workers_per_device: int
    worker: int
    precision: str
    module: torch.nn.Module

    def hold(self) -> None:
        """Let torch refuse this process more than its share."""
        self.memory.hold(self.device, self.workers_per_device, self.worker)

    def measure(self) -> None:
        """Publish this worker's need so far, and apply the share that follows."""
        self.memory.measure(self.device, self.workers_per_device, self.worker)


# ---- where it is full ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Shortage:
    """A worker's device at an out-of-memory error. In bytes.

    ``held``: by the worker's tensors; ``needed``: ``held`` and the refused allocation;
    ``may_take``: the worker's share; ``others``: needs of the other workers on the device, 0: not
    measured yet, ``None``: needs are not measured.
    """

    held: int
    needed: int
    free: int
    total: int
    may_take: int | None
    others: dict[int, int] | None

    @property
    def room(self) -> int:
        """The most that the worker could have had."""
        most = self.held + self.free
        return most if self.may_take is None else min(most, self.may_take)

    @property
    def is_left_by_others(self) -> bool:
        """Whether the other workers' measured needs leave enough for this worker's."""
        if self.others is None:
            return False
        others = self.others.values()
        return all(others) and self.needed + sum(others) <= self.total


def shortage(error: BaseException, use: DeviceUse) -> Shortage | None:
    """Measure the device after ``error``; ``None``: no GPU, or one that has failed."""
    device, memory = use.device, use.memory
    if device.type not in KINDS:
        return None
    module, worker = torch.get_device_module(device), use.worker
    try:
        free, total = module.mem_get_info(device)
        held = module.memory_allocated(device)
    except (RuntimeError, AttributeError):  # a failed device gives no figures
        return None
    asked = _ASKED.search(str(error))
    more = round(float(asked[2]) * _UNITS[asked[3]]) if asked else 0
    share = memory.share(use.workers_per_device, worker)
    may_take = None if share is None else int(share * total)
    others = None if memory.needs is None else memory.needs.others(worker)
    return Shortage(held, held + more, free, total, may_take, others)


def out_of_memory(error: BaseException, use: DeviceUse, samples: float | None = None) -> str:
    """The text of an out-of-memory error: the refused allocation, what is free, and what to change.

    ``samples``: in the mini-batch, if known.
    """
    found = shortage(error, use)
    advice = ", ".join(_advice(found, use, samples))
    return f"{_numbers(error, found, use)}What takes less: {advice}."


def note_need(error: BaseException, use: DeviceUse) -> None:
    """Training continues: record the need at the error, if the other workers leave that much."""
    found, needs = shortage(error, use), use.memory.needs
    if found is not None and needs is not None and found.is_left_by_others:
        needs.note(use.worker, found.needed, found.total)
        use.hold()


def _advice(found: Shortage | None, use: DeviceUse, samples: float | None) -> Iterator[str]:
    fewer = _samples_that_fit(found, use, samples)
    where = "your DataLoader's batch_size, or batch_size_per_worker"
    yield f"smaller mini-batches ({where}{fewer})"
    if use.device.type not in KINDS:
        return
    workers, given = use.workers_per_device, use.memory.fraction
    if workers > 1:
        fit = 0 if found is None else found.total // max(1, found.needed)
        like = f"; at most {fit} with such needs fit" if 0 < fit < workers else ""
        yield f"fewer workers on a device (workers_per_device={workers} now{like})"
    if found is not None and found.may_take is not None and found.is_left_by_others:
        least = math.ceil(100 * found.needed / found.total) / 100
        unused = " (the others leave that unused)" if found.others else ""
        yield f"device_memory_fraction={least:g} or more{unused}"
    elif given is not None:
        yield f"a larger device_memory_fraction ({given:g} now)"
    if "bf16" not in use.precision:
        yield "Trainer(precision='bf16-mixed')"


def _samples_that_fit(found: Shortage | None, use: DeviceUse, samples: float | None) -> str:
    """How many samples fit, as if memory beside the parameters grew linearly with samples."""
    if found is None or not samples:
        return ""
    parameters = sum(each.nbytes for each in use.module.parameters())
    if found.needed <= parameters:
        return ""
    fit = math.floor(samples * (found.room - parameters) / (found.needed - parameters))
    return f"; at most {fit} of {samples:g} samples fit" if 0 < fit < samples else ""


def _numbers(error: BaseException, found: Shortage | None, use: DeviceUse) -> str:
    if use.device.type not in KINDS:
        return ""
    asked = _ASKED.search(str(error))
    said = f"{asked[1]} were asked for" if asked else "Memory was asked for"
    if found is None:
        return f"{said}. "
    said += f"; {_size(found.free)} of {use.device}'s {_size(found.total)} are free"
    if found.may_take is not None:
        said += f", of which this worker may take {_size(found.may_take)}"
    said += f". It held {_size(found.held)}, so it needs at least {_size(found.needed)}"
    others = (found.others or {}).items()
    if known := ", ".join(f"worker {each} {_size(n)}" for each, n in others if n):
        said += f"; what others there have needed so far: {known}"
    if unknown := ", ".join(f"worker {each}" for each, n in others if not n):
        said += f"; not measured yet: {unknown}"
    return f"{said}. "


def _size(n_bytes: int) -> str:
    unit = "GiB" if n_bytes >= 2**30 else "MiB"
    return f"{n_bytes / _UNITS[unit]:.2f} {unit}"
