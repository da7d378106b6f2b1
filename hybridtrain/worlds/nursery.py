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
from multiprocessing.process import BaseProcess
from typing import Any


class Nursery:
    """Starts processes, and stays until they have ended.

    Args:
        start_method: ``fork``, ``spawn`` or ``forkserver``.
    """

    def __init__(self, start_method: str) -> None:
        self._context: Any = multiprocessing.get_context(start_method)
        self._leave = threading.Event()
        self._thread: threading.Thread | None = None

    def start(
        self, target: Callable[..., None], arguments: Sequence[Sequence[Any]]
    ) -> list[BaseProcess]:
        """Start one process per row of arguments; all of them, or an exception and none."""
        processes: list[BaseProcess] = []
        errors: list[BaseException] = []
        started = threading.Event()

        def run() -> None:
            try:
                for number, row in enumerate(arguments):
                    process = self._context.Process(
                        target=target, args=tuple(row), name=f"hybridtrain-worker-{number}"
                    )
                    _start(process)
                    processes.append(process)
            except BaseException as error:
                errors.append(error)
            started.set()
            self._leave.wait()

        self._thread = threading.Thread(target=run, name="hybridtrain-nursery", daemon=True)
        self._thread.start()
        started.wait()
        if errors:
            for process in processes:
                process.kill()
                process.join()
            self.close()
            raise errors[0]
        return processes

    def close(self) -> None:
        """Let the thread go; the processes must have ended."""
        self._leave.set()
        if self._thread is not None:
            self._thread.join()


def _start(process: BaseProcess) -> None:
    with warnings.catch_warnings():
        # Python 3.12+ warns of forking beside other threads; the module's docstring says why it
        # is right here.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
        process.start()
