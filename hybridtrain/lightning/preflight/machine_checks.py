"""Check memory, devices, cores, descriptors and data against the machine, before a run.

An impossible run raises, a slow one warns. Nothing here initialises CUDA.
"""

from __future__ import annotations

import ast
import functools
import os
import pickle
import sys
import traceback
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn.parameter import is_lazy

from hybridtrain.engine.exchanges import Requirements
from hybridtrain.engine.memory.limits import (
    Gpu,
    allow_descriptors,
    available_bytes,
    gpus,
    largest_device_bytes,
    named_gpus,
    open_descriptors,
    shared_memory_bytes,
)
from hybridtrain.engine.scheme import StartOptions
from hybridtrain.engine.step.trained_parameters import sparse_tables
from hybridtrain.engine.worker.device import KINDS
from hybridtrain.engine.worker.device.cuda import forbids_fork
from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.checkpoint_writing import check_whole
from hybridtrain.lightning.run_setup import RunSetup

# ---- check, before workers are spawned, that they can be sent what they need --------------------
# A forked worker inherits its parent's memory. A spawned one imports the script anew and gets the
# rest as pickles, so the script must not train while it is imported, and all parts must be
# picklable and importable.

# Attributes that only the parent needs, back references, and a module's own containers.
_NO_PARTS = frozenset({"_trainer", "_fabric", "trainer", "_parameters", "_buffers", "_modules"})


@dataclass(slots=True)
class Load:
    """Bytes sent to a spawned worker: its own copy, and tensors, which all workers share."""

    own: int = 0
    shared: int = 0


def check_sending(start_method: str, job: Any, named: dict[str, Any]) -> Load:
    """Check that ``job``, with the parts ``named``, can be sent to workers started this way.

    Returns its size; nothing is sent to a forked worker.

    Raises:
        UserError: naming the line that trains on import, or the attribute that cannot be sent.
    """
    if start_method == "fork":
        return Load()
    if (line := unguarded_line()) is not None:
        raise UserError(
            f"workers are started by {start_method}, which imports the script anew in each of "
            f"them, and {line} would train there again; put what follows the imports under "
            f"if __name__ == '__main__':, or {_way_out()}"
        )
    main = sys.modules.get("__main__")
    lost = () if _can_be_imported(main) else ("__main__",)
    load = Load()
    if _fails(job, lost, load) is None:
        return load
    for path, part in named.items():
        if (found := unsendable(part, path, lost)) is not None:
            raise UserError(
                f"workers are started by {start_method}, but {found[0]} is {found[1]}, which "
                "cannot be sent to them; define it at the top level of a module (a file), or "
                f"{_way_out()}"
            )
    raise UserError(
        f"workers are started by {start_method}, but what they need cannot be sent to them: "
        f"{_fails(job, lost)}; {_way_out()}"
    )


def _way_out() -> str:
    """How workers could be forked instead. Called only before an error: it may fork."""
    if forbids_fork():
        return "let nothing touch CUDA before trainer.fit, so that workers can be forked"
    return "use start_method=fork"


# ---- the script ---------------------------------------------------------------------------------


def unguarded_line() -> str | None:
    """The line, as FILE:LINE, where the script trains outside ``if __name__ == "__main__"``."""
    frames = (each for each, _ in traceback.walk_stack(sys._getframe()))
    ours = (f for f in frames if f.f_code.co_name == "<module>")
    frame = next((f for f in ours if f.f_globals.get("__name__") == "__main__"), None)
    main = sys.modules.get("__main__")
    if frame is None or not _is_imported_anew(main):
        return None
    path = Path(frame.f_code.co_filename)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    line = frame.f_lineno
    guarded = any(
        isinstance(node, ast.If)
        and "__name__" in ast.dump(node.test)
        and node.lineno <= line <= (node.end_lineno or line)
        for node in tree.body
    )
    return None if guarded else f"{path.name}:{line}"


def _is_imported_anew(main: Any) -> bool:
    """Whether ``multiprocessing`` runs the main module again in a spawned process."""
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return not str(spec.name).endswith("__main__")
    return _can_be_imported(main) and Path(main.__file__).stem != "ipython"


def _can_be_imported(main: Any) -> bool:
    """Not so in a notebook, an interactive session, with ``-c`` or from a pipe."""
    file = getattr(main, "__file__", None)
    return file is not None and Path(file).is_file()


# ---- parts that cannot be pickled ---------------------------------------------------------------


class _Nowhere:
    """A file that only counts bytes."""

    def __init__(self, load: Load) -> None:
        self._load = load

    def write(self, part: Any) -> int:
        n_bytes = memoryview(part).nbytes
        self._load.own += n_bytes
        return n_bytes


