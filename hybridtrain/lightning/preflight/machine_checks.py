"""Check memory, devices, cores, descriptors and data against the machine, before a run.

An impossible run raises, a slow one warns. Nothing here initialises CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn.parameter import is_lazy

from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.checkpoint_writing import check_whole
from hybridtrain.lightning.preflight.spawn_checks import Load, check_sending, load_of
from hybridtrain.lightning.step.trained_parameters import sparse_tables
from hybridtrain.memory.limits import (
    Gpu,
    allow_descriptors,
    available_bytes,
    gpus,
    largest_device_bytes,
    open_descriptors,
    shared_memory_bytes,
)
from hybridtrain.worker.device import KINDS
from hybridtrain.worker.device.cuda import forbids_fork

if TYPE_CHECKING:
    from hybridtrain.lightning.strategy import HybridStrategy

MIB = 2**20
_PER_WORKER = 10  # descriptors in this process: 8 are used (channel, bells, sentinels)
_OTHERS = 64  # of arenas, records, loggers
_MUCH_BYTES = 256 * MIB  # copied to all workers together: worth a word
_SMALL_BATCH_BYTES = 4 * MIB


_UNEQUAL = 1.2  # times as much memory
_BF16_FROM = 8  # compute capability


def check_devices(strategy: HybridStrategy) -> None:
    """Warn of unequal devices and of old ones. Does not call CUDA."""
    found = chosen(strategy.parallel_devices or [])
    sizes = sorted(gpu.n_bytes for gpu in found if gpu.n_bytes)
    unequal = bool(sizes) and sizes[-1] > _UNEQUAL * sizes[0]
    if unequal and strategy.data_options["batch_size_per_worker"] is None:
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
    """The chosen GPUs; none if their numbers on the machine are not certain.

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


def check_startup(
    strategy: HybridStrategy, start_method: str, threads: int, cores: int, job: Any
) -> None:
    """Run all checks; raises UserError where the run is impossible."""
    module, n_workers = job.trainer.lightning_module, strategy.world_size
    on_device = strategy.root_device.type in KINDS
    if job.trainer.state.fn == "fit":
        copies = int(strategy.requirements.has_copies and not on_device)
        check_memory(module, n_workers, copies)
    if on_device:
        check_device_memory(module, strategy.workers_per_device)
        check_devices(strategy)
    else:
        check_threads(n_workers, threads, cores, strategy.threads_per_worker == "auto")
    check_descriptors(n_workers)
    check_spawning(strategy.start_method, start_method)
    named = job.named()
    check_whole(named.get("ckpt_path"))
    load = check_sending(start_method, job, named)
    check_load(load, n_workers, start_method, job.named())


# ---- memory --------------------------------------------------------------------------------------


def check_memory(module: torch.nn.Module, n_workers: int, copies: int) -> None:
    """Host memory: masters, and for each worker a row of gradients and ``copies``, 0 or 1.

    Tables with sparse gradients have no such row, only the rows that a mini-batch touches; but they
    take their size once more when the weights are sent back. See docs/memory.md.
    """
    n_bytes, available = _bytes_of(module), available_bytes()
    if available is None:
        return
    tables = _bytes_of(module, sparse_tables(module))
    needed = (n_bytes - tables) * (1 + n_workers * (1 + copies))
    needed += tables * (2 + n_workers * copies)
    if needed > available:
        raise UserError(
            f"{_size(needed)} of host memory are needed for the {_size(n_bytes)} of parameters, "
            f"with what {n_workers} workers compute, and {_size(available)} are available; use "
            "fewer workers, a smaller model, or a machine with more memory"
        )
    if needed + 2 * n_bytes > available:
        rank_zero_warn(
            f"parameters and {n_workers} workers take {_size(needed)} of {_size(available)} of "
            "host memory that are available, which leaves no room for the state of an optimizer "
            f"such as Adam ({_size(2 * n_bytes)})"
        )


def check_device_memory(module: torch.nn.Module, workers_per_device: int) -> None:
    """The largest GPU: each worker holds parameters and, for a moment, their gradients."""
    needed, largest = 2 * _bytes_of(module) * workers_per_device, largest_device_bytes()
    if largest is not None and needed > largest:
        raise UserError(
            f"{_size(needed)} are needed on each GPU for parameters and gradients of "
            f"workers_per_device={workers_per_device}, and the largest has {_size(largest)}; use "
            "fewer workers on a device, or a smaller model"
        )


def _bytes_of(module: torch.nn.Module, only: Collection[int] | None = None) -> int:
    """Bytes of existing parameters (``configure_model`` may make others)."""
    there = [p for p in module.parameters() if p.requires_grad and not is_lazy(p)]
    if only is not None:
        there = [p for p in there if id(p) in only]
    return sum(p.numel() * p.element_size() for p in there)


