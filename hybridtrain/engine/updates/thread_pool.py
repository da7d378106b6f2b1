"""A thread pool that steps the chunks of an update.

Torch releases the GIL inside its kernels, so Python threads suffice. Torch's OpenMP threads are not
used: the pools of several processes on one core spin against each other. Each thread takes the next
task when it has finished its last, so a thread that wakes late or shares its core does less.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


class Pool:
    """Maps a function ``(lane, task)`` over tasks; no two calls run in one lane at a time.

    Args:
        size: number of threads, with the caller's.
    """

    def __init__(self, size: int) -> None:
        self.size = max(1, size)
        self._helpers: list[_Helper] = []
        weakref.finalize(self, _end, self._helpers)

    def map(self, function: Callable[[int, T], R], tasks: Sequence[T]) -> list[R]:
        """The results in the order of the tasks. A single task runs in this thread.

        Raises:
            BaseException: of the first task that fails, after all running tasks have ended.
        """
        helping = min(self.size, len(tasks)) - 1
        if helping <= 0:
            return [function(0, task) for task in tasks]
        while len(self._helpers) < helping:
            self._helpers.append(_Helper(len(self._helpers) + 1))
        job = _PoolJob(function, tasks)
        for helper in self._helpers[:helping]:
            helper.jobs.put(job)
        with torch.no_grad():
            job.work(0)
        return job.results()

    def close(self) -> None:
        """End the threads."""
        for thread in _end(self._helpers):
            thread.join()


def _end(helpers: list[_Helper]) -> list[threading.Thread]:
    """Let the threads end after the jobs they have."""
    for helper in helpers:
        helper.jobs.put(None)
    threads = [helper.thread for helper in helpers]
    helpers.clear()
    return threads


class _PoolJob:
    """One call of ``map``; each lane takes tasks until none is left."""

    def __init__(self, function: Callable[[int, Any], Any], tasks: Sequence[Any]) -> None:
        self._function, self._tasks = function, tasks
        self._results: list[Any] = [None] * len(tasks)
        self._errors: dict[int, BaseException] = {}
        self._taken, self._ended = count(), count(1)  # the interpreter's lock makes them atomic
        self._over = threading.Lock()
        self._over.acquire()

    def work(self, lane: int) -> None:
        function, tasks, results = self._function, self._tasks, self._results
        n_tasks = len(tasks)
        while (number := next(self._taken)) < n_tasks:
            try:
                if not self._errors:
                    results[number] = function(lane, tasks[number])
            except BaseException as error:
                self._errors[number] = error
            if next(self._ended) == n_tasks:
                self._over.release()

    def results(self) -> list[Any]:
        """Wait for the last task."""
        self._over.acquire()
        if self._errors:
            raise self._errors[min(self._errors)]
        return self._results


class _Helper:
    """A daemon thread that waits for jobs."""

    def __init__(self, lane: int) -> None:
        self.jobs: SimpleQueue[_PoolJob | None] = SimpleQueue()
        self._lane = lane
        name = f"hybridtrain-update_{lane}"
        self.thread = threading.Thread(target=self._live, name=name, daemon=True)
        self.thread.start()

    def _live(self) -> None:
        torch.set_num_threads(1)
        with torch.no_grad():
            while (job := self.jobs.get()) is not None:
                job.work(self._lane)
                del job  # its tasks may hold memory of a finished run