class _Probe(ForkingPickler):
    """Pickles to nowhere; skips tensors, and objects that are sent only while a process starts."""

    def __init__(self, lost: tuple[str, ...], load: Load) -> None:
        super().__init__(_Nowhere(load))
        self._lost, self._load = lost, load
        self._counted: set[int] = set()  # addresses of storages, which tensors may share

    def persistent_id(self, obj: Any) -> str | None:
        if isinstance(obj, torch.Tensor):
            if obj.requires_grad and not obj.is_leaf:
                raise pickle.PicklingError("a tensor with a history cannot be sent: detach it")
            self._count(obj)
            return "tensor"
        known = isinstance(obj, torch.storage.TypedStorage | torch.UntypedStorage)
        return "other" if known or type(obj).__module__.startswith("multiprocessing.") else None

    def _count(self, tensor: torch.Tensor) -> None:
        """Count a storage that torch puts into shared memory, once for all workers."""
        plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
        if plain and not tensor.is_shared():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._counted:
                self._counted.add(storage.data_ptr())
                self._load.shared += storage.nbytes()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType) and obj.__module__ in self._lost:
            raise pickle.PicklingError("what an interactive session has defined cannot be imported")
        return NotImplemented


def load_of(obj: Any) -> Load:
    """The size of an object sent to a spawned worker."""
    load = Load()
    _fails(obj, (), load)
    return load


