"""A worker's end of the protocol, made of parts that other code gets from it.

- ``group``: which workers train, and which one leads
- ``steps``: the version of the parameters, who makes updates, and the push that is pending
- ``inbox``: what the server has said
- ``pushes``: hands over contributions, and waits for releases
- ``queue``, ``tickets``: draws mini-batches of the shared queue
- ``memory``: the shared memory of parameters and optimizer state
- ``snapshots``: what the server has for a checkpoint
- ``schedule_calls``: calls of learning-rate schedules
"""

from __future__ import annotations

import pickle
from typing import Any

from hybridtrain.engine.exchanges import Requirements
from hybridtrain.engine.memory import Layout, Store
from hybridtrain.engine.memory.scratch_file import pickled
from hybridtrain.engine.monitoring.hang_detector import Heartbeat
from hybridtrain.engine.protocol.messages import (
    Average,
    Averaged,
    Begin,
    Done,
    Gather,
    Gathered,
    Install,
    Note,
    Pull,
    Push,
    ReadStats,
    Released,
    Share,
    Stats,
    Writes,
)
from hybridtrain.engine.server.shared_parameters import made_store
from hybridtrain.engine.worker.inbox import Inbox, StopRequested
from hybridtrain.engine.worker.makers import made_maker
from hybridtrain.engine.worker.makers.borrowed_update import SteppedOptimizers
from hybridtrain.engine.worker.makers.logged_steps import LoggedSteps
from hybridtrain.engine.worker.mapped_memory import MappedMemory
from hybridtrain.engine.worker.pushes import Pushes
from hybridtrain.engine.worker.requests import Requests
from hybridtrain.engine.worker.schedule_calls import ScheduleCalls
from hybridtrain.engine.worker.shared_queue import SharedQueue
from hybridtrain.engine.worker.snapshots import Snapshots
from hybridtrain.engine.worker.steps import Steps
from hybridtrain.engine.worker.surroundings import Bells, Connection, Listeners
from hybridtrain.engine.worker.tickets import Tickets
from hybridtrain.engine.worker.worker_group import WorkerGroup


class Client:
    """One worker's end of the protocol: registers, meets the others, and pulls parameters.

    Args:
        worker: its number.
        n_workers: W, of which some may be gone or restarting.
        line: to the server.
        apart: there are workers on other hosts, so that no file is shared with all of them.
        heartbeat: tells the world that it lives; the world decides whether it is watched.
        bells: wake the other workers; ``None``: no update is made in shared memory.
        log: of the updates that workers make, in a replay.
    """

    def __init__(
        self,
        worker: int,
        n_workers: int,
        line: Connection,
        apart: bool = False,
        heartbeat: Heartbeat | None = None,
        bells: Bells | None = None,
        log: LoggedSteps | None = None,
    ) -> None:
        self.worker, self.n_workers, self.line, self.apart = worker, n_workers, line, apart
        self.heartbeat, self.bells, self._log = heartbeat or Heartbeat(), bells, log
        self.listeners = Listeners()
        self.group = group = WorkerGroup(worker, n_workers)
        self.tickets = tickets = Tickets(worker)
        self.steps = steps = Steps(group, tickets)
        self.inbox = inbox = Inbox(line, group, tickets, steps, self.listeners)
        self.schedule_calls = calls = ScheduleCalls(line)
        self.pushes = pushes = Pushes(line, inbox, steps, group, tickets, calls)
        self._requests = requests = Requests(line, inbox, pushes)
        self.queue = SharedQueue(requests, pushes, inbox, steps, tickets)
        self.memory = MappedMemory(requests)
        self.snapshots = Snapshots(requests, steps, apart)

    # ---- registration ---------------------------------------------------------------------------

    def shared_store(
        self,
        layout: Layout,
        needs: Requirements,
        stepped: SteppedOptimizers,
        averaging: bool = False,
        worker_updates: bool = True,
        on_device: bool = False,
    ) -> Store:
        """Map the shared memory, and choose the maker of updates; waits for all workers.

        Args:
            layout: the places of the parameters.
            needs: what policy and exchange require.
            stepped: returns the optimizers, each with the slot numbers of its parameters.
            averaging: add a row for the mean of the gradients.
            worker_updates: the module permits updates that workers make themselves.
            on_device: it copies the masters to its device, while updates are made.
        """
        worker_updates = worker_updates and self.bells is not None
        arena = self.memory.map(Share(layout, averaging, worker_updates, on_device))
        store = made_store(
            layout, self.n_workers, needs, averaging, arena, worker_updates, on_devices=on_device
        )
        parts = (self.bells, self._log, stepped, self.memory.borrow_flat, self.stats)
        self.steps.choose(made_maker(self.worker, store, *parts))
        return store

    def install(self, request: Install) -> None:
        """Send the optimizers; waits for all workers."""
        self._requests.ask(request, Done)
        self.steps.reach(request.version)
        self.steps.maker.begin(request.last)

    # ---- steps ----------------------------------------------------------------------------------

    def begin(self, writes: Writes) -> int:
        """Wait for this worker's turn; returns the version to begin from."""
        version: int = self._requests.ask(Begin(writes), Released, True)[0].version
        self.steps.reach(version)
        return version

    def average(self, request: Average) -> Averaged:
        """Request the mean of all workers' gradients; this one's lies in its row."""
        return self._requests.ask(request, Averaged, True)[0]

    def push(self, push: Push) -> Released:
        """Push the gradient in the row, and wait for the release."""
        released: list[Released] = []
        self.pushes.offer(push, released.append)
        self.pushes.settle()
        return released[0]

    def pull(self, writes: Writes | None = None, alike: bool = False) -> int:
        """Update this worker's parameters; returns their version."""
        version: int = self._requests.ask(Pull(writes or {}, alike), Released)[0].version
        self.steps.read(version)
        return version

    def await_masters(self) -> None:
        """Wait until the masters have every update that is due, and may be read."""
        self._requests.ask(Pull(looks=True), Done)

    # ---- meeting, reading, stopping -------------------------------------------------------------

    def gather(self, tag: str, item: Any, **kind: Any) -> list[Any]:
        """Exchange items with all workers; returns them in the order of the workers.

        For the ``kind`` of meeting, see ``Gather``.
        """
        if self.group.solo or self.n_workers == 1:
            return [item]
        request = Gather(tag, pickled(item), **kind)
        while (reply := self._requests.ask(request, Gathered)[0]).join:
            self.listeners.come(reply.join)
        self.group.meet(reply.workers, reply.remaining)
        # From another worker, over inherited sockets and between hosts over authenticated ones.
        return [pickle.loads(each) for each in reply.payloads]

    def stats(self) -> dict[str, Any]:
        """See :meth:`hybridtrain.engine.server.run_statistics.RunStatistics.stats`."""
        self.pushes.settle()
        self.line.send(ReadStats())  # alone: when it is sent depends on clocks, and is not recorded
        return self.inbox.answer(Stats)[0].values

    def note(self, note: Note) -> None:
        """Send a message that has no answer."""
        self.line.send(note)
        self.steps.maker.log.noted()

    def check_stop(self) -> None:
        """Stop if the server has asked for it; called between mini-batches.

        Raises:
            StopRequested: if so.
        """
        group = self.group
        if group.solo and not group.joins:  # a joining worker meets no other, but can be stopped
            return
        if not self.steps.computes_on:
            self.pushes.await_offered()
        self.inbox.receive_all()
        if self.inbox.must_stop:
            self.pushes.settle()  # other workers may have made the step of the offered push
            raise StopRequested
