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
import selectors
import signal
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from selectors import BaseSelector
from typing import Any, NamedTuple

from hybridtrain.engine.monitoring.hang_detector import Doing, Heartbeat, heartbeat_file
from hybridtrain.engine.protocol.messages import (
    Answer,
    Average,
    Begin,
    Gather,
    Install,
    Push,
    Reply,
    Request,
    Share,
    Stop,
)
from hybridtrain.engine.worlds.channel import Channel, ChannelClosed, channel_pair
from hybridtrain.engine.worlds.worker_main import (
    Body,
    SocketPair,
    WorkerStart,
    blas_libraries,
    run_worker,
)


class RestartPoint(NamedTuple):
    """The progress of another worker, after update ``version``, for one that is restarted."""

    progress: bytes
    version: int


Bodies = Callable[[RestartPoint | None], Body]

# ---- the parent's handle on a worker process ----------------------------------------------------


@dataclass
class WorkerHandle(ABC):
    """The server's side of a worker's process, on this host or another.

    ``number``: of the worker; ``location``: its device or host, in words; ``gone``: the process
    has ended; ``loss_known``: to the server (the process may still run); ``cause``: why the parent
    has killed it; ``request``: its unanswered message; ``heard``: number of its messages;
    ``counts``: its death is not part of another's.
    """

    number: int
    location: str = field(default="", kw_only=True)
    result: Any = field(default=None, kw_only=True)
    gone: bool = field(default=False, kw_only=True)
    loss_known: bool = field(default=False, kw_only=True)
    cause: str = field(default="", kw_only=True)
    request: Request | None = field(default=None, kw_only=True)
    heard: int = field(default=0, kw_only=True)
    counts: bool = field(default=True, kw_only=True)

    def hear(self) -> None:
        """The worker has sent a message."""
        self.heard += 1

    def ask(self, request: Request | None) -> None:
        """The worker waits for the answer to this."""
        self.request = request

    def finish(self, result: Any) -> None:
        """The worker has ended with this result."""
        self.request, self.result = None, result

    def mark_lost(self) -> None:
        """The server knows of the loss."""
        self.loss_known = True

    @property
    def asked(self) -> str:
        """The answer that the worker waits for, in words; empty if none."""
        match self.request:
            case None:
                return ""
            case Gather(tag):
                return f"all in '{tag}'"
            case Share() | Install():
                return "all to begin"
            case Push():
                return "its release"
            case Begin():
                return "its turn"
            case Average():
                return "the mean of all gradients"
        return "an answer"

    def answer(self, reply: Reply) -> None:
        """Note that the worker waits no longer, if this is what it waits for."""
        if isinstance(reply, Answer) or (isinstance(reply, Stop) and reply.now):
            self.request = None  # other replies leave it waiting

    @abstractmethod
    def send(self, reply: Reply, fd: int | None = None) -> None:
        """Send without blocking; ``fd``: a descriptor to send beside it."""

    @abstractmethod
    def messages(self) -> Iterator[Any]:
        """The messages that have arrived; never blocks."""

    @abstractmethod
    def kill(self, cause: str = "") -> None:
        """Kill the process; ``cause``: for the message about its end."""

    @abstractmethod
    def mark_ended(self) -> None:
        """Note that the process has ended."""

    @abstractmethod
    def describe_exit(self) -> str:
        """How the process ended, if it sent no report."""

    @abstractmethod
    def metrics_note(self) -> str:
        """The loss that other workers cannot make good, in words."""


