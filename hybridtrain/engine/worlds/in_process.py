"""W workers on threads of this process, one running at a time.

Theory of operation. A worker runs until it sends a message to the server, and is suspended there
until its next message is requested. The order of requests is decided elsewhere (by a record in a
replay), so nothing here depends on a clock or the system's scheduler. Process-wide state (RNG
states, the rank in an environment variable) is swapped whenever another worker runs, so each worker
finds it as it left it. Only global variables of user modules are shared by the workers.
"""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from hybridtrain.engine.protocol.checksums import GradientRows, checksum_of
from hybridtrain.engine.protocol.events import Received
from hybridtrain.engine.protocol.messages import (
    GetState,
    Note,
    Progress,
    Push,
    ReadStats,
    Reply,
    Request,
    Saved,
    SavePermission,
    Stop,
    Stopped,
)
from hybridtrain.engine.protocol.step_log import MADE, TOLD
from hybridtrain.engine.server.rounds import Replies
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worker.makers.logged_steps import LoggedSteps
from hybridtrain.engine.worlds.worker_exit import Failed
from hybridtrain.util.turn_taking import Asked, FunctionEnded, TurnTaking


@dataclass(frozen=True)
class MadePush:
    """A worker's pseudo-message: it has made the update of its push itself, or has arrived in a
    round; ``print`` is the push's checksum."""

    print: int


Body = Callable[[Client], Any]
Word = Request | Note | MadePush | FunctionEnded  # a worker's next message, or its end
Due = Callable[[int], str]  # the kind of a worker's next event in a record, if there is one


class Cell(NamedTuple):
    """A piece of process-wide state."""

    get: Callable[[], Any]
    set: Callable[[Any], None]


class Stuck(Exception):
    """A worker waits for an answer that does not exist."""


class _Waits:
    """A worker's pseudo-message when there is no answer yet."""


class ThreadWorld:
    """Runs bodies, each on its own thread, one at a time.

    Args:
        server: the caller passes it the messages that :meth:`next` returns.
        n_workers: W.
        threads: torch threads of each worker.
        due: the worker does what was recorded next: stops (as by a signal in a real run), makes
            an update itself, or reports such updates.
        cells: process-wide state to swap between workers, besides RNG states.
    """

    def __init__(
        self,
        server: ParameterServer,
        n_workers: int,
        threads: int,
        due: Due,
        cells: Sequence[Cell] = (),
    ) -> None:
        self.server = server
        self._threads, self._cells, self._due = threads, (*_CELLS, *cells), due
        self._workers = [_WorkerInProcess(_Line(n, self, due)) for n in range(n_workers)]

    def start(self, bodies: Sequence[Body], make: bool = False) -> None:
        """Set the bodies, without running them; each begins with the present process-wide state.

        ``make``: workers make updates themselves.
        """
        for number, (worker, body) in enumerate(zip(self._workers, bodies, strict=True)):
            bells = _NoBells() if make else None
            log = _RepeatedSteps(number, self, self._due) if make else None
            client = Client(number, len(self._workers), worker.line, bells=bells, log=log)
            worker.body = _on_a_thread(body, client, worker, self._threads)
            worker.contents = self._look()

    def next(self, number: int) -> Word:
        """Run the worker until it sends a message or ends.

        Raises:
            Stuck: if it waits for an answer.
        """
        worker = self._workers[number]
        if worker.ended is not None:
            return worker.ended
        said = self._within(worker, worker.go_on)
        match said:
            case FunctionEnded():
                worker.ended = said
                return said
            case Asked(_Waits()):
                raise Stuck
        return said.question

    def answer(self, replies: Replies) -> None:
        """Deliver the server's replies."""
        for number, reply in replies:
            self._workers[number].line.inbox.append(reply)

    def line(self, number: int) -> _Line:
        """The worker's connection."""
        return self._workers[number].line

    def result(self, number: int) -> Any:
        """The result of the worker's body."""
        return self._workers[number].result

    def abandon(self, number: int) -> None:
        """End the worker at its present message."""
        worker = self._workers[number]
        if worker.ended is None:
            worker.ended = FunctionEnded()
            self._within(worker, worker.line.turns.close)

    def close(self) -> None:
        """End all threads."""
        for number, worker in enumerate(self._workers):
            self.abandon(number)
            worker.line.turns.close()

    def _within(self, worker: _WorkerInProcess, action: Callable[[], Any]) -> Any:
        """Run the action with the worker's process-wide state."""
        mine = self._look()
        self._put(worker.contents)
        try:
            return action()
        finally:
            worker.contents = self._look()
            self._put(mine)

    def _look(self) -> list[Any]:
        return [cell.get() for cell in self._cells]

    def _put(self, contents: Sequence[Any]) -> None:
        for cell, content in zip(self._cells, contents, strict=True):
            cell.set(content)


