"""A world in virtual time: one process, thousands of workers, a clock that jumps.

Theory of operation. A heap holds when each worker's next contribution will reach the server. The
world takes the earliest, turns the clock there, and hands the worker's push to the very server that
serves real processes, with the same policy and the same update code; whoever is released begins
anew from the parameters as they are then. What lies between the two, and what else happens, is
told by the :class:`Conditions`. Nothing waits and nothing depends on this machine's speed, so a run
is the same for its seed, down to the last bit. With a *task* gradients are real; without one only
time is simulated.

What is due at the same moment goes in this order: timers of the policy, ends of updates, the
script, workers by their numbers.

Legend: P elements of one dtype's buffer, W workers.
"""

from __future__ import annotations

import heapq
import math
import sys

import torch

from hybridtrain.errors import UserError
from hybridtrain.exchanges import Exchange, exchange_of
from hybridtrain.policies import Policy
from hybridtrain.protocol.messages import Begin, Gather, Gathered, Push, Refused, Released
from hybridtrain.protocol.server_events import (
    Admitted,
    Event,
    Received,
    Removed,
    TimerExpired,
    UpdateEnded,
)
from hybridtrain.server.server import Server
from hybridtrain.updates.named import NamedUpdate
from hybridtrain.updates.staleness import Correction
from hybridtrain.worlds.virtual.conditions import Conditions
from hybridtrain.worlds.virtual.curve import Curve
from hybridtrain.worlds.virtual.epoch_source import register_workers
from hybridtrain.worlds.virtual.script import Dies, Finish, Joins
from hybridtrain.worlds.virtual.service_times import Times
from hybridtrain.worlds.virtual.training_task import MakeOptimizer, SimulatedReplicas, Task

# When, which worker, the number of what it does (an older one will not happen), and what. Events of
# the script have negative numbers in the worker's place, so that they come first; ends of updates
# the least.
Due = tuple[float, int, int, Push | Begin | Gather | Dies | Joins | UpdateEnded]
_THE_SERVER = -sys.maxsize

INWARDS, OUTWARDS = 0, 1


