"""Discrete-event simulation in virtual time: one process, thousands of workers.

Theory of operation. A heap holds when each worker ends its mini-batch, and when its message will
reach the server. The world takes the earliest event, sets the clock, and passes the worker's push
to the same server, policy and update code that serve real processes; a released worker computes at
the parameters of that time. :class:`Conditions` give the network and the script. A run does not
depend on this machine's speed, and has the same bits for the same seed. With a *task* gradients are
real; without one only time is simulated.

Order of simultaneous events: timers of the policy, ends of updates, the script, workers by number.

Legend: P elements of one dtype's buffer, W workers.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hybridtrain.engine.exchanges import Await, Exchange, exchange_of
from hybridtrain.engine.policies import Policy
from hybridtrain.engine.protocol.events import (
    Admitted,
    Event,
    Received,
    Removed,
    TimerExpired,
    UpdateDue,
)
from hybridtrain.engine.protocol.messages import (
    Begin,
    Claim,
    Claimed,
    Gather,
    Gathered,
    GradientPush,
    Overtaken,
    Push,
    Refused,
    Released,
)
from hybridtrain.engine.server.rounds import Replies
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.server.timeline import Timeline
from hybridtrain.engine.updates.named import NamedUpdate
from hybridtrain.engine.updates.staleness import Correction
from hybridtrain.errors import UserError
from hybridtrain.virtual.curve import Curve
from hybridtrain.virtual.epoch_source import register_workers
from hybridtrain.virtual.network import Conditions, HostLinks, Links
from hybridtrain.virtual.script import Dies, Joins
from hybridtrain.virtual.service_times import TimeSource
from hybridtrain.virtual.training_task import MakeOptimizer, Task, Untrained


class MessageArrival(NamedTuple):
    """A worker's message reaches the server."""

    said: Push | Begin | Gather


class Free(NamedTuple):
    """The server has made an update, or handled an event that waited for one."""


@dataclass(slots=True)
class BusyServer:
    """Replies and further events of the server, held until its update has ended.

    Args:
        replies: to be sent at the end of the update; ``None`` once that has ended.
        waiting: events, each with its time of arrival.
    """

    replies: Replies | None = None
    waiting: deque[tuple[float, Event]] = field(default_factory=deque)

    def forget(self, worker: int) -> None:
        """The worker has died: drop its waiting events, and replies to it."""
        if self.replies is not None:
            self.replies = [each for each in self.replies if each[0] != worker]
        kept = [each for each in self.waiting if getattr(each[1], "worker", None) != worker]
        self.waiting = deque(kept)


# Time, worker, number of its activity (events of older ones are ignored), and event; a plain push:
# the worker has computed it. Events of the script have negative numbers in place of the
# worker's, so that they come first; ends of updates the least.
Due = tuple[float, int, int, Push | MessageArrival | Dies | Joins | Free]
A_SERVER = -sys.maxsize


class ComputingOn:
    """Workers that compute on after a push, and the answers that they have not taken."""

    def __init__(self) -> None:
        self._offers = 0  # so far
        self._unanswered: dict[int, int] = {}  # worker -> number of its push
        self._there_s: dict[int, float] = {}  # worker -> arrival time of its answer
        self._awaits: set[int] = set()

    def offers(self, worker: int) -> None:
        """The worker computes on after a push."""
        self._offers += 1
        self._unanswered[worker] = -self._offers

    def number(self, worker: int) -> int | None:
        """The number of its unanswered push, below 0; ``None``: it has none."""
        return self._unanswered.get(worker)

    def answered(self, worker: int, at_s: float) -> bool:
        """The answer arrives at ``at_s``; whether the worker waits for it already."""
        self._unanswered.pop(worker)
        self._there_s[worker] = at_s
        awaited = worker in self._awaits
        self._awaits.discard(worker)
        return awaited

    def awaits(self, worker: int) -> bool:
        """The worker needs the answer; whether it must wait for it."""
        if worker in self._unanswered:
            self._awaits.add(worker)
            return True
        return False

    def take_s(self, worker: int, now_s: float) -> float:
        """When the worker takes the answer."""
        return max(now_s, self._there_s.pop(worker, now_s))

    def forget(self, worker: int) -> None:
        """The worker has died."""
        self._unanswered.pop(worker, None)
        self._awaits.discard(worker)
        self._there_s.pop(worker, None)


