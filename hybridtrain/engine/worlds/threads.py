"""Workers on threads of this process, in real time, that share one server under a lock.

For bodies that compute elsewhere and only hand over: what comes by a network, say. Gradients are
copied to their rows side by side; the server makes one update after the other.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybridtrain.engine.protocol.events import Completed, Event, Received, Removed, UpdateDue
from hybridtrain.engine.protocol.messages import Reply
from hybridtrain.engine.server.rounds import Replies
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worker.inbox import StopRequested

Body = Callable[[Client], Any]


class Threads:
    """Runs a body in each of ``n_workers`` threads, beside a function of the caller's thread."""

    def __init__(self, server: ParameterServer, n_workers: int) -> None:
        self._server = server
        self._changed = threading.Condition()  # guards the server and all inboxes
        self._inboxes = [deque[Reply]() for _ in range(n_workers)]
        self.error: BaseException | None = None  # the first of a body; all others end then

    def run(self, bodies: Sequence[Body], beside: Callable[[], object]) -> None:
        """Run the bodies; ``beside`` returns when they are to end by themselves.

        Raises:
            BaseException: the first of a body, or else that of ``beside``.
        """
        threads = [
            threading.Thread(target=self._work, args=(n, body), name=f"worker {n}", daemon=True)
            for n, body in enumerate(bodies)
        ]
        for thread in threads:
            thread.start()
        try:
            beside()
        except BaseException as error:
            self._break(error)
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def _work(self, number: int, body: Body) -> None:
        torch.set_num_threads(1)
        try:
            body(Client(number, len(self._inboxes), _ThreadLine(number, self)))
            self.on(Completed(number))
            self.on(Removed(number))
        except StopRequested:
            pass
        except BaseException as error:
            self._break(self._server.failure or error)

    def _break(self, error: BaseException) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def on(self, event: Event) -> None:
        """Tell the server, and deliver its replies."""
        with self._changed:
            self._deliver(self._server.on(event))
            while self._server.update_is_due:
                self._deliver(self._server.on(UpdateDue()))

    def _deliver(self, replies: Replies) -> None:
        for worker, reply in replies:
            self._inboxes[worker].append(reply)
        self._changed.notify_all()

    def has_reply(self, worker: int) -> bool:
        """Whether there is a reply for the worker, or never will be."""
        return bool(self._inboxes[worker]) or self.error is not None

    def reply(self, worker: int) -> tuple[Reply, int | None]:
        """Wait for the next reply to the worker, and its descriptor.

        Raises:
            StopRequested: if another worker has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.has_reply(worker))
            if self.error is not None:
                raise StopRequested
            reply = self._inboxes[worker].popleft()
            fd = self._server.descriptor_for(reply)
            return reply, None if fd is None else os.dup(fd)


class _ThreadLine:
    """A worker's connection to the server."""

    def __init__(self, number: int, world: Threads) -> None:
        self._number, self._world = number, world

    def send(self, message: Any) -> None:
        self._world.on(Received(self._number, message))

    def receive(self) -> tuple[Reply, int | None]:
        return self._world.reply(self._number)

    def ready(self) -> bool:
        return self._world.has_reply(self._number)
