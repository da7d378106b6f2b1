"""The workers of other hosts, as the server's host sees them.

Each relay has one connection. What it says is handed to the world worker by worker, as if their
processes were here. Rows arrive in shared memory before the message that counts on them. What a
reply lets a worker read (its parameters, the mean of gradients) goes ahead of the reply; replies to
one host are sent together at the end of a turn, so masters travel once for each host and version.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from selectors import EVENT_READ, BaseSelector
from typing import Any
from zlib import crc32

import torch

from hybridtrain.engine.memory import Store, Turns
from hybridtrain.engine.memory.layout import FAR_BYTES
from hybridtrain.engine.monitoring.watchdog import to_stderr
from hybridtrain.engine.protocol.events import Announced, NotArrived
from hybridtrain.engine.protocol.messages import (
    Average,
    Averaged,
    Done,
    Gathered,
    Push,
    Released,
    Reply,
    Shared,
)
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.worlds.start_workers import RestartPoint, WorkerHandle, WorkerStarter
from hybridtrain.hosts import transport
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

Span = tuple[int, int]  # bytes of the shared memory
PATIENCE_S = 600.0  # until a lost host is there again
_THERE = {"sent": "received", "sending_s": "receiving_s"}  # a figure here -> the one there
_THERE |= {there: here for here, there in _THERE.items()}


@dataclass
class RemoteWorker(WorkerHandle):
    """The process of a worker on another host."""

    host: OtherHost
    inbox: deque[Any] = field(default_factory=deque)
    end: Ended | None = None

    def send(self, reply: Reply, fd: int | None = None) -> None:
        """Queue the reply for the host; its relay has descriptors of its own."""
        self.answer(reply)
        if not self.gone:
            self.host.queue(self.number, reply)

    def messages(self) -> Iterator[Any]:
        while self.inbox:
            yield self.inbox.popleft()

    def kill(self, cause: str = "") -> None:
        self.cause = self.cause or cause
        if not self.gone:
            self.host.tell(KillWorker(self.number, self.cause))

    def mark_ended(self) -> None:
        self.gone, self.request = True, None

    def describe_exit(self) -> str:
        return f"worker {self.number} has ended" if self.end is None else self.end.exit_text

    def metrics_note(self) -> str:
        return "" if self.end is None else self.end.metrics_note


class OtherHost:
    """The place of one other host, by its connection while it is there.

    Args:
        number: of the host.
        workers: their numbers.
        signalled: called with a signal that the relay got.
    """

    connection: HostConnection

    def __init__(
        self, number: int, workers: Sequence[int], signalled: Callable[[int], object]
    ) -> None:
        self.number, self.numbers = number, tuple(workers)
        self.name = f"host {number}"
        self.lost, self.lost_s = "it has not come", time.monotonic()  # why, in words; since when
        self.workers: dict[int, RemoteWorker] = {}
        self._signalled = signalled
        self._server: ParameterServer | None = None
        self._selector: BaseSelector | None = None
        self._fresh = self._begun = False  # the relay is to begin this run; it has
        self._replies: list[tuple[int, Reply]] = []
        self._spans: list[Span] = []
        self._masters: _Masters | None = None
        self._has_turns = False  # it has got both buffers once
        self._copied = [0, 0]  # which state of each of both buffers it has, if there are turns
        self._shares = False  # it knows the memory of this run
        self._past: dict[str, float] = dict.fromkeys(_THERE, 0)  # of connections that are lost

    def stats(self) -> dict[str, float]:
        """Bytes and seconds of what this host has sent to the other and received, in all."""
        now = {} if self.lost else self.connection.stats()
        return {name: past + now.get(name, 0) for name, past in self._past.items()}

    def take(self, connection: HostConnection) -> None:
        """The host is there, for the first time or again."""
        self.connection, self.lost = connection, ""
        self.name = f"host {self.number} ({connection.about.get('name', 'no name')})"
        self._fresh, self._begun, self._replies, self._spans = True, False, [], []
        self._masters, self._shares = None, False  # it has none yet
        self._copied, self._has_turns = [0, 0], False

    # ---- the beginning --------------------------------------------------------------------------

    def begin(self, server: ParameterServer) -> None:
        """A new run begins, with this server."""
        self._server, self._fresh, self._begun = server, True, False
        self.workers = {each: RemoteWorker(each, self, gone=True) for each in self.numbers}
        self._replies, self._spans, self._masters = [], [], None
        self._shares, self._copied, self._has_turns = False, [0, 0], False

    def start(
        self, numbers: Sequence[int], selector: BaseSelector, restart: RestartPoint | None = None
    ) -> None:
        """Let the relay start a process for each of these workers.

        Raises:
            OSError: if the host is lost.
        """
        if self.lost:
            raise OSError(f"{self.name} is lost: {self.lost}")
        if self._selector is not selector:
            self._selector = selector
            selector.register(self.connection, EVENT_READ, ("host", self))
        self.flush()  # what an earlier process of the worker was to get
        for number in numbers:
            self.workers[number] = RemoteWorker(number, self, location=self.name)
        self.tell(StartWorkers(tuple(numbers), restart, self._fresh))
        self._fresh = False

    # ---- messages -------------------------------------------------------------------------------

    def listen(self) -> Iterator[tuple[int, bool]]:
        """Take what has arrived: the workers with messages, and whether they have ended."""
        try:
            for message in self.connection.receive():
                match message:
                    case RunBegun():
                        self._begun = True
                    case Signalled(signum):
                        self._signalled(signum)
                    case FromWorker(number, said) if self._begun:
                        if isinstance(said, Average):
                            self._complete(number, said)
                        self.workers[number].inbox.append(said)
                        yield number, False
                    case Ended(number) if self._begun:
                        self.workers[number].end = message
                        yield number, True
        except HostLost as lost:
            yield from self._lose(str(lost))

    def _complete(self, number: int, request: Average) -> None:
        """Set places without a gradient to zero, as the worker has: such places do not travel."""
        store = None if self._server is None else self._server.store
        if store is not None and request.row.encoded is None:
            for absent in request.row.absent:
                store.gradient(store.row_of(number), store.layout.slots[absent]).zero_()

    def _lose(self, reason: str) -> Iterator[tuple[int, bool]]:
        self._past = self.stats()
        self.lost, self.lost_s = reason, time.monotonic()
        if self._selector is not None:
            self._selector.unregister(self.connection)
            self._selector = None
        to_stderr(f"{self.name} is lost: {reason}")
        self.connection.close()
        there = [worker for worker in self.workers.values() if not worker.gone]
        # First of all workers that wait, so that the loss of others releases none of this host's.
        there.sort(key=lambda worker: worker.request is None)
        for worker in there:
            worker.counts = worker is there[0]
            text = f"worker {worker.number} is lost with {self.name}: {reason}"
            worker.end = Ended(worker.number, text)
            yield worker.number, True

    def coming(self) -> Iterator[tuple[int, Push, int, int]]:
        """Pushes whose rows are arriving: worker, push, where the row is in the stream of rows."""
        store = None if self._server is None else self._server.store
        if self.lost or store is None or self._masters is None:
            return
        for message, end in self.connection.announced():
            push = message.message if isinstance(message, FromWorker) else None
            if isinstance(push, Push):
                number, row = message.number, push.row
                if row.within not in (None, number):  # the other row is awaited
                    yield number, push, 0, 0
                    continue
                spans = store.spans_of(number, row.absent, row.packed, row.encoded)
                n_bytes = sum(stop - start for start, stop in spans)
                if len(spans) == 1 and n_bytes >= FAR_BYTES:
                    yield number, push, end - n_bytes, end

    def tell(self, order: Any) -> None:
        """Send an order to the relay."""
        if not self.lost:
            self.connection.send(order)

    def queue(self, number: int, reply: Reply) -> None:
        """Send the reply at the end of this turn, behind what it lets the worker read."""
        server = self._server
        assert server is not None, "workers are started in a run"
        if (store := server.store) is not None:
            if isinstance(reply, Shared):
                self.connection.attach(store.arena.memory, written_by(store, self.numbers))
                if self._masters is None and not (store.private_parameters or store.turns):
                    self._masters = _Masters(self.connection, store)
                self._shares = True
            elif self._shares:
                self._spans += _spans_behind(reply, number, store, server.training)
        self._replies.append((number, reply))
        if isinstance(reply, Shared):
            self.flush()  # rows cannot arrive before there is memory for them

    def flush(self) -> None:
        """Send the replies of this turn."""
        if self._replies and not self.lost:
            spans = list(dict.fromkeys(self._spans))
            if self._masters is not None:
                spans = self._masters.lacking(spans)
            more, exact = self._buffers()
            spans += [span for span in more if span not in spans]
            turns = self._turns()
            state = None if turns is None else turns.state
            self.connection.send(Deliver(tuple(self._replies), state, exact), spans)
        self._replies, self._spans = [], []

    def tell_of_update(self) -> None:
        """Send the buffer with the update that workers did not wait for, or how it has moved."""
        if self.lost or not self._shares or (turns := self._turns()) is None:
            return
        if turns.encoded and self._has_turns:
            other = 1 - turns.read
            self._copied[other] = turns.states[other]
            self.connection.send(Moved(other, turns.encoded))
        else:
            self.connection.send_rows(self._buffers()[0])

    def _turns(self) -> Turns | None:
        store = None if self._server is None else self._server.store
        return None if store is None else store.turns

    def _buffers(self) -> tuple[list[Span], tuple[int, ...]]:
        """Of both buffers that workers read in turn, those that this host has not as they are.

        Returns the bytes to be sent, and which of the buffers have the masters. Those go as such
        where movements are encoded: a movement that came before is decoded after it has come.
        """
        store, turns = None if self._server is None else self._server.store, self._turns()
        if store is None or turns is None or not self._shares:
            return [], ()
        now, self._copied = self._copied, list(turns.states)
        stale = [n for n, state in enumerate(self._copied) if state != now[n]]
        as_masters = [n for n in stale if turns.encodes and not turns.is_apart(n)]
        spans = [store.region_of_parameters(0, n) for n in stale if n not in as_masters]
        masters = [store.region_of_masters()] if as_masters else []
        self._has_turns = True
        return spans + masters, tuple(as_masters)

    def leave(self) -> None:
        """The run has ended: listen no more for now."""
        self.flush()
        if self._selector is not None:
            self._selector.unregister(self.connection)
            self._selector = None


class _Arrivals:
    """Rows that are arriving.

    Args:
        rows: connection, first byte and end in its stream of rows.
        item: bytes of an element.
    """

    def __init__(self, rows: Sequence[tuple[HostConnection, int, int]], item: int) -> None:
        self._rows, self._item, self._over = rows, item, False

    def wait(self, element: int) -> None:
        for connection, start, end in self._rows:
            until = min(start + element * self._item, end)
            if not connection.wait_for_rows(until, lambda: self._over):
                raise NotArrived

    def give_up(self) -> None:
        self._over = True


class _Masters:
    """The masters that a host has. Some are sent while an update steps those behind them.

    The host's workers read none before the reply that counts on them.
    """

    def __init__(self, connection: HostConnection, store: Store) -> None:
        self._connection, self._store = connection, store
        self._sent = 0  # bytes of the arena, of the update that began at so many changes
        self._began: int | None = None
        self._has: int | None = None  # the masters after so many changes
        self._checksum: int | None = None  # of the masters last sent before the first update
        store.progress.listen(self._stepped)

    def _stepped(self, elements: int) -> None:
        """By a thread of the update: so many elements are as they will be."""
        start, end = self._store.stepped_masters(elements)
        if not elements:
            self._sent, self._began = start, self._store.moves.n_changes
        elif end - self._sent >= transport.FRAME_BYTES:
            self._connection.send_rows([(self._sent, end)])
            self._sent = end

    def lacking(self, spans: Sequence[Span]) -> list[Span]:
        """The spans, less what the host has; all masters if it has some that were undone."""
        whole, now = self._store.region_of_masters(), self._store.moves.n_changes
        others = [span for span in spans if span != whole]
        began, undone = self._began, self._began not in (None, now - 1)
        if len(others) == len(spans) and not undone:
            return others
        self._began = None
        if undone or began is None:
            known, self._has = self._has, None if undone else self._has
            has_all = known == now or (now == 0 and self._has_the_same(whole))
            return others if has_all else [*others, whole]
        self._has = now
        start, _ = self._store.stepped_masters(0)
        pieces = [(whole[0], start), (self._sent, whole[1])]
        return [*others, *((first, end) for first, end in pieces if first < end)]

    def _has_the_same(self, whole: Span) -> bool:
        """Before the first update, when each meeting asks for them, and few change them."""
        known, self._checksum = self._checksum, crc32(self._store.arena.memory[slice(*whole)])
        return known == self._checksum


def written_by(store: Store, workers: Sequence[int]) -> list[Span]:
    """The bytes that a relay sends: the rows of its workers, and state that one of them shares."""
    rows = (region for worker in workers for region in store.regions_of_gradients(worker))
    return [*rows, store.region_of_state()]


def written_for(store: Store, workers: Sequence[int]) -> list[Span]:
    """The bytes that a relay receives."""
    found = [store.region_of_masters(), store.region_of_state()]
    if store.private_parameters:
        found += map(store.region_of_parameters, workers)
    if store.turns is not None:
        found += [store.region_of_parameters(0, number) for number in store.buffers[:-1]]
    return [*found, store.region_of_means()] if store.averaging else found


def _spans_behind(reply: Reply, number: int, store: Store, training: bool) -> list[Span]:
    """The bytes that the worker may read once it has the reply."""
    spans = []
    if isinstance(reply, Averaged):
        spans.append(store.region_of_means())
    ahead = isinstance(reply, Released) and reply.ahead
    if store.turns is not None and isinstance(reply, Done):  # to a worker that looks at the masters
        spans.append(store.region_of_masters())
    if store.was_refreshed(number) or ahead:
        if store.turns is None:  # else both buffers go as they change
            spans.append(store.region_of_parameters(number))
        if not store.private_parameters and store.layout.state_bytes:
            spans.append(store.region_of_state())
    elif isinstance(reply, Gathered) and not training:
        spans.append(store.region_of_masters())  # the first worker has written the initial ones
    return spans


class HostStarter:
    """Starts the workers of all hosts.

    Args:
        here: starts those of this host, the first ones.
        others: the other hosts, in the order of their workers.
    """

    def __init__(self, here: WorkerStarter, others: Sequence[OtherHost]) -> None:
        self._here, self._others = here, others
        self.workers: list[WorkerHandle] = []  # the latest process of each

    def start(
        self, numbers: Sequence[int], selector: BaseSelector, restart: RestartPoint | None = None
    ) -> None:
        """Start a process for each of these workers.

        Raises:
            OSError: if a host is lost, or this one refuses.
        """
        elsewhere = {number for host in self._others for number in host.numbers}
        if mine := [number for number in numbers if number not in elsewhere]:
            self._here.start(mine, selector, restart)
        for host in self._others:
            if theirs := [number for number in numbers if number in host.numbers]:
                host.start(theirs, selector, restart)
        self.workers = list(self._here.workers)
        for host in self._others:
            self.workers += [host.workers[number] for number in sorted(host.workers)]

    def kill(self) -> None:
        """Kill all processes."""
        self._here.kill()
        for worker in self.workers:
            if isinstance(worker, RemoteWorker):
                worker.kill()

    def close(self) -> None:
        """Free the resources of this host."""
        self._here.close()
        for host in self._others:
            host.leave()


class Hosts:
    """All other hosts of a call of the trainer.

    Args:
        connections: to the relays that are there.
        n_hosts: of the run, this one and absent ones included.
        n_here: workers on this host, and on each other one.
        arrivals: the hosts that have come since it was called last.
    """

    def __init__(
        self,
        connections: Sequence[HostConnection],
        n_hosts: int,
        n_here: int,
        arrivals: Callable[[], Sequence[HostConnection]],
    ) -> None:
        self._signals: list[int] = []
        self._arrivals = arrivals
        self._waiting: dict[int, HostConnection] = {}  # whose place is taken
        self._server: ParameterServer | None = None
        self._hosts = [
            OtherHost(host, range(host * n_here, (host + 1) * n_here), self._signals.append)
            for host in range(1, n_hosts)
        ]
        for each in connections:
            self._hosts[each.host - 1].take(each)

    def beside(self, here: WorkerStarter, server: ParameterServer) -> HostStarter:
        """A starter of the workers of all hosts, for one run."""
        self._server = server
        for host in self._hosts:
            host.begin(server)
        return HostStarter(here, self._hosts)

    def absent(self) -> set[int]:
        """The workers of hosts that are not there, and may come."""
        now_s = time.monotonic()
        hosts = [x for x in self._hosts if x.lost and now_s < x.lost_s + PATIENCE_S]
        return {number for host in hosts for number in host.numbers}

    def take_signals(self) -> list[int]:
        """The signals that relays have got since this was asked last."""
        taken = list(self._signals)
        self._signals.clear()
        return taken

    def arriving(self) -> Announced | None:
        """Pushes whose rows are arriving, if there are any."""
        found = [(host, *each) for host in self._hosts for each in host.coming()]
        server = self._server
        if found and server is not None and server.store is not None:
            item = server.store.layout.travels_as(torch.float32).itemsize
            rows = [(host.connection, start, end) for host, _, _, start, end in found]
            coming = {number: push for _, number, push, _, _ in found}
            return Announced(coming, _Arrivals(rows, item))
        return None

    def flush(self) -> None:
        """Send what has been queued."""
        for host in self._hosts:
            host.flush()

    def tell_of_update(self) -> None:
        """Send the masters, which have the update that workers did not wait for."""
        for host in self._hosts:
            host.tell_of_update()

    def look(self, now_s: float, admits: bool) -> list[int]:
        """Once a second: show life to the other hosts, and see theirs.

        ``admits``: those that come may take their places; returns the numbers of their workers.
        """
        for connection in self._arrivals():
            host = self._hosts[connection.host - 1]
            to_stderr(f"host {host.number} comes" + ", and its place is taken" * (not host.lost))
            if (former := self._waiting.pop(host.number, None)) is not None:
                former.close()
            self._waiting[host.number] = connection
        found: list[int] = []
        for host in self._hosts:
            if host.lost and admits and host.number in self._waiting:
                host.take(self._waiting.pop(host.number))
                found += host.numbers
        for connection in self._connections():
            connection.look(now_s)
        return found

    def _connections(self) -> list[HostConnection]:
        there = [host.connection for host in self._hosts if not host.lost]
        return [*there, *self._waiting.values()]

    def conclude(self, over: Over, late: Sequence[HostConnection]) -> None:
        """The call has ended like this: say so, also to hosts that come too ``late``, and close."""
        for connection in [*self._connections(), *late]:
            connection.send(over)
            connection.close()

    def stats(self) -> list[dict[str, float]]:
        """The traffic of each host, this one first: ``sent`` and ``received`` bytes, and seconds.

        All is measured here, so what another host has sent is what has arrived.
        """
        theirs = [host.stats() for host in self._hosts]
        ours = {name: sum(each[name] for each in theirs) for name in theirs[0]}
        return [ours, *({name: each[_THERE[name]] for name in each} for each in theirs)]
