"""A world in virtual time: one process, thousands of workers, a clock that jumps.

Theory of operation. A heap holds when each worker ends its mini-batch, and when what it says then
will reach the server. The world takes the earliest, turns the clock there, and hands the worker's
push to the very server that serves real processes, with the same policy and the same update code;
whoever is released begins anew from the parameters as they are then. What lies between the two, and
what else happens, is told by the :class:`Conditions`. Nothing waits and nothing depends on this
machine's speed, so a run is the same for its seed, down to the last bit. With a *task* gradients
are real; without one only time is simulated.

What is due at the same moment goes in this order: timers of the policy, ends of updates, the
script, workers by their numbers.

Legend: P elements of one dtype's buffer, W workers.
"""

from __future__ import annotations

import heapq
import math
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from hybridtrain.errors import UserError
from hybridtrain.exchanges import Await, Exchange, exchange_of
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
from hybridtrain.worlds.virtual.epoch_source import register_workers
from hybridtrain.worlds.virtual.script import Dies, Joins
from hybridtrain.worlds.virtual.service_times import Times
from hybridtrain.worlds.virtual.sharding import Answers, check_shards, first_timer, servers_of
from hybridtrain.worlds.virtual.training_task import MakeOptimizer, Task

Point = tuple[float, float, float]  # time, figure, bytes


class Arrival(NamedTuple):
    """A worker's message reaches a server."""

    said: Push | Begin | Gather


# When, which worker, the number of what it does (an older one will not happen), which shard, and
# what; a push alone: the worker has computed it. Events of the script have negative numbers in the
# worker's place, so that they come first; ends of updates the least.
Due = tuple[float, int, int, int, Push | Arrival | Dies | Joins | UpdateEnded]
A_SERVER = -sys.maxsize


