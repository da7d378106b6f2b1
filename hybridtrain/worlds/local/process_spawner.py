"""Starts worker processes from a thread that does nothing else.

Two facts make the thread necessary (both measured, Linux, torch 2.13):

- A child made by ``fork`` has only the thread that called it. If that thread has ever used OpenMP,
  the child believes it still owns a team of threads, and its first parallel region waits for them
  for ever. A fresh thread has no team, so its children start clean.
- ``PR_SET_PDEATHSIG`` fires when the *thread* that forked ends, so the thread must live as long as
  its children.
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
    """Starts processes, and stays until they have ended.

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
        """Start one process per row of arguments, which begins with the worker's birth.

        All of them, or an exception and none.
        """
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
        """Let the thread go; the processes must have ended."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join()
            self._thread = None


def _start(process: BaseProcess) -> None:
    with warnings.catch_warnings():
        # Python 3.12+ warns of forking beside other threads; the module's docstring says why it
        # is right here.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
        process.start()
