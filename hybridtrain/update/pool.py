"""The server's hands: threads that share the chunks of an update.

Torch releases the interpreter lock inside its kernels, so Python threads are enough. Torch's own
OpenMP threads are not used: the pools of several processes on one core spin against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


class Pool:
    """Maps a function ``(lane, task)`` over tasks; no two calls run in one lane at a time.

    Args:
        size: how many threads, the caller's own included.
    """

    def __init__(self, size: int) -> None:
        self.size = max(1, size)
        self._helpers: ThreadPoolExecutor | None = None

    def map(self, function: Callable[[int, T], R], tasks: Sequence[T]) -> list[R]:
        """The results in the order of the tasks. A single task never leaves this thread."""
        lanes = min(self.size, len(tasks))
        if lanes <= 1:
            return [function(0, task) for task in tasks]
        futures = [
            self._executor().submit(_run_lane, function, lane, tasks[lane::lanes])
            for lane in range(1, lanes)
        ]
        results: list[R | None] = [None] * len(tasks)
        results[0::lanes] = _run_lane(function, 0, tasks[0::lanes])
        for lane, future in enumerate(futures, start=1):
            results[lane::lanes] = future.result()
        return results  # type: ignore[return-value]

    def _executor(self) -> ThreadPoolExecutor:
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(
                self.size - 1,
                "hybridtrain-update",
                initializer=torch.set_num_threads,
                initargs=(1,),
            )
        return self._helpers

    def close(self) -> None:
        """End the threads."""
        if self._helpers is not None:
            self._helpers.shutdown()
            self._helpers = None


def _run_lane(function: Callable[[int, T], R], lane: int, tasks: Sequence[T]) -> list[R]:
    with torch.no_grad():
        return [function(lane, task) for task in tasks]
