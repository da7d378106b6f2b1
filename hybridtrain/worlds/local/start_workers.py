"""Starts, restarts and ends worker processes, from a thread that does nothing else.

Two facts make the thread necessary (both measured, Linux, torch 2.13):

- A forked child has only the calling thread. If that thread has used OpenMP, the child's first
  parallel region waits forever for threads that do not exist. A fresh thread has no OpenMP team.
- ``PR_SET_PDEATHSIG`` fires when the *thread* that forked ends, so it must live as long as its
  children.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from selectors import BaseSelector
from typing import Any

from hybridtrain.worlds.local.channel import Channel, channel_pair
from hybridtrain.worlds.local.worker_main import Body, SocketPair, WorkerStart, run_worker
from hybridtrain.worlds.local.worker_process import WorkerProcess


@dataclass
class WorkerStarter:
    """The processes of a run.

    Args:
        n_workers: W.
        start_method: ``fork``, ``spawn`` or ``forkserver``.
        threads: torch threads of each worker.
        places: the device of each worker, in words.
        meet: workers may make updates in shared memory, if the system has ``eventfd``.

    ``workers``: the latest process of each.
    """

    n_workers: int
    start_method: str
    threads: int
    places: Sequence[str] = ()
    meet: bool = False
    workers: list[WorkerProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._spawner = ProcessSpawner(self.start_method)
        self._bells: tuple[int, ...] = ()
        if self.meet and self.start_method == "fork" and hasattr(os, "eventfd"):
            flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
            self._bells = tuple(os.eventfd(0, flags) for _ in range(self.n_workers))

    def start(self, numbers: Sequence[int], body: Body, selector: BaseSelector) -> None:
        """Start a process for each of these workers; all, or none.

        Raises:
            OSError: if the system has not enough processes, memory or descriptors.
        """
        pairs: dict[int, SocketPair] = {}
        try:
            for number in numbers:
                pairs[number] = channel_pair()
            self._fork(numbers, body, pairs, selector)
        except BaseException:
            for ours, _ in pairs.values():
                ours.close()
            raise
        finally:
            for _, theirs in pairs.values():
                theirs.close()

    def _fork(
        self,
        numbers: Sequence[int],
        body: Body,
        pairs: dict[int, SocketPair],
        selector: BaseSelector,
    ) -> None:
        lines = [worker.channel.sock for worker in self.workers if worker.number not in pairs]
        bells = self._bells
        parent = None if self.start_method == "forkserver" else os.getpid()
        births = [WorkerStart(n, self.n_workers, self.threads, parent, bells) for n in numbers]
        forked = self.start_method == "fork"
        rows = [each.arguments(body, pairs, lines if forked else None) for each in births]
        processes = self._spawner.start(run_worker, rows)
        try:
            started = [
                WorkerProcess.of(n, Channel(pairs[n][0]), process, self._place(n))
                for n, process in zip(numbers, processes, strict=True)
            ]
        except BaseException:
            _kill(processes)
            raise
        for worker in started:
            self.workers[worker.number : worker.number + 1] = [worker]
            worker.attend(selector)

    def _place(self, number: int) -> str:
        return self.places[number] if self.places else ""

    def kill(self) -> None:
        """Kill all processes."""
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            if not worker.gone:
                worker.process.join()

    def close(self) -> None:
        """Free all resources, after the processes have ended."""
        for worker in self.workers:
            worker.close()
        for bell in self._bells:
            os.close(bell)
        self._bells = ()
        self._spawner.close()


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

        if self._thread is None:
            name = "hybridtrain-spawner"
            self._thread = threading.Thread(target=self._live, name=name, daemon=True)
            self._thread.start()
        self._orders.put(order)
        try:
            done.result()
        except BaseException:
            _kill(processes)
            raise
        return processes

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


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()
