"""A world in virtual time: one process, thousands of workers, a clock that jumps.

Theory of operation. A heap holds when each worker ends its mini-batch, and when what it says then
will reach the server. The world takes the earliest, turns the clock there, and hands the worker's
push to the very server that serves real processes, with the same policy and the same update code;
whoever is released begins anew from the parameters as they are then. What lies between the two, and
what else happens, is told by the :class:`Conditions`. Nothing waits and nothing depends on this
machine's speed, so a run is the same for its seed, down to the last bit. With a *task* gradients
are real; without one only time is simulated.

Where the parameters lie in several shards, each has a server. What a worker says goes to all of
them, each with its part, and the worker goes on when all have answered. The first also coordinates:
it shares out mini-batches, and what it has counted is what the run has.

What is due at the same moment goes in this order: timers of the policy, ends of updates, the
script, workers by their numbers.
"""

from __future__ import annotations

import heapq
import math
from functools import partial

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
from hybridtrain.worlds.virtual.due import A_SERVER, Arrival, Due
from hybridtrain.worlds.virtual.epoch_source import register_workers
from hybridtrain.worlds.virtual.network import INWARDS, OUTWARDS
from hybridtrain.worlds.virtual.script import Dies, Finish, Joins
from hybridtrain.worlds.virtual.service_times import Times
from hybridtrain.worlds.virtual.sharding import Answers, check_shards, first_timer, servers_of
from hybridtrain.worlds.virtual.training_task import MakeOptimizer, SimulatedReplicas, Task


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
        self._met: Gathered | None = None  # what the last meeting came to
        self._read: dict[int, int] = {}  # who computes, where it matters -> version it has read
        self._work: dict[int, Push] = {}  # what the worker will push, where they differ
        self._asked: set[int] = set()  # who waits for its turn
        self._in_link: set[tuple[int, int]] = set()  # whose contribution passes which server's link
        script = self._under.script
        script.check(n_workers)
        self._due: list[Due] = []
        finishes = ((worker, script.finish(worker)) for worker in range(n_workers))
        self._finish: dict[int, Finish] = {w: finish for w, finish in finishes if finish}
        comings, absent = script.comings, script.absent()
        self._due += [(each.at_s, n - len(comings), 0, 0, each) for n, each in enumerate(comings)]
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
        while statistics.version < updates and (
            self.events < mini_batches or not statistics.version
        ):
            if self.epochs >= epochs:
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
        if worker >= 0 and number != self._doing[worker]:
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
        self._in_link -= {(worker, shard) for shard in range(len(self.servers))}
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
        links = self._links[shard]
        if self._turns and worker not in self._asked:
            at_s = self.now_s + links.latency_s  # without a load
        else:
            passing_s = links.passing_s
            sent_s = links.passed_s(OUTWARDS, self.now_s, passing_s) if passing_s else self.now_s
            at_s = sent_s + links.loaded_s
            if links.mean_s:
                at_s += links.delay_s(worker)
        if len(self.servers) > 1:
            answers = self._answers[worker]
            if not answers.all_there(shard, self.now_s, at_s):
                return
            self.network_s += self.now_s - answers.first_s
            at_s = answers.at_s
        if self._replicas is not None and (follows := self._replicas.take(worker)) is not None:
            self._say(worker, follows, at_s)
        elif self._at_once:
            self._compute(worker, at_s, self._contribution)
        else:
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
            rest = self._replicas.flush(worker)
            self._say(worker, Gather(self._source.tag, b"") if rest is None else rest, at_s)
            return
        if self._source is not None:
            self._work[worker] = push
        if self._turns and worker not in self._asked:
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
        made = push if self._replicas is None else self._finished(worker, push, self._replicas)
        self.events += self._alone
        if made is None:  # nothing leaves the worker, which goes on by itself
            self._work.pop(worker, None)
            self._go_on(worker, self.now_s)
        elif self._direct:
            self._arrive(worker, 0, made)
        else:
            self._say(worker, made, self.now_s)

    def _finished(self, worker: int, push: Push, replicas: SimulatedReplicas) -> Push | None:
        """What the worker has computed, at its own parameters, if it is handed over."""
        computed = replicas.compute(worker, push) if push.weight > 0 else push
        if (loss := replicas.loss if computed is None else computed.loss) is not None:
            self.curve.add(self.now_s, loss, sum(s.statistics.sent_bytes for s in self.servers))
        if computed is None:
            return None
        return computed if self._source is None else self._source.told(computed)

    def _say(self, worker: int, said: Push | Begin | Gather, at_s: float) -> None:
        """At ``at_s`` the worker says so to all servers; what it was to do before will not happen.

        Each gets its part of a push.
        """
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
        links = self._links[shard]
        if self._replicas is None or not self._alone:
            return links.loaded_s, links.passing_s
        n_bytes = self._replicas.bytes_of(shard, part)
        return links.carries_s(n_bytes), links.passes_s(n_bytes)

    def _arrive(self, worker: int, shard: int, said: Push | Begin | Gather) -> None:
        """Something has come over the worker's link; the server's own may be busy."""
        if isinstance(said, Push):
            links, (_, passing_s) = self._links[shard], self._loads_s(shard, said)
            if passing_s and (worker, shard) not in self._in_link:
                self._in_link.add((worker, shard))
                through_s = links.passed_s(INWARDS, self.now_s, passing_s)
                self.network_s += through_s - self.now_s if shard == 0 else 0.0
                what = Arrival(said)
                heapq.heappush(self._due, (through_s, worker, self._doing[worker], shard, what))
                return
            if self._in_link:
                self._in_link.discard((worker, shard))
            if shard == 0:
                self.events += not self._alone
                self._read.pop(worker, None)
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
            self._in_link.discard((worker, 0))
            self._admit(worker)