@dataclass
class WorkerProcess(WorkerHandle):
    """A process on this host; a restarted worker has a new one.

    ``sentinel``: readable once the process has ended.
    """

    channel: Channel
    process: BaseProcess
    sentinel: int
    heartbeat: Heartbeat
    closed: bool = False
    _selector: selectors.BaseSelector | None = None
    _room: int | None = None  # a descriptor to watch for writability

    @classmethod
    def of(cls, number: int, channel: Channel, process: BaseProcess, device: str) -> WorkerProcess:
        """Wrap a process just started; ``device``: in words.

        Raises:
            OSError: if there are no descriptors left.
        """
        heartbeat = heartbeat_file()
        with suppress(OSError):  # it has ended already, which the sentinel reports
            channel.give_bells(heartbeat)
        beats = Heartbeat(heartbeat)
        return cls(number, channel, process, _sentinel(process), beats, location=device)

    # ---- messages -------------------------------------------------------------------------------

    def attend(self, selector: selectors.BaseSelector) -> None:
        """Register with the selector: for messages, the end, and room for queued messages."""
        self._selector = selector
        selector.register(self.channel, selectors.EVENT_READ, ("message", self))
        selector.register(self.sentinel, selectors.EVENT_READ, ("exit", self))

    def send(self, reply: Reply, fd: int | None = None) -> None:
        """Send without blocking; ``make_room`` sends the rest later."""
        self.answer(reply)
        with suppress(ChannelClosed):  # which the sentinel reports
            if not self.channel.post(reply, fd) and self._room is None and self._selector:
                # A copy: the original may be watched for messages.
                self._room = os.dup(self.channel.sock.fileno())
                self._selector.register(self._room, selectors.EVENT_WRITE, ("room", self))

    def messages(self) -> Iterator[Any]:
        """The messages that have arrived; behind the last one the sentinel reports the end."""
        if self._selector is None or self.channel not in self._selector.get_map():
            return  # it has been closed since the selector returned
        try:
            yield from self.channel.messages()
        except ChannelClosed:
            self._selector.unregister(self.channel)

    def make_room(self) -> None:
        """The socket is writable: send queued messages."""
        try:
            done = self.channel.flush()
        except ChannelClosed:
            done = True
        if done:
            self.ignore_room()

    def ignore_room(self) -> None:
        """Stop watching for room."""
        if self._room is not None and self._selector is not None:
            self._selector.unregister(self._room)
            os.close(self._room)
            self._room = None

    # ---- for the watchdog -----------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The process number."""
        return self.process.pid or 0

    # ---- the end --------------------------------------------------------------------------------

    def kill(self, cause: str = "") -> None:
        """Kill the process; ``cause``: for the message about its end."""
        self.cause = self.cause or cause
        if not self.gone:
            _kill_one(self.process, self.sentinel)

    def mark_ended(self) -> None:
        """Reap the process, which has ended."""
        if self._selector is not None:
            if self.channel in self._selector.get_map():  # its children may hold the socket open
                self._selector.unregister(self.channel)
            self._selector.unregister(self.sentinel)
        _reap(self.process)
        self.gone = True
        self.request = None
        self.ignore_room()

    def close(self) -> None:
        """Close all descriptors; may be called twice."""
        if self.closed:
            return
        self.closed = True
        self.ignore_room()
        self.heartbeat.close()
        if self.sentinel != self.process.sentinel:
            os.close(self.sentinel)
        self.channel.close()
        self.process.close()

    def describe_exit(self) -> str:
        """How the process ended, if it sent no report."""
        who = f"worker {self.number} (process {self.process.pid})"
        if self.cause:
            return f"{who} {self.cause}"
        if (code := self.process.exitcode) == _UNKNOWN:
            return (
                f"{who} ended, {self.where()}; how it ended is not known, because this program "
                "ignores SIGCHLD or reaps children itself"
            )
        if code is None or code >= 0:
            return f"{who} exited with code {code}, {self.where()}"
        hint = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
        return f"{who} was killed by {signal.Signals(-code).name}, {self.where()}{hint}"

    def metrics_note(self) -> str:
        """The loss that other workers cannot make good, in words."""
        if self.heartbeat.doing != Doing.EVALUATION:
            return ""
        return ", and its samples are missing from the metrics of this evaluation"

    def where(self) -> str:
        """Its last activity, and its device."""
        where = self.heartbeat.where
        return f"{where}, on {self.location}" if self.location else where