def _fails(obj: Any, lost: tuple[str, ...], load: Load | None = None) -> str | None:
    """The reason why it cannot be sent; ``None``: it can."""
    try:
        _Probe(lost, load or Load()).dump(obj)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def unsendable(
    obj: Any, path: str, lost: tuple[str, ...] = (), seen: set[int] | None = None
) -> tuple[str, str] | None:
    """The innermost attribute that cannot be pickled, and its description; ``None`` if all can.

    Args:
        obj: to be searched.
        path: its name.
        lost: modules that a worker cannot import.
        seen: addresses of what has been searched.
    """
    seen = set() if seen is None else seen
    if id(obj) in seen or (reason := _fails(obj, lost)) is None:
        return None
    seen.add(id(obj))
    if not isinstance(obj, type | types.FunctionType):
        for name, part in _parts(obj):
            if (found := unsendable(part, f"{path}{name}", lost, seen)) is not None:
                return found
    return path, _describe(obj, reason)


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object, with the text to be added to its name."""
    match obj:
        case dict():
            yield from ((f"[{key!r}]", value) for key, value in obj.items())
        case list() | tuple() | set() | frozenset():
            yield from ((f"[{index}]", value) for index, value in enumerate(obj))
        case types.MethodType():
            yield "", obj.__self__
        case functools.partial():
            yield from ((".func", obj.func), (".args", obj.args), (".keywords", obj.keywords))
        case _:
            own = dict(getattr(obj, "__dict__", {}))
            if isinstance(obj, torch.nn.Module):  # it shows them as its own
                own = own["_parameters"] | own["_buffers"] | own["_modules"] | own
            yield from ((f".{k}", value) for k, value in own.items() if k not in _NO_PARTS)


def _describe(obj: Any, reason: str) -> str:
    if isinstance(obj, types.FunctionType):
        if obj.__name__ == "<lambda>":
            return "a lambda"
        return f"the function {obj.__qualname__}, {_where(obj)}"
    if isinstance(obj, type):
        return f"the class {obj.__qualname__}, {_where(obj)}"
    kind = type(obj)
    if "<locals>" in kind.__qualname__ or kind.__module__ == "__main__":
        return f"an object of the class {kind.__qualname__}, {_where(kind)}"
    return f"an object of the type {kind.__module__}.{kind.__qualname__} ({reason})"


def _where(obj: type | Callable[..., Any]) -> str:
    if "<locals>" in obj.__qualname__:
        return "which is defined inside a function"
    return "which is defined in an interactive session or under a name that leads elsewhere"


MIB = 2**20
_PER_WORKER = 10  # descriptors in this process: 8 are used (channel, bells, sentinels)
_OTHERS = 64  # of arenas, records, loggers
_MUCH_BYTES = 256 * MIB  # copied to all workers together: worth a word
_SMALL_BATCH_BYTES = 4 * MIB


_UNEQUAL = 1.2  # times as much memory
_BF16_FROM = 8  # compute capability


def check_devices(setup: RunSetup) -> None:
    """Warn of unequal devices and of old ones. Does not call CUDA."""
    found = chosen(list(setup.devices))
    sizes = sorted(gpu.n_bytes for gpu in found if gpu.n_bytes)
    unequal = bool(sizes) and sizes[-1] > _UNEQUAL * sizes[0]
    if unequal and setup.options["batch_size_per_worker"] is None:
        each = ", ".join(f"{size / 2**30:.0f}" for size in sizes)
        rank_zero_warn(
            f"the devices are not alike (they have {each} GiB), and all get mini-batches of the "
            "same size, which the smallest must hold and the slowest decides the time of; give "
            "each its own with batch_size_per_worker=[...], or use strategy=async"
        )
    old = [gpu for gpu in found if 0 < gpu.major < _BF16_FROM]
    precision = setup.precision
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
    named, usual = named_gpus(), [str(number) for number in range(len(there))]
    names = usual if named is None else named
    if not all(name.isdecimal() and int(name) < len(there) for name in names):
        return []
    by_place = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not by_place and len(set(there)) > 1 and len(wanted) < len(there):
        return []
    return [there[int(names[number])] for number in wanted if number < len(names)]


def check_startup(setup: RunSetup, start: StartOptions, cores: int, job: Any) -> None:
    """Run all checks; raises UserError where the run is impossible."""
    scheme, start_method = setup.scheme, start.method
    module, here = job.trainer.lightning_module, setup.n_here
    known = here if setup.place.host else setup.n_workers  # host 0 has the rows of all
    on_device = any(device.type in KINDS for device in setup.devices)
    if job.trainer.state.fn == "fit":
        check_memory(module, known, scheme.requirements, on_device, setup.stages)
    if on_device:
        check_device_memory(module, setup.workers_per_device, setup.stages)
        check_devices(setup)
    else:
        check_threads(here, start.threads, cores, scheme.threads_per_worker == "auto")
    check_descriptors(known)
    check_spawning(scheme.start_method, start_method)
    named = job.named()
    check_whole(named.get("ckpt_path"))
    load = check_sending(start_method, job, named)
    check_load(load, here, start_method, named)


# ---- memory --------------------------------------------------------------------------------------


def check_memory(
    module: torch.nn.Module,
    n_workers: int,
    wants: Requirements,
    on_device: bool,
    stages: bool = False,
) -> None:
    """Host memory: masters, copies of them, and each worker's rows of gradients.

    ``stages``: with a delay, the copies are on devices.

    Tables with sparse gradients have no such row, only the rows that a mini-batch touches; but they
    take their size once more when the weights are sent back. See docs/memory.md.
    """
    n_bytes, available = _bytes_of(module), available_bytes()
    if available is None:
        return
    tables, rows = _bytes_of(module, sparse_tables(module)), n_workers * wants.n_rows
    here = not stages if wants.delay else not on_device
    copies = wants.n_copies(n_workers) if here else 0
    needed = (n_bytes - tables) * (1 + rows + copies) + tables * (2 + copies)
    if needed > available:
        both, less = "", "fewer workers"
        if wants.delay:  # without it: one row of each worker, and no copies
            more = _size((n_bytes - tables) * n_workers + n_bytes * copies)
            also = ", and two copies of the parameters" if copies else ""
            both = f", twice{also} ({more} more than hybrid)"
            less = "policy=hybrid, fewer workers"
        raise UserError(
            f"{_size(needed)} of host memory are needed for the {_size(n_bytes)} of parameters, "
            f"with what {n_workers} workers compute{both}, and {_size(available)} are available; "
            f"use {less}, a smaller model, or a machine with more memory"
        )
    if needed + 2 * n_bytes > available:
        rank_zero_warn(
            f"parameters and {n_workers} workers take {_size(needed)} of {_size(available)} of "
            "host memory that are available, which leaves no room for the state of an optimizer "
            f"such as Adam ({_size(2 * n_bytes)})"
        )


def check_device_memory(
    module: torch.nn.Module, workers_per_device: int, behind: bool = False
) -> None:
    """The largest GPU: each worker holds parameters and, for a moment, their gradients.

    ``behind``: and the parameters of the next step, which come while the device computes.
    """
    needed = (3 if behind else 2) * _bytes_of(module) * workers_per_device
    largest = largest_device_bytes()
    if largest is not None and needed > largest:
        also, less = (", next parameters", "policy=hybrid, ") if behind else ("", "")
        raise UserError(
            f"{_size(needed)} are needed on each GPU for parameters{also} and gradients of "
            f"workers_per_device={workers_per_device}, and the largest has {_size(largest)}; use "
            f"{less}fewer workers on a device, or a smaller model"
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
        f"core{'s' * (cores > 1)}, so they wait for cores: {advice}"
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
