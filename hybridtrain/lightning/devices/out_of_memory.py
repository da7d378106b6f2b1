"""What is said where a device's memory was not enough, in numbers that were measured."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hybridtrain.worker.device import KINDS

_ASKED = re.compile(r"Tried to allocate (([\d.]+) (bytes|[KMG]iB))")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Shortage:
    """A worker's device when it was full. In bytes.

    ``held``: by the worker's tensors; ``needed``: that and what it asked for, so that it cannot do
    with less; ``may_take``: its share; ``others``: what each other worker on the device has needed
    so far, 0 where it has not measured; ``None`` where nobody has.
    """

    held: int
    needed: int
    free: int
    total: int
    may_take: int | None
    others: dict[int, int] | None

    @property
    def room(self) -> int:
        """What it could have had."""
        there = self.held + self.free
        return there if self.may_take is None else min(there, self.may_take)

    @property
    def is_left_by_others(self) -> bool:
        """Whether the other workers' measured needs leave what it needs."""
        if self.others is None:
            return False
        others = self.others.values()
        return all(others) and self.needed + sum(others) <= self.total


def shortage(error: BaseException, strategy: Any) -> Shortage | None:
    """``None`` where nothing can be measured: no GPU, or one that has failed."""
    device, memory = strategy.root_device, strategy.device_memory
    if device.type not in KINDS:
        return None
    module, worker = torch.get_device_module(device), strategy.global_rank
    try:
        free, total = module.mem_get_info(device)
        held = module.memory_allocated(device)
    except (RuntimeError, AttributeError):  # a device that has failed tells nothing
        return None
    asked = _ASKED.search(str(error))
    more = round(float(asked[2]) * _UNITS[asked[3]]) if asked else 0
    share = memory.share(strategy.workers_per_device, worker)
    may_take = None if share is None else int(share * total)
    others = None if memory.needs is None else memory.needs.others(worker)
    return Shortage(held, held + more, free, total, may_take, others)


def out_of_memory(error: BaseException, strategy: Any, samples: float | None = None) -> str:
    """What was asked for, what there is, and what would take less.

    ``samples``: of the mini-batch, if that is known.
    """
    found = shortage(error, strategy)
    advice = ", ".join(_advice(found, strategy, samples))
    return f"{_numbers(error, found, strategy)}What takes less: {advice}."


def note_need(error: BaseException, strategy: Any) -> None:
    """Where training goes on: what the worker has lacked is its need, if others leave it that."""
    found, needs = shortage(error, strategy), strategy.device_memory.needs
    if found is not None and needs is not None and found.is_left_by_others:
        worker = strategy.global_rank
        needs.note(worker, found.needed, found.total)
        strategy.device_memory.hold(strategy.root_device, strategy.workers_per_device, worker)


def _advice(found: Shortage | None, strategy: Any, samples: float | None) -> Iterator[str]:
    fewer = _samples_that_fit(found, strategy, samples)
    where = "your DataLoader's batch_size, or batch_size_per_worker"
    yield f"smaller mini-batches ({where}{fewer})"
    if strategy.root_device.type not in KINDS:
        return
    workers, given = strategy.workers_per_device, strategy.device_memory.fraction
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
    if "bf16" not in str(getattr(strategy.precision_plugin, "precision", "")):
        yield "Trainer(precision='bf16-mixed')"


def _samples_that_fit(found: Shortage | None, strategy: Any, samples: float | None) -> str:
    """At most so many: with each sample goes an equal part of what is not parameters."""
    module = getattr(strategy, "lightning_module", None)
    if found is None or not samples or module is None:
        return ""
    parameters = sum(each.nbytes for each in module.parameters())
    if found.needed <= parameters:
        return ""
    fit = math.floor(samples * (found.room - parameters) / (found.needed - parameters))
    return f"; at most {fit} of {samples:g} samples fit" if 0 < fit < samples else ""


def _numbers(error: BaseException, found: Shortage | None, strategy: Any) -> str:
    if strategy.root_device.type not in KINDS:
        return ""
    asked = _ASKED.search(str(error))
    said = f"{asked[1]} were asked for" if asked else "Memory was asked for"
    if found is None:
        return f"{said}. "
    said += f"; {_size(found.free)} of {strategy.root_device}'s {_size(found.total)} are free"
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
