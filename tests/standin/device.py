"""The stand-in's own module, ``torch.standin``: what ``torch.cuda`` is to CUDA.

Naming the device type costs nothing and starts nothing (:func:`name_it`). The first tensor on it
initialises it in that process: torch is told of its devices and kernels, and from then on a forked
child can do nothing with it, nor compute any gradient, as with CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.standin.lanes import Mark
from tests.standin.state import (
    N_DEVICES,
    NAME,
    SETTINGS,
    index_of,
    is_in_bad_fork,
    is_initialized,
    lanes,
    lazy_init,
    state,
    take_counts,
    wait_for,
)

_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1)


class Stream(torch.Stream):
    """As ``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, number: int | None = None) -> Stream:
        index = index_of(device)
        number = lanes().new(index) if number is None else number
        return super().__new__(cls, stream_id=number, device_index=index, device_type=_TYPE)

    def __init__(self, device: Any = None, number: int | None = None) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        lanes().wait(self.stream_id, event.mark)

    def wait_stream(self, other: Stream) -> None:
        lanes().wait(self.stream_id, lanes().record(other.stream_id))

    def synchronize(self) -> None:
        wait_for(self.stream_id)


class Event:
    """As ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.mark = Mark()

    def record(self, stream: Stream | None = None) -> None:
        self.mark = lanes().record((stream or current_stream()).stream_id)

    def query(self) -> bool:
        lanes().run_some()
        return self.mark.reached

    def synchronize(self) -> None:
        state().counts.synchronisations += 1
        lanes().synchronise(self.mark)


def current_stream(device: Any = None) -> Stream:
    index = index_of(device)
    return Stream(index, lanes().current(index))


@contextmanager
def stream(stream: Stream) -> Iterator[None]:
    with lanes().using(stream.stream_id):
        yield


def synchronize(device: Any = None) -> None:
    for number in lanes().of(index_of(device)):
        wait_for(number)


class Runtime:
    """As ``torch.cuda.cudart()``: what page-locks memory."""

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:
        locked = state().locked
        if state().failed:
            return 710  # cudaErrorAssert
        if address in locked:
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        if sum(locked.values()) + n_bytes > SETTINGS.lockable_bytes:
            return 2  # cudaErrorMemoryAllocation
        locked[address] = n_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if state().failed:
            return 710
        return 0 if state().locked.pop(address, None) is not None else 713


def get_rng_state(device: Any = None) -> torch.Tensor:
    return state().generators[index_of(device)].get_state()


def set_rng_state(new: torch.Tensor, device: Any = None) -> None:
    state().generators[index_of(device)].set_state(new)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(n) for n in range(N_DEVICES)]


def set_rng_state_all(new: list[torch.Tensor]) -> None:
    for number, each in enumerate(new):
        set_rng_state(each, number)


def manual_seed_all(seed: int) -> None:
    SETTINGS.random_seed = seed
    if is_initialized():
        for generator in state().generators:
            generator.manual_seed(seed)


def fail() -> None:
    """Whatever is asked of this process's devices from now on is an error, as after CUDA's own."""
    state().failed = True


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes that are free, as far as this process has used them, and all."""
    lanes()
    return SETTINGS.device_bytes - state().memory.n_bytes[index_of(device)], SETTINGS.device_bytes


def memory_allocated(device: Any = None) -> int:
    """Bytes of it that this process's tensors hold."""
    lanes()
    return state().memory.n_bytes[index_of(device)]


def max_memory_reserved(device: Any = None) -> int:
    """The most that they have held: nothing is kept besides."""
    return state().memory.most_bytes[index_of(device)]


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """What this process may have of it."""
    state().fractions[index_of(device)] = fraction


def empty_cache() -> None:
    """Nothing is kept from the system."""


@contextmanager
def device(where: Any) -> Iterator[None]:
    """Where tensors are made that name no device."""
    before = state().device
    set_device(where)
    try:
        yield
    finally:
        set_device(before)


def current_device() -> int:
    return state().device


def set_device(device: Any) -> None:
    state().device = index_of(device)


class _Module:
    """``torch.standin``."""

    Stream, Event = Stream, Event
    current_stream, stream = staticmethod(current_stream), staticmethod(stream)
    synchronize, take_counts = staticmethod(synchronize), staticmethod(take_counts)
    get_rng_state, set_rng_state = staticmethod(get_rng_state), staticmethod(set_rng_state)
    get_rng_state_all = staticmethod(get_rng_state_all)
    set_rng_state_all = staticmethod(set_rng_state_all)
    manual_seed_all = staticmethod(manual_seed_all)
    current_device, set_device = staticmethod(current_device), staticmethod(set_device)
    set_per_process_memory_fraction = staticmethod(set_per_process_memory_fraction)
    empty_cache, device = staticmethod(empty_cache), staticmethod(device)
    mem_get_info, fail = staticmethod(mem_get_info), staticmethod(fail)
    memory_allocated = staticmethod(memory_allocated)
    max_memory_reserved = staticmethod(max_memory_reserved)
    is_initialized, _lazy_init = staticmethod(is_initialized), staticmethod(lazy_init)
    _is_in_bad_fork, cudart = staticmethod(is_in_bad_fork), Runtime

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return N_DEVICES

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def name_it() -> None:
    """Make ``torch.device("standin:0")`` known in this process; once, and it stays so."""
    if not hasattr(torch, NAME):
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _Module)
        torch.serialization.register_package(5, _where, _bring)
        # These ask for an interface that only C++ can give, also in a process that computes on its
        # CPU alone (a barrier of torch.distributed, a DataLoader with pin_memory).
        torch._C._get_accelerator = lambda: torch.device("cpu")  # type: ignore[attr-defined]
        torch.accelerator.is_available = is_initialized


def _where(storage: Any) -> str | None:
    """What a file says of where it was."""
    return str(storage.device) if storage.device.type == NAME else None


def _bring(storage: Any, place: str) -> Any:
    """What was read from a file goes where it was, or where it is wanted."""
    if not place.startswith(NAME):
        return None
    content = torch.empty(0, dtype=torch.uint8).set_(storage)
    return content.to(place).untyped_storage()