class _Line:
    """A worker's connection to the server."""

    def __init__(self, number: int, world: ThreadWorld, due: Due) -> None:
        self._number, self._world, self._due = number, world, due
        self.turns = TurnTaking()
        self.inbox: deque[Reply] = deque()
        self.threads = 1
        self.thread = 0  # its identifier, once it runs

    def send(self, message: Request | Note) -> None:
        if isinstance(message, ReadStats | GetState):  # changes no bits, and is not recorded
            self._world.answer(self._world.server.on(Received(self._number, message)))
            return
        if not isinstance(message, Saved | Failed | Progress):  # these are not for the server
            self.say(message)
        if isinstance(message, Stopped | Failed):
            self.inbox.append(
                SavePermission(saves=self._number == 0 and isinstance(message, Stopped))
            )

    def receive(self) -> tuple[Reply, int | None]:
        if not self.inbox and self._stops:
            return Stop(), None
        while not self.inbox:
            self.say(_Waits())
        reply = self.inbox.popleft()
        fd = self._world.server.descriptor_for(reply)
        return reply, None if fd is None else os.dup(fd)

    @property
    def _stops(self) -> bool:
        return self._due(self._number) == Stopped.__name__

    def ready(self) -> bool:
        return bool(self.inbox) or self._stops

    def say(self, word: Any) -> None:
        """Suspend the worker with this as its next message."""
        if threading.get_ident() != self.thread:
            raise RuntimeError(
                f"worker {self._number} was spoken for by another thread than its own; in a replay "
                "workers share what is kept in global variables"
            )
        self.turns.ask(word)
        torch.set_num_threads(self.threads)  # parts of it belong to the process


class _NoBells:
    """Workers run one at a time: none waits."""

    def ring(self) -> None:
        """See :class:`hybridtrain.engine.worker.surroundings.Bells`."""

    def wait(self, for_s: float) -> None:
        """See :class:`hybridtrain.engine.worker.surroundings.Bells`."""
        raise Stuck


class _RepeatedSteps(LoggedSteps):
    """Makes the updates that the worker has made in the run that is replayed."""

    awaits = True

    def __init__(self, number: int, world: ThreadWorld, due: Due) -> None:
        self._number, self._world, self._due = number, world, due
        self._rows: GradientRows | None = None
        self._print = 0

    def admits(self, push: Push, version: int) -> bool:
        self._rows = GradientRows.of(self._world.server.store, self._rows)
        self._print = checksum_of(push, self._number, self._rows)
        return self._due(self._number) == MADE

    def made(self) -> None:
        self._world.line(self._number).say(MadePush(self._print))

    def tells(self, due: bool) -> bool:
        return self._due(self._number) == TOLD


@dataclass
class _WorkerInProcess:
    line: _Line
    body: Callable[[], None] | None = None  # until it is started
    contents: list[Any] = field(default_factory=list)  # of the cells, while suspended
    result: Any = None
    ended: FunctionEnded | None = None

    def go_on(self) -> Asked | FunctionEnded:
        body, self.body = self.body, None
        turns = self.line.turns
        return turns.answer(None) if body is None else turns.start(body)


def _on_a_thread(
    body: Body, client: Client, worker: _WorkerInProcess, threads: int
) -> Callable[[], None]:
    """The body, run as in a worker process."""

    def run() -> None:
        worker.line.thread, worker.line.threads = threading.get_ident(), threads
        torch.set_num_threads(threads)
        torch.set_flush_denormal(True)  # as in a worker process: it affects the bits
        with torch.enable_grad():
            worker.result = body(client)

    return run


# ---- process-wide state -------------------------------------------------------------------------


def _cuda_states() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def _set_cuda_states(states: list[torch.Tensor]) -> None:
    if states:
        torch.cuda.set_rng_state_all(states)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


_CELLS = (
    Cell(torch.get_rng_state, torch.set_rng_state),
    Cell(_cuda_states, _set_cuda_states),
    Cell(lambda: np.random.get_state(), lambda state: np.random.set_state(state)),
    Cell(random.getstate, random.setstate),
    Cell(torch.get_default_dtype, torch.set_default_dtype),
    Cell(torch.get_num_threads, torch.set_num_threads),
    Cell(lambda: os.environ.get("LOCAL_RANK"), lambda v: _set_variable("LOCAL_RANK", v)),
)