@dataclass
class Curve:
    """Means over equally many figures each; neighbours are joined as soon as there are too many.

    Args:
        most: points kept at most.
    """

    most: int = 200
    _per_point: int = 1
    _sums: list[Point] = field(default_factory=list)  # of whole points
    _open: tuple[int, Point] = (0, (0.0, 0.0, 0.0))  # how many the last point has, and their sums

    def add(self, at_s: float, value: float, n_bytes: float = 0.0) -> None:
        """The next figure; times and bytes do not fall."""
        n, sums = self._open
        self._open = n + 1, (sums[0] + at_s, sums[1] + value, sums[2] + n_bytes)
        if n + 1 == self._per_point:
            self._sums.append(self._open[1])
            self._open = 0, (0.0, 0.0, 0.0)
        if len(self._sums) == self.most:
            pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
            self._sums = [(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs]
            self._per_point *= 2

    def _means(self) -> list[Point]:
        n, sums = self._open
        found = [(self._per_point, each) for each in self._sums]
        if n and (not found or 2 * n >= self._per_point):  # or chance would say how it ends
            found.append((n, sums))
        return [(t / count, v / count, b / count) for count, (t, v, b) in found]

    def points(self) -> list[tuple[float, float]]:
        """(mean time, mean figure), the last of perhaps fewer figures, but not of too few."""
        return [(at_s, value) for at_s, value, _ in self._means()]

    def over_bytes(self) -> list[tuple[float, float]]:
        """(mean bytes, mean figure), in the same way."""
        return [(n_bytes, value) for _, value, n_bytes in self._means()]


class ComputingOn:
    """Of all workers of a virtual world: offers without an answer, answers that are on their way,
    and who cannot go on without one.
    """

    def __init__(self) -> None:
        self._offers = 0  # so far
        self._unanswered: dict[int, int] = {}  # the number of each
        self._there_s: dict[int, float] = {}  # when an answer that nobody has taken yet is there
        self._awaits: set[int] = set()

    def offers(self, worker: int, said: Push | Begin | Gather) -> bool:
        """Whether the worker computes on behind what it says now."""
        later = isinstance(said, Push) and said.later
        if later:
            self._offers += 1
            self._unanswered[worker] = -self._offers
        return later

    def number(self, worker: int) -> int | None:
        """Of what it has offered, below 0, as long as that is not answered."""
        return self._unanswered.get(worker)

    def answered(self, worker: int, at_s: float) -> bool:
        """The answer will be there at ``at_s``; whether the worker awaits it already."""
        self._unanswered.pop(worker)
        self._there_s[worker] = at_s
        awaited = worker in self._awaits
        self._awaits.discard(worker)
        return awaited

    def awaits(self, worker: int) -> bool:
        """The worker cannot go on without the answer; whether it has to wait for that."""
        if worker in self._unanswered:
            self._awaits.add(worker)
            return True
        return False

    def take_s(self, worker: int, now_s: float) -> float:
        """The worker takes the answer: when."""
        return max(now_s, self._there_s.pop(worker, now_s))

    def forget(self, worker: int) -> None:
        """The worker is gone."""
        self._unanswered.pop(worker, None)
        self._awaits.discard(worker)
        self._there_s.pop(worker, None)


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
        self.now_s = self._heard_s = 0.0  # and when a server has last heard something
        self.events = 0  # contributions that have reached the server
        self.epochs = 0  # that all have ended
        self.interrupted = 0  # mini-batches that were begun anew
        self.network_s = 0.0  # spent under way, by all workers together
        self.curve = Curve()  # of the losses, where there are some
        exchange = exchange or exchange_of(policy)
        self._under = conditions or Conditions()
        n_shards = len(self._under.network.shards)
        make = partial(Server, n_workers=n_workers, clock=lambda: self.now_s, exchange=exchange)
        self.servers = servers_of(make, policy, correction, n_shards)
        self.server = self.servers[0]  # which coordinates
        check_shards(self.server.requirements, task, exchange, n_shards)
        self._contribution = Push(0, float(batch_size))
        self._draws = [times.stream(worker, seed) for worker in range(n_workers)]
        self._doing = [0] * n_workers  # the number of what the worker does
        self._answers = [Answers(n_shards) for _ in range(n_workers)]
        self._turns = self.server.requirements.takes_turns
        self._interrupts = self._under.interrupt and self.server.requirements.drops_late
        self._update_s = self._under.update_s
        self._ending: list[int | None] = [None for _ in self.servers]  # updates that have begun
        self._replicas, self._source = register_workers(
            self.servers, task, optimizer, n_workers, exchange, update, self._under
        )
        self._alone = self._replicas is not None and self._replicas.train_alone
        self._at_once = self._source is None and not self._turns
        shares = self._replicas.shares if self._replicas else [1 / n_shards] * n_shards
        self._links = self._under.network.links(shares, n_workers, seed)
        near = self._replicas is None or not self._links[0].loaded_s
        self._direct = n_shards == 1 and near and not self._links[0].mean_s  # computed, and there
        self._start(n_workers)

    def _start(self, n_workers: int) -> None:
        """At time 0 everybody who is there has the parameters and computes."""
        self._on_its_own = ComputingOn()
        self._met: Gathered | None = None  # what the last meeting came to
        self._read: dict[int, int] = {}  # who computes, where it matters -> version it has read
        self._work: dict[int, Push] = {}  # what the worker will push, where they differ
        self._asked: set[int] = set()  # who waits for its turn
        self._to_ask = set(range(n_workers)) if self.server.requirements.asks else set[int]()
        script = self._under.script
        self._finish = script.finishes(n_workers)
        comings, absent = script.comings, script.absent()
        self._due: list[Due] = [(x.at_s, n - len(comings), 0, 0, x) for n, x in enumerate(comings)]
        for server in self.servers:
            server.statistics.start()
        for worker in sorted(absent):
            self._tell(Removed(worker))
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
        while statistics.version < updates and self.epochs < epochs:
            if self.events >= mini_batches and statistics.version:
                return
            if until_s != math.inf and self._next_s() > until_s:
                return
            self._step()

    def _next_s(self) -> float:
        return min(first_timer(self.servers)[0], self._due[0][0] if self._due else math.inf)

    def _step(self) -> None:
        """The next thing happens."""
        before = self.server.statistics.version
        self._happens()
        if self.server.statistics.version > before:
            if self._source is not None:
                self._source.updated(self.server.statistics.version)
            if self._read:
                self._interrupt()

    def _happens(self) -> None:
        wake_s, shard = first_timer(self.servers)
        due_s, foresees = self._due[0][0] if self._due else math.inf, self._under.foresight
        if wake_s < due_s or (wake_s == due_s < math.inf and not foresees):
            self.now_s = self._heard_s if foresees else max(self.now_s, wake_s)
            self._on(shard, TimerExpired())
            return
        if not self._due:
            raise UserError("nobody is left who computes: all workers have died, or wait for ever")
        at_s, worker, number, shard, what = heapq.heappop(self._due)
        if worker >= 0 and number not in (self._doing[worker], self._on_its_own.number(worker)):
            return  # it was interrupted, or is dead
        self.now_s = at_s
        match what:
            case Push():
                self._end_mini_batch(worker, what)
            case Arrival():
                self._arrive(worker, shard, what.said)
            case UpdateEnded():
                self._on(shard, what)
            case Dies():
                self._die(what.worker)
            case Joins():
                self._join(what.worker)

    def _die(self, worker: int) -> None:
        self._doing[worker] += 1
        self._read.pop(worker, None)
        self._work.pop(worker, None)
        self._asked.discard(worker)
        self._on_its_own.forget(worker)
        for links in self._links:
            links.forget(worker)
        if self._replicas is not None:
            self._replicas.lose(worker)
        self._tell(Removed(worker))

    def _join(self, worker: int) -> None:
        if self._source is not None:
            self._source.admit(worker)
        if self._replicas is not None:
            self._replicas.join(worker)
        self._admit(worker)

    # ---- workers --------------------------------------------------------------------------------

    def _released(self, worker: int, shard: int) -> None:
        """This server lets the worker go on; the parameters are on their way."""
        loaded = not self._turns or worker in self._asked
        at_s = self._links[shard].back_s(worker, self.now_s, loaded)
        if len(self.servers) > 1:
            answers = self._answers[worker]
            if not answers.all_there(shard, self.now_s, at_s):
                return
            self.network_s += self.now_s - answers.first_s
            at_s = answers.at_s
        if self._on_its_own.number(worker) is not None:
            if self._on_its_own.answered(worker, at_s):
                self._take(worker)
        elif self._replicas is not None and (follows := self._replicas.take(worker)) is not None:
            self._leaves(worker, follows, at_s)
        elif self._at_once:
            self._compute(worker, at_s, self._contribution)
        else:
            self._go_on(worker, at_s)

    def _take(self, worker: int) -> None:
        """The worker takes the answer to what it has offered before, and goes on."""
        assert self._replicas is not None, "it trains on its own"
        at_s = self._on_its_own.take_s(worker, self.now_s)
        self._leaves(worker, self._replicas.take(worker), at_s)

    def _leaves(
        self, worker: int, made: Push | Await | None, at_s: float, at_once: bool = False
    ) -> None:
        """The worker hands this over, if it is something, and goes on if it can."""
        if isinstance(made, Await):
            if not self._on_its_own.awaits(worker):
                self._take(worker)
            return
        if made is not None:
            said = made if self._source is None else self._source.told(made)
            later = self._on_its_own.offers(worker, said)
            self._arrive(worker, 0, said) if at_once else self._say(worker, said, at_s)
            if not later:
                return
        self._work.pop(worker, None)
        self._go_on(worker, at_s)

    def _go_on(self, worker: int, at_s: float) -> None:
        """From ``at_s`` on the worker can begin its next mini-batch, or what it was interrupted in.

        It may first have to ask for its turn, or find that the epoch has ended.
        """
        push: Push | None = self._contribution
        if self._source is not None:
            push = self._work.get(worker) or self._source.next(worker)
        if push is None:
            assert self._source is not None and self._replicas is not None
            if (rest := self._replicas.flush(worker)) is None:
                self._say(worker, Gather(self._source.tag, b""), at_s)
            else:
                self._leaves(worker, rest, at_s)
            return
        if self._source is not None:
            self._work[worker] = push
        if (self._turns or worker in self._to_ask) and worker not in self._asked:
            self._to_ask.discard(worker)
            self._asked.add(worker)
            self._say(worker, Begin(), at_s)
            return
        self._asked.discard(worker)
        self._compute(worker, at_s, push)

    def _compute(self, worker: int, begin_s: float, push: Push) -> None:
        """The worker computes."""
        work_s = self._draws[worker]()
        end_s = begin_s + work_s
        if worker in self._finish:
            end_s = self._finish[worker](begin_s, work_s)
        loaded_s = 0.0 if self._alone else self._links[0].loaded_s  # alone, it may send nothing
        self.network_s += begin_s - self.now_s + loaded_s
        if self._interrupts:
            self._read[worker] = self.server.statistics.version
        number = self._doing[worker] = self._doing[worker] + 1
        at_s = end_s + self._links[0].loaded_s if self._direct else end_s
        heapq.heappush(self._due, (at_s, worker, number, 0, push))

    def _end_mini_batch(self, worker: int, push: Push) -> None:
        """The worker has come to the end of its mini-batch, and hands over what there is."""
        made: Push | Await | None = push
        if (replicas := self._replicas) is not None and push.weight > 0:
            made = replicas.compute(worker, push)
            loss = made.loss if isinstance(made, Push) else replicas.loss
            if loss is not None:
                self.curve.add(self.now_s, loss, sum(s.statistics.sent_bytes for s in self.servers))
        self.events += self._alone
        self._leaves(worker, made, self.now_s, at_once=self._direct)

    def _say(self, worker: int, said: Push | Begin | Gather, at_s: float) -> None:
        """At ``at_s`` the worker says so to all servers, each its part; what it did has ended."""
        if (number := self._on_its_own.number(worker)) is None:
            number = self._doing[worker] = self._doing[worker] + 1
        self._answers[worker].expect()
        for shard, links in enumerate(self._links):
            part, way_s = said, links.latency_s
            if isinstance(said, Push):
                part = said if self._replicas is None else self._replicas.part(shard, said)
                way_s, delay_s = self._loads_s(shard, part)[0], links.delay_s(worker)
                self.network_s += (way_s * self._alone + delay_s) if shard == 0 else 0.0
                way_s += delay_s
            heapq.heappush(self._due, (at_s + way_s, worker, number, shard, Arrival(part)))

    def _loads_s(self, shard: int, part: Push) -> tuple[float, float]:
        """How long it takes over the worker's link, and how long it holds the server's."""
        alone = self._replicas if self._alone else None
        return self._links[shard].loads_s(None if alone is None else alone.bytes_of(shard, part))

    def _arrive(self, worker: int, shard: int, said: Push | Begin | Gather) -> None:
        """Something has come over the worker's link; the server's own may be busy."""
        if isinstance(said, Push):
            passing_s = self._loads_s(shard, said)[1]
            through_s = self._links[shard].enters_s(worker, self.now_s, passing_s)
            if through_s is not None:
                self.network_s += through_s - self.now_s if shard == 0 else 0.0
                number = self._on_its_own.number(worker) or self._doing[worker]
                heapq.heappush(self._due, (through_s, worker, number, shard, Arrival(said)))
                return
            if shard == 0:
                self.events += not self._alone
                self._read.pop(worker, None)
                if not said.later:
                    self._work.pop(worker, None)
        elif isinstance(said, Gather):
            self.servers[shard].statistics.waits(worker)
        self._on(shard, Received(worker, said))

    # ---- servers --------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        """All servers are told."""
        for shard in range(len(self.servers)):
            self._on(shard, event)

    def _admit(self, worker: int) -> None:
        """The worker begins (anew) with the newest parameters."""
        self._answers[worker].expect()
        self._tell(Admitted(worker))

    def _on(self, shard: int, event: Event) -> None:
        """The server is told, and workers hear what it answers."""
        server, self._heard_s = self.servers[shard], self.now_s
        for worker, reply in server.on(event):
            if isinstance(reply, Released):
                self._released(worker, shard)
            elif isinstance(reply, Gathered):
                self._gathered(worker, shard, reply)
            elif isinstance(reply, Refused):
                raise UserError(reply.reason)
        if self._update_s:
            self._end_update(shard, server.under_way)

    def _end_update(self, shard: int, ticket: int | None) -> None:
        """If the server has begun an update, this says when it will have ended."""
        if ticket is not None and ticket != self._ending[shard]:
            self._ending[shard], at_s = ticket, self.now_s + self._update_s
            heapq.heappush(self._due, (at_s, A_SERVER, ticket, shard, UpdateEnded(ticket)))

    def _gathered(self, worker: int, shard: int, reply: Gathered) -> None:
        """All have met at this server; at the last one, the worker begins the next epoch."""
        if not self._answers[worker].all_there(shard, self.now_s, self.now_s):
            return
        if self._source is not None and reply is not self._met:
            self._met = reply
            self._source.meet()
            self.epochs += 1
        self._admit(worker)

    def _interrupt(self) -> None:
        """Those who compute for a round that is over begin anew, with the newest parameters."""
        version = self.server.statistics.version
        for worker in sorted(w for w, read in self._read.items() if read < version):
            self.interrupted += 1
            self._links[0].forget(worker)
            self._admit(worker)