def _sentinel(process: BaseProcess) -> int:
    """A descriptor that is readable when the process ends.

    ``process.sentinel`` is a pipe, which the process' children (data loaders) keep open.
    """
    try:
        return os.pidfd_open(process.pid or 0)
    except (AttributeError, OSError):  # not Linux, an old one, or ended already
        return process.sentinel


_UNKNOWN = 1 << 8  # in place of an exit code, which is smaller


def _reap(process: BaseProcess) -> None:
    """Wait for the end of a process, also if its exit status is taken by somebody else.

    That is so if the program ignores SIGCHLD, or has a handler or a thread that calls
    ``os.waitpid(-1)``; ``multiprocessing`` would take the process for a running one for ever.
    """
    process.join()
    if process.exitcode is None:
        process._popen.returncode = _UNKNOWN  # type: ignore[attr-defined]
        process.join()


def _kill_one(process: BaseProcess, sentinel: int) -> None:
    """Kill a worker, never another process that has its number since."""
    if sentinel == process.sentinel:
        process.kill()
        return
    with suppress(ProcessLookupError):  # it has ended
        signal.pidfd_send_signal(sentinel, signal.SIGKILL)


@dataclass
class WorkerStarter:
    """The processes of a run.

    Args:
        n_workers: W, on all hosts.
        start_method: ``fork``, ``spawn`` or ``forkserver``.
        threads: torch threads of each worker.
        bodies: make the workers' function.
        device_names: of each worker of this host, in words.
        worker_updates: workers may make updates in shared memory, if there is ``eventfd``.
        first: number of this host's first worker.
        apart: there are workers on other hosts.

    ``workers``: the latest process of each worker of this host.
    """

    n_workers: int
    start_method: str
    threads: int
    bodies: Bodies
    device_names: Sequence[str] = ()
    worker_updates: bool = False
    first: int = 0
    apart: bool = False
    workers: list[WorkerProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._spawner = ProcessSpawner(self.start_method)
        self._bells: tuple[int, ...] = ()
        if self.worker_updates and self.start_method == "fork" and hasattr(os, "eventfd"):
            flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
            self._bells = tuple(os.eventfd(0, flags) for _ in range(self.n_workers))

    def start(
        self, numbers: Sequence[int], selector: BaseSelector, restart: RestartPoint | None = None
    ) -> None:
        """Start a process for each of these workers; all, or none.

        ``restart``: for restarted ones.

        Raises:
            OSError: if the system has not enough processes, memory or descriptors.
        """
        for worker in self.workers:
            if worker.number in numbers:
                worker.close()
        pairs: dict[int, SocketPair] = {}
        try:
            for number in numbers:
                pairs[number] = channel_pair()
            self._fork(numbers, self.bodies(restart), pairs, selector)
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
        parent = None if self.start_method == "forkserver" else os.getpid()
        forked = self.start_method == "fork"
        inherits = (blas_libraries(), {}) if forked else (None, dict(os.environ))
        births = [
            WorkerStart(n, self.n_workers, self.threads, parent, self._bells, self.apart, *inherits)
            for n in numbers
        ]
        rows = [each.arguments(body, pairs, lines if forked else None) for each in births]
        processes = self._spawner.start(run_worker, rows)
        try:
            started = [
                WorkerProcess.of(n, Channel(pairs[n][0]), process, self._device_name(n))
                for n, process in zip(numbers, processes, strict=True)
            ]
        except BaseException:
            _kill(processes)
            raise
        kept = [worker for worker in self.workers if worker.number not in numbers]
        self.workers[:] = sorted([*kept, *started], key=lambda worker: worker.number)
        for worker in started:
            worker.attend(selector)

    def _device_name(self, number: int) -> str:
        return self.device_names[number - self.first] if self.device_names else ""

    def kill(self) -> None:
        """Kill all processes."""
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            if not worker.gone:
                _reap(worker.process)

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
        chosen: str | None = multiprocessing.get_start_method(allow_none=True)
        process.start()
        if chosen is None:  # to spawn chooses it; the program may still want to
            multiprocessing.set_start_method(None, force=True)


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        _reap(process)
