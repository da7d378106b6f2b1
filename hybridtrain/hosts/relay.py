"""The relay: starts and watches the workers of one host, and forwards their messages.

Theory of operation. Workers find here what they find on the server's host: a channel, and shared
memory of the same layout. The relay decides nothing. It sends a worker's row ahead of the message
that counts on it, and hands on a reply once the masters, or what else the worker may read then,
have arrived in shared memory. The watchdog runs here, where the heartbeats are. When a process
ends, the server's host is told how, and its roster decides what follows. If that host is lost, all
workers are killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from selectors import EVENT_READ, BaseSelector, DefaultSelector
from typing import Any

import torch

from hybridtrain.engine.exchanges import Requirements
from hybridtrain.engine.memory import Store
from hybridtrain.engine.monitoring.watchdog import Watchdog
from hybridtrain.engine.protocol.messages import (
    NOTES,
    OWN_STEPS,
    Average,
    GradientPush,
    Push,
    Reply,
    Row,
    Share,
    Shared,
    Snapshot,
)
from hybridtrain.engine.server.shared_parameters import made_store
from hybridtrain.engine.updates.mean import merge
from hybridtrain.engine.updates.optimizer_set import is_dense
from hybridtrain.engine.worlds.cpu_scheduling import one_thread, stand_aside
from hybridtrain.engine.worlds.process_world import running
from hybridtrain.engine.worlds.signals import caught_signals
from hybridtrain.engine.worlds.start_workers import Bodies, WorkerProcess, WorkerStarter
from hybridtrain.errors import Lost
from hybridtrain.hosts.connection import HostConnection, HostLost
from hybridtrain.hosts.orders import (
    Deliver,
    Ended,
    FromWorker,
    KillWorker,
    Moved,
    Over,
    RunBegun,
    Signalled,
    StartWorkers,
)
from hybridtrain.hosts.other_hosts import Span, written_for

_POLL_S = 1.0
_PIECE = 1 << 18  # elements


class ServerLost(Lost):
    """The host with the server is lost."""


@dataclass
class Relay:
    """The workers of one host.

    Args:
        connection: to the server's host.
        numbers: of the workers.
        n_workers: W, on all hosts.
        requirements: of policy and exchange.
        start_method: ``fork``, ``spawn`` or ``forkserver``.
        threads_per_worker: torch threads of each worker.
        watchdog: finds workers that hang.
        device_names: of each worker, in words.
        grace_s: how long workers may take to stop, after a signal that nobody answers.
        sums: hand over the mean of this host's gradients in place of each.
    """

    connection: HostConnection
    numbers: Sequence[int]
    n_workers: int
    requirements: Requirements
    start_method: str = "fork"
    threads_per_worker: int = 1
    watchdog: Watchdog = field(default_factory=Watchdog)
    device_names: Sequence[str] = ()
    grace_s: float = 30.0
    sums: bool = False
    _signals: list[int] = field(default_factory=list)
    _share: Share | None = None  # of this host's workers
    _store: Store | None = None
    _over: Over | None = None
    _signalled_s: float | None = None
    _look_at_s: float = 0.0  # time of the next look at the cores
    _held: dict[int, GradientPush] = field(default_factory=dict)  # until all have pushed
    _tags: tuple[int, ...] = ()  # of the state that worker 0 shares, as last sent or received

    def run(self, bodies: Bodies) -> Over:
        """Serve until the server's host says that the call of the trainer has ended.

        Args:
            bodies: make the workers' function.

        Raises:
            ServerLost: if the connection breaks.
        """
        self._starter = WorkerStarter(
            self.n_workers,
            self.start_method,
            self.threads_per_worker,
            bodies,
            self.device_names,
            worker_updates=self.requirements.together > 1,
            first=self.numbers[0],
            apart=True,
        )
        with DefaultSelector() as selector, caught_signals(self._signals, selector), one_thread():
            selector.register(self.connection, EVENT_READ, ("host", None))
            try:
                while self._over is None:
                    self._turn(selector)
            except HostLost as lost:
                raise ServerLost(f"host 0, which has the parameters, is lost: {lost}") from None
            finally:
                self._starter.kill()
                self._starter.close()
        self.watchdog.conclude()
        return self._over

    # ---- one turn of the loop -------------------------------------------------------------------

    def _turn(self, selector: BaseSelector) -> None:
        for key, _ in selector.select(self._timeout_s()):
            kind, worker = key.data
            if kind == "message":
                self._listen(worker)
            elif kind == "exit":
                self._reap(worker)
            elif kind == "room":
                worker.make_room()
            elif kind == "host":
                for order in self.connection.receive():
                    self._obey(order, selector)
            else:
                os.read(key.fd, 64)
        while self._signals:
            self._signal(self._signals.pop(0))
        self._look(time.monotonic())

    def _timeout_s(self) -> float:
        due_s = self.watchdog.due_s
        return min(_POLL_S, max(0.0, due_s - time.monotonic()))

    def _look(self, now_s: float) -> None:
        alive = running(self._starter.workers)
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + _POLL_S
            stand_aside(each.pid for each in alive)
            self.connection.look(now_s, judges=bool(alive))  # else it may write its last files
        if now_s >= self.watchdog.due_s:
            self.watchdog.look(now_s, [each for each in alive if not each.cause])
        if self._signalled_s is not None and now_s > self._signalled_s + self.grace_s + _POLL_S:
            raise HostLost(f"it has not answered a signal for {self.grace_s:g} s")

    def _signal(self, signum: int) -> None:
        """The server's host ends the run, as if it had got the signal itself."""
        self.connection.send(Signalled(signum))
        if self._signalled_s is None:
            self._signalled_s = time.monotonic()

    # ---- from workers to the server -------------------------------------------------------------

    def _listen(self, worker: WorkerProcess) -> None:
        for message in worker.messages():
            worker.hear()
            if isinstance(message, Share):
                self._share = message
            elif isinstance(message, Snapshot):
                message = Snapshot(message.refresh)  # a file of this host is none of the server's
            if not isinstance(message, NOTES):
                worker.ask(message)
                if self._hold(worker, message):
                    continue
                self._forward_held_pushes()
            self._forward(worker, message)

    def _forward(self, worker: WorkerProcess, message: Any) -> None:
        self.connection.send(FromWorker(worker.number, message), self._behind(worker, message))

    def _behind(self, worker: WorkerProcess, message: Any) -> list[Span]:
        """The bytes that the server reads for this message."""
        store = self._store
        match message:
            case Push(weight=weight, row=row) if weight > 0 and not isinstance(message, OWN_STEPS):
                return self._state(store) + self._content(worker, row, store)
            case Push():
                return self._state(store)
            case Average(row=row):
                return self._content(worker, row, store)
        return []

    def _content(self, worker: WorkerProcess, row: Row, store: Store | None) -> list[Span]:
        assert store is not None, "parameters are shared before anything is pushed"
        return store.spans_of(worker.number, row.absent, row.packed, row.encoded)

    def _state(self, store: Store | None) -> list[Span]:
        """The state that the first worker shares, if that is one of this host's now."""
        tags = _tags_of(store)
        if store is None or tags == self._tags:
            return []
        self._tags = tags
        return [store.region_of_state()]

    # ---- one row for all workers of this host ---------------------------------------------------

    def _hold(self, worker: WorkerProcess, message: Any) -> bool:
        """Keep the push until all workers have pushed, if their gradients can be added."""
        others = self._held.values()
        if not (self.sums and can_be_added(message, self._store)) or any(
            (other.optimizer, other.clip) != (message.optimizer, message.clip) for other in others
        ):
            return False
        self._held[worker.number] = message
        if len(self._held) == len(self.numbers):
            self._forward_mean()
        elif all(each.asked for each in running(self._starter.workers)):
            self._forward_held_pushes()  # others have pushed before: a worker was restarted
        return True

    def _forward_held_pushes(self) -> None:
        """Forward what was kept, as it is."""
        held, self._held = self._held, {}
        for number, push in held.items():
            self._forward(self._process(number), push)

    def _forward_mean(self) -> None:
        """Send the mean of the rows, weighted by samples, in the place of the first."""
        store, held = self._store, dict(sorted(self._held.items()))
        self._held = {}
        assert store is not None, "parameters are shared before anything is pushed"
        first, total = next(iter(held)), sum(push.weight for push in held.values())
        shares = [push.weight / total for push in held.values()]
        self.connection.send_rows(self._state(store))
        for dtype in store.layout.addable:
            size = store.layout.sizes[dtype]
            rows = [store.gradients[store.row_of(number)][dtype] for number in held]
            for start in range(0, size, _PIECE):
                stop = min(start + _PIECE, size)
                parts = [row[start:stop] for row in rows]
                merge(parts, shares, parts[0])
                self.connection.send_rows([store.span_of_row(first, dtype, start, stop)])
        for number, push in held.items():
            push = replace(push, row=replace(push.row, within=first))
            self.connection.send(FromWorker(number, push))

    def _reap(self, worker: WorkerProcess) -> None:
        self._listen(worker)  # its last messages
        self._forward_held_pushes()
        worker.mark_ended()
        self.connection.send(Ended(worker.number, worker.describe_exit(), worker.metrics_note()))

    # ---- from the server to workers -------------------------------------------------------------

    def _obey(self, order: Any, selector: BaseSelector) -> None:
        self._forward_held_pushes()
        match order:
            case StartWorkers():
                self._start(order, selector)
            case Deliver(replies=replies):
                self._tags = _tags_of(self._store)
                if order.turn is not None and self._store is not None:
                    assert self._store.turns is not None, "it is made as the server's"
                    self._store.turns.follow(order.turn)
                    for buffer in order.exact:
                        self._store.moves.bring(buffer)
                for number, reply in replies:
                    self._deliver(number, reply)
            case Moved(buffer, encoded):
                assert self._store is not None and self._store.turns is not None, "it is shared"
                self._store.turns.decode(buffer, encoded)
            case KillWorker(number, cause):
                self._process(number).kill(cause)
            case Over():
                self._over = order

    def _start(self, order: StartWorkers, selector: BaseSelector) -> None:
        if order.anew:
            self._starter.kill()
            for worker in running(self._starter.workers):
                worker.mark_ended()
            self._store, self._share = None, None
            self.connection.send(RunBegun())
        try:
            self._starter.start(order.numbers, selector, order.restart)
        except OSError as error:
            for number in order.numbers:
                text = f"worker {number} could not be started ({error})"
                self.connection.send(Ended(number, text))

    def _deliver(self, number: int, reply: Reply) -> None:
        descriptor = None
        if isinstance(reply, Shared):
            self._store = store = self._store or self._made()
            descriptor = store.arena.fd
        worker = self._process(number)
        if not worker.gone:
            worker.send(reply, descriptor)

    def _process(self, number: int) -> WorkerProcess:
        return next(each for each in self._starter.workers if each.number == number)

    def _made(self) -> Store:
        """Shared memory of the layout that the server's host has."""
        assert self._share is not None, "a worker of this host has asked"
        layout, averaging = self._share.layout, self._share.averaging
        store = made_store(layout, self.n_workers, self.requirements, averaging, here=self.numbers)
        self.connection.attach(store.arena.memory, written_for(store, self.numbers))
        return store


def can_be_added(message: Any, store: Store | None) -> bool:
    """Whether the message is a push whose row may be added to others'."""
    if not isinstance(message, GradientPush) or store is None or not is_dense(message):
        return False
    layout = store.layout
    narrowed = any(layout.travels_as(dtype) != dtype for dtype in layout.sizes)
    encoded = message.row.encoded is not None
    return message.weight > 0 and not (encoded or message.veto or message.writes or narrowed)


def _tags_of(store: Store | None) -> tuple[int, ...]:
    """The versions of the state that the first worker shares, of both places."""
    if store is None or not store.layout.state_bytes:
        return ()
    return tuple(int(store.state(turn)[:8].view(torch.int64)) for turn in (0, 1))
