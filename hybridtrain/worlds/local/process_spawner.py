"""Starts worker processes from a thread that does nothing else.

Two facts make the thread necessary (both measured, Linux, torch 2.13):

- A forked child has only the calling thread. If that thread has used OpenMP, the child's first
  parallel region waits forever for threads that do not exist. A fresh thread has no OpenMP team.
- ``PR_SET_PDEATHSIG`` fires when the *thread* that forked ends, so it must live as long as its
  children.
"""

from __future__ import annotations

import multiprocessing
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any


class ProcessSpawner:
    """Starts processes from one thread, which lives until ``close``.

    Args:
        start_method: ``fork``, ``spawn`` or ``forkserver``.
    """

    def __init__(self, start_method: str) -> None:
        self._context: Any = multiprocessing.get_context(start_method)
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(
        self, target: Callable[..., None], arguments: Sequence[Sequence[Any]]
    ) -> list[BaseProcess]:
        """Start one process per row of arguments, the first a ``WorkerStart``; all, or raise."""
        processes: list[BaseProcess] = []
        done: Future[None] = Future()

        def order() -> None:
            try:
                for row in arguments:
                    name = f"hybridtrain-worker-{row[0].worker}"
                    process = self._context.Process(target=target, args=tuple(row), name=name)
                    _start(process)
                    processes.append(process)
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        self._begin()
        self._orders.put(order)
        try:
            done.result()
        except BaseException:
            for process in processes:
                process.kill()
                process.join()
            raise
        return processes

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._live, name="hybridtrain-spawner", daemon=True
            )
            self._thread.start()

    def _live(self) -> None:
        while (order := self._orders.get()) is not None:
            order()

    def close(self) -> None:
        """End the thread, after all processes have ended."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join()
            self._thread = None


def _start(process: BaseProcess) -> None:
    with warnings.catch_warnings():
        # Python 3.12+ warns about forking beside other threads; safe here (see the module).
        warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
        process.start()