# ---- cores, descriptors, start method ------------------------------------------------------------


def check_threads(n_workers: int, threads: int, cores: int, chosen_here: bool) -> None:
    """Warn of more threads of CPU workers than cores."""
    total = n_workers * threads
    if total <= cores:
        return
    advice = f"{cores} worker{'s' * (cores > 1)} would do as much"
    if not chosen_here and n_workers <= cores:
        advice = f"give threads_per_worker={cores // n_workers}, or auto"
    rank_zero_warn(
        f"{n_workers} workers with {threads} thread{'s' * (threads > 1)} each share {cores} "
        f"core{'s' * (cores > 1)}, and wait for one another: {advice}"
    )


def check_descriptors(n_workers: int) -> None:
    """Raise the limit of descriptors as far as allowed; this process holds a few per worker."""
    wanted = open_descriptors() + _PER_WORKER * n_workers + _OTHERS
    enough, limit = allow_descriptors(wanted)
    if not enough:
        raise UserError(
            f"{n_workers} workers need about {wanted} file descriptors in this process, whose "
            f"limit is {limit}; say ulimit -n {wanted} before, as root or in limits.conf, or use "
            "fewer workers"
        )


def check_spawning(wanted: str, start_method: str) -> None:
    """Warn where ``auto`` spawns workers only because CUDA is initialised."""
    if wanted == "auto" and start_method != "fork" and forbids_fork():
        rank_zero_warn(
            "CUDA is initialised in this process, so workers are spawned: each imports the script "
            "anew and gets a copy of the data; to have them forked, let nothing touch CUDA before "
            "trainer.fit"
        )


# ---- data ----------------------------------------------------------------------------------------


def check_load(load: Load, n_workers: int, start_method: str, named: dict[str, Any]) -> None:
    """Check the size of what spawned workers are sent: tensors by /dev/shm, the rest as copies."""
    room = shared_memory_bytes()
    if room is not None and load.shared > room:
        raise UserError(
            f"workers are started by {start_method}, which puts {_size(load.shared)} of tensors "
            f"(of {_largest(named, 'shared')} above all) into /dev/shm, where {_size(room)} are "
            "left; make it larger (docker run --shm-size=...), or use start_method=fork"
        )
    total, available = load.own * n_workers, available_bytes()
    if total <= _MUCH_BYTES:
        return
    text = (
        f"workers are started by {start_method}, so each of {n_workers} gets its own copy of "
        f"{_size(load.own)} ({_largest(named, 'own')} above all), {_size(total)} together; keep "
        "them in tensors, which are shared, or in a file (numpy.memmap), or use start_method=fork"
    )
    if available is not None and total > available:
        raise UserError(f"{text}: {_size(available)} are available")
    rank_zero_warn(text)


def _largest(named: dict[str, Any], kind: str) -> str:
    """The name of the largest part."""
    parts = {name: part for name, part in named.items() if name != "trainer"}
    return max(parts, key=lambda name: getattr(load_of(parts[name]), kind), default="the job")


def check_loader(loader: Any, n_workers: int) -> None:
    """Warn if /dev/shm may be too small for the mini-batches of a DataLoader's processes.

    To be called in one worker, before the loader's processes start.
    """
    room = shared_memory_bytes()
    if not isinstance(loader, torch.utils.data.DataLoader) or not loader.num_workers:
        return  # num_workers of another class need not be processes
    if room is None:
        return
    n_processes = loader.num_workers
    on_their_way = n_workers * n_processes * ((loader.prefetch_factor or 2) + 1)
    each = room // on_their_way
    if each < (_batch_bytes(loader) or _SMALL_BATCH_BYTES):
        rank_zero_warn(
            f"up to {on_their_way} mini-batches are in /dev/shm at a time ({n_workers} workers, "
            f"num_workers={n_processes} each), which has {_size(room)} left: more than "
            f"{_size(each)} each would end the run by SIGBUS ('bus error'); make it larger "
            "(docker run --shm-size=2g), or use num_workers=0"
        )


def _batch_bytes(loader: Any) -> int | None:
    """Bytes of one mini-batch, if the data set shows them without a sample being drawn."""
    if not isinstance(loader.dataset, torch.utils.data.TensorDataset):
        return None
    of_sample = sum(t[:1].numel() * t.element_size() for t in loader.dataset.tensors)
    return int(of_sample * (loader.batch_size or 1))


def _size(n_bytes: int) -> str:
    return f"{n_bytes / MIB:,.0f} MiB" if n_bytes >= 10 * MIB else f"{n_bytes / MIB:,.1f} MiB"