class VirtualWorld:
    """Workers that take turns by the clock.

    Args:
        policy: when a contribution counts.
        n_workers: W, those that join later included.
        times: how long a worker computes.
        batch_size: samples of each mini-batch, where the task does not say.
        seed: of the service times.
        task: what is trained, with ``optimizer``; without one, only time passes.
        optimizer: makes the user's optimizer for the task's parameters.
        conditions: the network, what happens to workers, and whether they can be interrupted.
        correction: of late gradients.
        exchange: what workers hand over; else what goes with the policy.
        update: how the masters move; else as the exchange wants it.

    Raises:
        UserError: if the policy or the script makes no sense for so many workers.
    """

    def __init__(
        self,
        policy: Policy,
        n_workers: int,
        times: Times,
        batch_size: int = 1,
        seed: int = 0,
        task: Task | None = None,
        optimizer: MakeOptimizer | None = None,
        conditions: Conditions | None = None,
        correction: Correction | None = None,
        exchange: Exchange | None = None,
        update: NamedUpdate | None = None,
    ) -> None:
        self.now_s = 0.0
        self.events = 0  # contributions that have reached the server
        self.epochs = 0  # that all have ended
        self.interrupted = 0  # mini-batches that were begun anew
        self.network_s = 0.0  # spent under way, by all workers together
        self.curve = Curve()  # of the losses, where there are some
        exchange = exchange or exchange_of(policy)
        self.server = Server(policy, n_workers, 1, lambda: self.now_s, correction, exchange)
        self._contribution = Push(0, float(batch_size))
        self._draws = [times.stream(worker, seed) for worker in range(n_workers)]
        self._due: list[Due] = []
        self._doing = [0] * n_workers  # the number of what the worker does
        self._under = conditions or Conditions()
        self._interrupts = self._under.interrupt and self.server.requirements.drops_late
        self._read: dict[int, int] = {}  # who computes, where it matters -> version it has read
        self._work: dict[int, Push] = {}  # what the worker will push, where they differ
        self._asked: set[int] = set()  # who waits for its turn
        self._in_link: set[int] = set()  # whose contribution passes the server's link
        self._link_s = [0.0, 0.0]  # until when the server's link is busy, inwards and outwards
        self._met: Gathered | None = None  # what the last meeting came to
        self._update_s = self._under.update_s
        self._ending: int | None = None  # the update whose end is due
        self._replicas, self._source = register_workers(
            self.server, task, optimizer, n_workers, exchange, update, self._update_s > 0
        )
        self._at_once = self._source is None and not self.server.requirements.takes_turns
        self._start(n_workers)

    def _start(self, n_workers: int) -> None:
        """At time 0 everybody who is there has the parameters and computes."""
        script = self._under.script
        script.check(n_workers)
        finishes = ((worker, script.finish(worker)) for worker in range(n_workers))
        self._finish: dict[int, Finish] = {w: finish for w, finish in finishes if finish}
        self._load_s = self._under.network.loaded_s
        self._passing_s = self._under.network.passing_s
        comings, absent = script.comings, script.absent()
        self._due += [(event.at_s, n - len(comings), 0, event) for n, event in enumerate(comings)]
        self.server.statistics.start()
        for worker in sorted(absent):
            self._on(Removed(worker))
        for worker in range(n_workers):
            if worker not in absent:
                self._go_on(worker, self.now_s)

    def parameters(self) -> list[torch.Tensor]:
        """The masters as they are now, copied."""
        return [] if self._replicas is None else self._replicas.masters()

    # ---- time -----------------------------------------------------------------------------------

    def run(
        self,
        updates: float = math.inf,
        until_s: float = math.inf,
        mini_batches: float = math.inf,
        epochs: float = math.inf,
    ) -> None:
        """Go on until so much has been done in all (and an update made), or that time has come.

        Raises:
            UserError: if nothing would ever happen again, or the server refuses something.
        """
        statistics = self.server.statistics
        while statistics.version < updates and (
            self.events < mini_batches or not statistics.version
        ):
            if self.epochs >= epochs:
                return
            if until_s != math.inf and self._next_s() > until_s:
                return
            self._step()

    def _next_s(self) -> float:
        wake_s = self.server.wake_at_s
        due_s = self._due[0][0] if self._due else math.inf
        return due_s if wake_s is None else min(wake_s, due_s)

    def _step(self) -> None:
        """The next thing happens."""
        before = self.server.statistics.version
        self._happens()
        if self.server.statistics.version > before:
            self._updated()

    def _happens(self) -> None:
        wake_s = self.server.wake_at_s
        if wake_s is not None and (not self._due or wake_s <= self._due[0][0]):
            self.now_s = max(self.now_s, wake_s)
            self._on(TimerExpired())
            return
        if not self._due:
            raise UserError("nobody is left who computes: all workers have died, or wait for ever")
        at_s, worker, number, what = heapq.heappop(self._due)
        if worker >= 0 and number != self._doing[worker]:
            return  # it was interrupted, or is dead
        self.now_s = at_s
        match what:
            case Push():
                self._arrive(worker, number, what)
            case Gather():
                self.server.statistics.waits(worker)
                self._on(Received(worker, what))
            case Begin():
                self._on(Received(worker, what))
            case UpdateEnded():
                self._on(what)
            case Dies():
                self._die(what.worker)
            case Joins():
                self._join(what.worker)

    def _die(self, worker: int) -> None:
        self._doing[worker] += 1
        self._read.pop(worker, None)
        self._work.pop(worker, None)
        self._asked.discard(worker)
        self._in_link.discard(worker)
        self._on(Removed(worker))

    def _join(self, worker: int) -> None:
        if self._source is not None:
            self._source.admit(worker)
        self._on(Admitted(worker))

    # ---- workers --------------------------------------------------------------------------------

    def _released(self, worker: int) -> None:
        """The server lets the worker go on; the parameters are on their way."""
        if self._replicas is not None:
            self._replicas.take(worker)
        if self._at_once and not self._passing_s:
            self._compute(worker, self.now_s + self._load_s, self._contribution)
            return
        if self.server.requirements.takes_turns and worker not in self._asked:
            self._go_on(worker, self.now_s + self._under.network.latency_s)  # without a load
            return
        sent_s = self._passes_s(OUTWARDS) if self._passing_s else self.now_s
        self._go_on(worker, sent_s + self._load_s)

    def _go_on(self, worker: int, at_s: float) -> None:
        """From ``at_s`` on the worker can begin its next mini-batch, or what it was interrupted in.

        It may first have to ask for its turn, or find that the epoch has ended.
        """
        push: Push | None = self._contribution
        if self._source is not None:
            push = self._work.get(worker) or self._source.next(worker)
        latency_s = self._under.network.latency_s
        if push is None:
            assert self._source is not None and self._replicas is not None
            if (rest := self._replicas.flush(worker)) is not None:
                self._plan(at_s + latency_s, worker, rest)
                return
            self._plan(at_s + latency_s, worker, Gather(self._source.tag, b""))
            return
        if self._source is not None:
            self._work[worker] = push
        if self.server.requirements.takes_turns and worker not in self._asked:
            self._asked.add(worker)
            self._plan(at_s + latency_s, worker, Begin())
            return
        self._asked.discard(worker)
        self._compute(worker, at_s, push)

    def _compute(self, worker: int, begin_s: float, push: Push) -> None:
        """The worker computes, and sends what comes of it.

        Who is due at the same moment as others goes by its number.
        """
        work_s = self._draws[worker]()
        end_s = begin_s + work_s
        if worker in self._finish:
            end_s = self._finish[worker](begin_s, work_s)
        self.network_s += begin_s - self.now_s + self._load_s
        if self._interrupts:
            self._read[worker] = self.server.statistics.version
        self._plan(end_s + self._load_s, worker, push)

    def _plan(self, at_s: float, worker: int, what: Push | Begin | Gather) -> None:
        """The worker does this, and what it was to do before will not happen."""
        number = self._doing[worker] = self._doing[worker] + 1
        heapq.heappush(self._due, (at_s, worker, number, what))

    def _arrive(self, worker: int, number: int, push: Push) -> None:
        """A contribution has come over the worker's link; the server's own may be busy."""
        if self._passing_s and worker not in self._in_link:
            self._in_link.add(worker)
            through_s = self._passes_s(INWARDS)
            self.network_s += through_s - self.now_s
            heapq.heappush(self._due, (through_s, worker, number, push))
            return
        self._in_link.discard(worker)
        self.events += 1
        if self._replicas is not None:
            finished = self._finished(worker, push, self._replicas)
            if finished is None:  # nothing leaves the worker, which goes on by itself
                self._go_on(worker, self.now_s)
                return
            push = finished
        self._read.pop(worker, None)
        self._on(Received(worker, push))

    def _updated(self) -> None:
        if self._source is not None:
            self._source.updated(self.server.statistics.version)
        if self._read:
            self._interrupt()

    def _passes_s(self, way: int) -> float:
        """When what comes to the server's link now has passed it."""
        self._link_s[way] = max(self._link_s[way], self.now_s) + self._passing_s
        return self._link_s[way]

    def _finished(self, worker: int, push: Push, replicas: SimulatedReplicas) -> Push | None:
        """What the worker has computed, at its own parameters, if it is handed over."""
        if self._work.pop(worker, None) is None and self._source is not None:
            return push  # the rest of an epoch, computed already
        computed = replicas.compute(worker, push) if push.weight > 0 else push
        if computed is None:
            return None
        if computed.loss is not None:
            self.curve.add(self.now_s, computed.loss)
        return computed if self._source is None else self._source.told(computed)

    def _on(self, event: Event) -> None:
        """The server is told, and workers hear what it answers."""
        for worker, reply in self.server.on(event):
            if isinstance(reply, Released):
                self._released(worker)
            elif isinstance(reply, Gathered):
                self._begin_epoch(worker, reply)
            elif isinstance(reply, Refused):
                raise UserError(reply.reason)
        if self._update_s and (ticket := self.server.under_way) not in (None, self._ending):
            self._ending = ticket
            end = UpdateEnded(ticket)
            heapq.heappush(self._due, (self.now_s + self._update_s, _THE_SERVER, ticket, end))

    def _begin_epoch(self, worker: int, reply: Gathered) -> None:
        """All have met, and the worker goes on with the newest parameters."""
        if self._source is not None and reply is not self._met:
            self._met = reply
            self._source.meet()
            self.epochs += 1
        self._on(Admitted(worker))

    def _interrupt(self) -> None:
        """Those who compute for a round that is over begin anew, with the newest parameters."""
        version = self.server.statistics.version
        for worker in sorted(w for w, read in self._read.items() if read < version):
            self.interrupted += 1
            self._in_link.discard(worker)
            self._on(Admitted(worker))
