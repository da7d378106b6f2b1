"""What the stand-in knows in a process that has initialised it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from tests.standin.lanes import Lanes, Mark
from tests.standin.memory import Allocator, Block

NAME = "standin"
N_DEVICES = 2


@dataclass
class Counts:
    """What has been done since they were last taken.

    ``blocking``: copies that the host had to wait for. ``synchronisations``: how often the host
    waited at all, those included. ``launches``: of kernels, on all streams.
    """

    bytes_to_device: int = 0
    copies_to_device: int = 0
    bytes_to_host: int = 0
    copies_to_host: int = 0
    blocking: int = 0
    synchronisations: int = 0
    launches: int = 0

    def crossed(self, n_bytes: int, out: bool) -> None:
        """A copy to the host (``out``) or to the device."""
        if out:
            self.bytes_to_host, self.copies_to_host = (
                self.bytes_to_host + n_bytes,
                self.copies_to_host + 1,
            )
        else:
            self.bytes_to_device += n_bytes
            self.copies_to_device += 1


class State:
    """Of an initialised process."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.lanes = Lanes(N_DEVICES, SETTINGS.seed, SETTINGS.eagerness)
        self.memory = Allocator(self._release, self.limit)
        self.failed = False  # and it stays so, as after CUDA's "device-side assert"
        self.counts = Counts()
        self.locked: dict[int, int] = {}  # page-locked host memory: address -> bytes
        self.device = 0
        self.fractions: dict[int, float] = {}  # of a device's memory, that this process may have
        self.generators = [
            torch.Generator().manual_seed(SETTINGS.random_seed) for _ in range(N_DEVICES)
        ]
        self._freed: list[tuple[Block, list[Mark]]] = []

    def limit(self, device: int) -> int:
        """Bytes of a device that this process may have."""
        return int(SETTINGS.device_bytes * self.fractions.get(device, 1.0))

    def _release(self, block: Block) -> None:
        """Given out again on its own stream: at once, or when what was recorded has been done."""
        others = block.recorded - {block.stream}
        if others:
            self._freed.append((block, [self.lanes.record(stream) for stream in others]))
        else:
            self._recycle(block, [])

    def _recycle(self, block: Block, marks: list[Mark]) -> None:
        self.lanes.learn(block.stream, marks)
        self.lanes.later(block.stream, block.spoil)
        self.memory.recycle(block)

    def look_at_freed(self) -> None:
        """Whether some memory can be given out by now."""
        self.memory.collect()
        freed, self._freed = self._freed, []
        for block, marks in freed:
            if all(mark.reached for mark in marks):
                self._recycle(block, marks)
            else:
                self._freed.append((block, marks))

    def is_locked(self, tensor: torch.Tensor) -> bool:
        """Whether all of a host tensor lies in page-locked memory."""
        begin = tensor.data_ptr()
        return any(
            first <= begin and begin + tensor.nbytes <= first + n
            for first, n in self.locked.items()
        )


@dataclass
class Settings:
    """Of processes to come: they inherit it.

    ``lockable_bytes``: how much host memory can be page-locked. ``device_bytes``: how much memory a
    device has. ``random_seed``: of the devices' generators, as somebody may have said before they
    are there.
    """

    seed: int = 0
    eagerness: float = 0.3
    lockable_bytes: float = float("inf")
    device_bytes: int = 2**36
    random_seed: int = 0


SETTINGS = Settings()
_state: State | None = None


def state() -> State:
    """Of this process, initialised if it is not."""
    lazy_init()
    assert _state is not None
    return _state


def lanes() -> Lanes:
    """Of this process; what was freed until now is free.

    Raises:
        RuntimeError: if its device has failed.
    """
    if state().failed:
        raise RuntimeError("stand-in error: device-side assert triggered")
    state().look_at_freed()
    return state().lanes


def lazy_init() -> None:
    """Raises RuntimeError in a child of a process that had it initialised, and beside a GPU.

    The GPU's threads of Autograd would be counted among the stand-in's, and torch wait for ever.
    """
    global _state
    if is_in_bad_fork():
        raise RuntimeError(
            "Cannot re-initialize the stand-in in forked subprocess. To use it with "
            "multiprocessing, you must use the 'spawn' start method"
        )
    if _state is None:
        if torch.cuda.device_count():
            raise RuntimeError("hide the GPUs from the stand-in: CUDA_VISIBLE_DEVICES=''")
        from tests.standin.registering import register

        _state = State()
        register()


def is_in_bad_fork() -> bool:
    return _state is not None and _state.process != os.getpid()


def is_initialized() -> bool:
    return _state is not None and not is_in_bad_fork()


def wait_for(number: int) -> None:
    """The host waits for all that a stream was given."""
    state().counts.synchronisations += 1
    lanes().synchronise(lanes().record(number))


def take_counts() -> Counts:
    """Since the last time."""
    found, state().counts = state().counts, Counts()
    return found


def index_of(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return (state().device if _state is not None else 0) if index is None else index