class VirtualWorld:
    """Simulates W workers and their server.

    Args:
        policy: decides when gradients are applied.
        n_workers: W, with those that join later.
        times: service times of the workers.
        batch_size: samples of each mini-batch, without a task.
        seed: of the service times.
        task: computes gradients, for ``optimizer``; without one, only time is simulated.
        optimizer: makes the user's optimizer for the task's parameters.
        conditions: the network, and what happens to workers.
        correction: of stale gradients.
        exchange: by default the policy's.
        update: the masters' optimizer; by default the exchange's.
        timeline: to be filled.
        epoch: samples after which all workers meet, without a task; ``None``: they never do.

    Raises:
        UserError: if the policy or the script makes no sense for so many workers.
    """

    def __init__(
        self,
        policy: Policy,
        n_workers: int,
        times: TimeSource,
        batch_size: int = 1,
        seed: int = 0,
        task: Task | None = None,
        optimizer: MakeOptimizer | None = None,
        conditions: Conditions | None = None,
        correction: Correction | None = None,
        exchange: Exchange | None = None,
        update: NamedUpdate | None = None,
        timeline: Timeline | None = None,
        epoch: int | None = None,
    ) -> None:
        self._timeline = timeline
        self.now_s = self._heard_s = 0.0  # and the time of the server's last event
        self.events = 0  # gradients that have reached the server
        self.epochs = 0  # completed by all workers
        self.interrupted = 0  # mini-batches that were interrupted
        self.network_s = 0.0  # time of messages, summed over workers
        self.curve = Curve()  # of the losses, if the task has any
        self._handling: tuple[float, int] | None = None  # time of the event, and version
        exchange = exchange or exchange_of(policy)
        self._under = conditions or Conditions()
        merge = None if update is None else update.merge
        self.server = ParameterServer(
            policy, n_workers, 1, self._clock, correction, exchange, merge, timeline
        )
        self._contribution = GradientPush(0, float(batch_size))
        self._draws = [times.stream(worker, seed) for worker in range(n_workers)]
        self._turns = self.server.requirements.takes_turns
        lessons = None if epoch is None else Untrained(epoch, batch_size, n_workers)
        self._replicas, self._source = register_workers(
            self.server, task, optimizer, n_workers, exchange, update, self._under.visits, lessons
        )
        self._alone = self._replicas is not None and self._replicas.train_alone
        self._varies = self._replicas is not None and self._replicas.varies
        self._at_once = self._source is None and not self._turns
        self.links = self._made_links(n_workers)
        self._direct = self._replicas is None or not self.links.loaded_s  # pushes take no time
        self._start(n_workers)

    def _made_links(self, n_workers: int) -> Links:
        network = self._under.network
        if network.hosts == 1:
            return Links(network)
        wants = self.server.requirements
        return HostLinks(network, n_workers, wants.whole_rounds, wants.everyone)

    def _start(self, n_workers: int) -> None:
        """All workers but the absent ones begin to compute at time 0."""
        self._doing = [0] * n_workers  # number of the worker's activity
        self._begun, self._factors = 0, 0.0  # mini-batches, and the sum of their contention
        self._n_met = n_workers  # in the last meeting; they begin together
        self._together = 0  # that begin now, if not those that the server releases
        self._factor = self._under.contention.longer(n_workers)
        self._version = 0  # updates that the server has completed
        self._busy: BusyServer | None = None  # while it makes an update
        self.update_s = self._under.update_s
        self._interrupts = self._under.interrupt and self.server.requirements.drops_late
        self._on_its_own = ComputingOn()
        self._met: Gathered | None = None  # the result of the last meeting
        self._read: dict[int, int] = {}  # computing worker -> version it read, for interrupts
        self._work: dict[int, Push] = {}  # worker -> its next push, with a task
        self._asked: set[int] = set()  # workers that wait for their turn
        self._to_ask = set(range(n_workers)) if self.server.requirements.asks else set[int]()
        script = self._under.script
        self._finish = script.finishes(n_workers)
        comings, absent = script.comings, script.absent()
        self._due: list[Due] = [(x.at_s, n - len(comings), 0, x) for n, x in enumerate(comings)]
        self.server.statistics.start()
        for worker in sorted(absent):
            if self._source is not None:
                self._source.leave(worker)
            self._on(Removed(worker))
        for worker in range(n_workers):
            if worker not in absent:
                self._go_on(worker, self.now_s)

    def parameters(self) -> list[torch.Tensor]:
        """Copies of the current masters."""
        return [] if self._replicas is None else self._replicas.masters()

    @property
    def mean_contention(self) -> float:
        """Times as long as drawn that an ordinary worker's mini-batches took."""
        return self._factors / self._begun

    # ---- time -----------------------------------------------------------------------------------

    def run(
        self,
        updates: float = math.inf,
        until_s: float = math.inf,
        mini_batches: float = math.inf,
        epochs: float = math.inf,
    ) -> None:
        """Simulate until one of these totals (with at least one update) or this time is reached.

        Raises:
            UserError: if no event is left, or the server refuses a message.
        """
        while self._version < updates and self.epochs < epochs:
            if self.events >= mini_batches and self._version:
                return
            if until_s != math.inf and self.next_s > until_s:
                return
            self._step()

    @property
    def next_s(self) -> float:
        """The time of the next event, until which nothing changes."""
        due_s = self._due[0][0] if self._due else math.inf
        return min(self._wake_s, due_s)

    @property
    def _wake_s(self) -> float:
        """When the policy's timer is due; a server that makes an update does not hear it."""
        wake_s = None if self._busy else self.server.wake_at_s
        return math.inf if wake_s is None else wake_s

    def _step(self) -> None:
        """Handle the next event, and its consequences for schedules and interrupts."""
        before = self._version
        self._happens()
        if self._version > before:
            if self._source is not None:
                self._source.updated(self._version)
            if self._read:
                self._interrupt()

    def _happens(self) -> None:
        wake_s = self._wake_s
        due_s, foresees = self._due[0][0] if self._due else math.inf, self._under.foresight
        if wake_s < due_s or (wake_s == due_s < math.inf and not foresees):
            self.now_s = self._heard_s if foresees else max(self.now_s, wake_s)
            self._on(TimerExpired())
            return
        if not self._due:
            raise UserError("nobody is left who computes: all workers have died, or wait for ever")
        at_s, worker, number, what = heapq.heappop(self._due)
        if worker >= 0 and number not in (self._doing[worker], self._on_its_own.number(worker)):
            return  # the activity was interrupted, or the worker has died
        self.now_s = at_s
        match what:
            case Push():
                self._end_mini_batch(worker, what)
            case MessageArrival():
                self._arrive(worker, what.said)
            case Free():
                self._free()
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
        self.links.forget(worker)
        if self._busy is not None:
            self._busy.forget(worker)
        if self._replicas is not None:
            self._replicas.lose(worker)
        if self._source is not None:
            self._source.leave(worker)
        self._on(Removed(worker))

    def _join(self, worker: int) -> None:
        if self._source is not None:
            self._source.admit(worker)
        if self._replicas is not None:
            self._replicas.join(worker)
        self._on(Admitted(worker))

    # ---- workers --------------------------------------------------------------------------------

    def _released(self, worker: int) -> None:
        """The server has released the worker; send it the parameters."""
        loaded = not self._turns or worker in self._asked
        at_s = self.links.back_s(worker, self.now_s, loaded, self._version)
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
        """The worker takes the answer to its earlier push, and continues."""
        assert self._replicas is not None, "workers have their own parameters"
        at_s = self._on_its_own.take_s(worker, self.now_s)
        self._leaves(worker, self._replicas.take(worker), at_s)

    def _leaves(
        self, worker: int, made: Push | Await | None, at_s: float, at_once: bool = False
    ) -> None:
        """The worker sends its push, if any, and continues if it can."""
        if isinstance(made, Await):
            if self._on_its_own.awaits(worker):
                self.server.statistics.awaits(worker)
            else:
                self._take(worker)
            return
        if made is not None:
            said = made if self._source is None else self._source.told(worker, made)
            if not said.waits:
                self._on_its_own.offers(worker)
            self._arrive(worker, said) if at_once else self._say(worker, said, at_s)
            if said.waits:
                return
        self._work.pop(worker, None)
        self._go_on(worker, at_s)

    def _go_on(self, worker: int, at_s: float) -> None:
        """At ``at_s`` the worker begins its next or interrupted mini-batch.

        It may first have to ask for its turn, or meet the others at the end of the epoch.
        """
        push: Push | None = self._contribution
        if self._source is not None:
            push = self._work.get(worker) or self._source.next(worker)
        if push is None:
            assert self._source is not None
            rest = None if self._replicas is None else self._replicas.flush(worker)
            if rest is None:
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
        """The worker computes from ``begin_s`` on."""
        work_s = self._draws[worker]() * self._under.contention.of(worker, self._factor)
        self._begun += 1
        self._factors += self._factor
        end_s = begin_s + work_s
        if worker in self._finish:
            end_s = self._finish[worker](begin_s, work_s)
        row_s = 0.0 if self._varies else self.links.row_s  # else counted when it pushes
        self.network_s += begin_s - self.now_s + row_s
        if self._interrupts:
            self._read[worker] = self._version
        number = self._doing[worker] = self._doing[worker] + 1
        at_s = end_s + self.links.row_s if self._direct else end_s
        heapq.heappush(self._due, (at_s, worker, number, push))

    def _end_mini_batch(self, worker: int, push: Push) -> None:
        """The worker has ended its mini-batch, and pushes."""
        if self.server.requirements.backs_up and not self._counts(worker, push):
            return
        made: Push | Await | None = push
        if (replicas := self._replicas) is not None and push.weight > 0:
            made = replicas.compute(worker, push)
            loss = made.loss if isinstance(made, Push) else replicas.loss
            if loss is not None:
                self.curve.add(self.now_s, loss, self.server.statistics.sent_bytes)
        self.events += self._alone
        if self._alone and self._timeline is not None:
            self._timeline.stepped(worker, self.now_s)
        self._leaves(worker, made, self.now_s, at_once=self._direct)
        if self._source is not None and push.weight > 0:
            self._source.stepped(worker)

    def _counts(self, worker: int, push: Push) -> bool:
        """Whether the worker's answer to its mini-batch is the first; the others break off."""
        replies = self.server.on(Received(worker, Claim(push.covers[0])))
        for other, reply in replies:
            if isinstance(reply, Overtaken):
                self._break_off(other)
        return any(isinstance(reply, Claimed) and reply.counts for _, reply in replies)

    def _break_off(self, worker: int) -> None:
        """Another worker has processed this one's mini-batch."""
        self.interrupted += 1
        self._doing[worker] += 1
        del self._work[worker]
        if self._timeline is not None:
            self._timeline.interrupted(worker, self.now_s)
        self._go_on(worker, self.now_s)

    def _say(self, worker: int, said: Push | Begin | Gather, at_s: float) -> None:
        """At ``at_s`` the worker sends a message; a new activity begins."""
        if (number := self._on_its_own.number(worker)) is None:
            number = self._doing[worker] = self._doing[worker] + 1
        way_s = self.links.latency_s(worker)
        if isinstance(said, Push):
            way_s = self.links.own_s(self._bytes_of(said))
            self.network_s += way_s * self._varies
        heapq.heappush(self._due, (at_s + way_s, worker, number, MessageArrival(said)))

    def _bytes_of(self, push: Push) -> int:
        if self._replicas is None or not self._varies:
            return self.links.row_bytes
        return self._replicas.bytes_of(push)

    def _arrive(self, worker: int, said: Push | Begin | Gather) -> None:
        """A message has passed the worker's link; it may queue for the server's link."""
        if isinstance(said, Push):
            through_s = self.links.enters_s(worker, self.now_s, self._bytes_of(said))
            if through_s is not None:
                self.network_s += through_s - self.now_s
                number = self._on_its_own.number(worker) or self._doing[worker]
                heapq.heappush(self._due, (through_s, worker, number, MessageArrival(said)))
                return
            self.events += not self._alone
            self._read.pop(worker, None)
            if said.waits:
                self._work.pop(worker, None)
        elif isinstance(said, Gather):
            self.server.statistics.waits(worker)
        self._on(Received(worker, said))

    # ---- the server -----------------------------------------------------------------------------

    def _clock(self) -> float:
        """The server's clock: the time of arrival of an event, then of the end of its update.

        Of a release ahead of the update: when the server is free.
        """
        if self._handling is None:
            return self.now_s
        told_s, version = self._handling
        made = self.server.statistics.version - version
        if made:
            return self.now_s + made * self.update_s
        return self.now_s if self.server.update_is_due else told_s

    def _on(self, event: Event) -> None:
        """The server handles the event, now or when it has made its update."""
        if self._busy is not None:
            self._busy.waiting.append((self.now_s, event))
        else:
            self._handle(event, self.now_s)

    def _handle(self, event: Event, told_s: float) -> None:
        """The server handles the event, and sends its replies when it has made the updates."""
        server, self._heard_s = self.server, self.now_s
        self._together = self._n_met if isinstance(event, Admitted) else 0
        before = server.statistics.version
        self._handling = (told_s, before) if self.update_s else None
        replies = server.on(event)
        self._handling = None
        end_s = self.now_s + self.update_s * (server.statistics.version - before)
        if end_s == self.now_s:
            self._answer(replies)
            if server.update_is_due:
                self._handle(UpdateDue(), told_s)
            return
        self._busy = self._busy or BusyServer()
        self._busy.replies = replies
        heapq.heappush(self._due, (end_s, A_SERVER, 0, Free()))

    def _free(self) -> None:
        """An update has ended, or the server is free for the next event that waits."""
        assert self._busy is not None, "it makes an update"
        busy = self._busy
        if busy.replies is not None:
            replies, busy.replies = busy.replies, None
            self._answer(replies)
        elif busy.waiting:
            told_s, event = busy.waiting.popleft()
            self._handle(event, told_s)
        if self._busy.replies is not None:
            return  # it makes another update
        if busy.waiting:
            heapq.heappush(self._due, (self.now_s, A_SERVER, 0, Free()))
        else:
            self._busy = None

    def _answer(self, replies: Replies) -> None:
        """Send the server's replies."""
        self._version = self.server.statistics.version
        if replies:
            self._factor = self._under.contention.longer(self._together or len(replies))
        for worker, reply in replies:
            if isinstance(reply, Released):
                self._released(worker)
            elif isinstance(reply, Gathered):
                self._gathered(worker, reply)
            elif isinstance(reply, Refused):
                raise UserError(reply.reason)

    def _gathered(self, worker: int, reply: Gathered) -> None:
        """All workers have met; the worker begins the next epoch with the newest parameters."""
        if self._source is not None and reply is not self._met:
            self._met, self._n_met = reply, len(reply.workers)
            self._source.meet()
            self.epochs += 1
        self._on(Admitted(worker))

    def _interrupt(self) -> None:
        """Workers whose gradients would be dropped begin anew, with the newest parameters."""
        least = self._version - self.server.requirements.max_staleness
        for worker in sorted(w for w, read in self._read.items() if read < least):
            self.interrupted += 1
            self._doing[worker] += 1
            del self._read[worker]
            self.links.forget(worker)
            self._on(Admitted(worker))
            if self._timeline is not None:
                self._timeline.interrupted(worker, self.now_s)
