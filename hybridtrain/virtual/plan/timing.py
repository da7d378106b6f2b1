"""A strategy's timing, from its policy alone: about five times as fast as virtual time.

Theory of operation. :mod:`hybridtrain.virtual.virtual_world` passes real messages to the
real server. Here the same policy gets the same facts in the same order, but its orders are only
counted: no message, row or optimizer is made. Network and service times are those of virtual time,
so the figures are equal (``tests/plan/test_timing.py``). Deaths, joins and gradients are not known
here.

Order of simultaneous events: timers of the policy, ends of updates, workers by number.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

from hybridtrain.engine.exchanges import Exchange
from hybridtrain.engine.exchanges.requirements import Requirements, begin_policy
from hybridtrain.engine.policies import Policy
from hybridtrain.engine.protocol.facts import (
    Accumulate,
    Apply,
    Drop,
    Fact,
    Joined,
    Order,
    Pushed,
    Ready,
    Release,
    SetTimer,
    TimerFired,
    Waiting,
)
from hybridtrain.engine.server.batch_queue import end_sooner
from hybridtrain.virtual.network import HostLinks, Links, Network

Draw = Callable[[], float]


class Happens(IntEnum):
    """Kinds of events: a push has left its link or passed the queue, or a message arrives."""

    LEFT = 0
    PUSH = 1
    ASKS = 2  # a worker asks for its turn
    MEETS = 3  # a worker has reached the end of the epoch
    BEGINS = 4  # a worker has met the others
    FREE = 5  # the server has made an update
    TIMER = 6


LEFT, PUSH, ASKS, MEETS, BEGINS, FREE, TIMER = Happens
SERVER = -1  # in the place of a worker's number


@dataclass
class Account:
    """One worker's times in seconds, and the update that it has read."""

    released_s: float | None = 0.0  # while it computes
    pushed_s: float | None = None  # while it waits
    computing_s: float = 0.0
    waiting_s: float = 0.0
    read: int = 0


@dataclass
class Epoch:
    """The mini-batches of an epoch, drawn from a queue, or in equal ``shares``.

    A worker that would keep the others waiting gets no further one, as in
    :class:`hybridtrain.engine.server.batch_queue.BatchQueue`.
    """

    length: int
    n_workers: int
    shares: bool

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """All mini-batches are there again."""
        n = self.n_workers
        self.left = self.length
        self._own = [(self.length + n - 1 - worker) // n for worker in range(n)]
        self._drawn, self._done, self._n_done = [0] * n, [0] * n, 0
        self.ended = set[int]()

    def draw(self, worker: int) -> bool:
        """Whether there is a mini-batch for the worker."""
        if worker in self.ended:
            return False
        there = self._own[worker] > 0 if self.shares else self.left > 0
        if not there or (not self.shares and self._others_are_sooner(worker)):
            self.ended.add(worker)
            return False
        self._own[worker] -= 1
        self.left -= 1
        self._drawn[worker] += 1
        return True

    def _others_are_sooner(self, worker: int) -> bool:
        """Whether the others end everything before this worker ends one more."""
        done, held = self._done, self._drawn
        if (held[worker] + 1) * self._n_done <= self.left * done[worker] or not done[worker]:
            return False
        others = [w for w in range(self.n_workers) if w != worker and w not in self.ended]
        if not others or not all(done[w] for w in others):
            return False
        rest = self.left + sum(held[w] for w in others)
        last = max(1 / done[w] for w in others)
        own = (held[worker] + 1) / done[worker]
        return end_sooner(own, rest, [done[w] for w in others], last)

    def done(self, worker: int) -> None:
        """The worker has ended its mini-batch: it counts for its speed."""
        self._drawn[worker] -= 1
        self._done[worker] += 1
        self._n_done += 1

    def give_back(self, worker: int) -> None:
        """The worker's mini-batch does not count, so it will be drawn again."""
        self.done(worker)
        self.left += 1


class Contention(NamedTuple):
    """Times as long as recorded that mini-batches take.

    ``longer``: of so many workers that begin at the same time; ``alone``: of one that waits for no
    other; ``slower``: workers on slower devices, which wait no more seconds than the others.
    """

    longer: Callable[[int], float]
    alone: float = 1.0
    slower: Mapping[int, float] = MappingProxyType({})


class TimingRun:
    """Runs a policy on a clock that jumps from event to event.

    Args:
        policy: decides when contributions count.
        exchange: says how many mini-batches a contribution has.
        draws: for each worker, the seconds of its next mini-batch.
        network: latency and bandwidth, and how many hosts there are.
        update_s: of an update.
        epoch: mini-batches after which all workers meet; ``None``: they never do.
        contention: how much longer workers take that begin at the same time.
        row_bytes: of a contribution; ``None``: as many as the parameters have.

    Raises:
        UserError: if policy and exchange contradict each other, or make no sense for so many.
    """

    def __init__(
        self,
        policy: Policy,
        exchange: Exchange,
        draws: Sequence[Draw],
        network: Network,
        update_s: float = 0.0,
        epoch: int | None = None,
        contention: Contention | None = None,
        row_bytes: int | None = None,
    ) -> None:
        n = len(draws)
        self._contention, self._factor, self.factors = contention, 1.0, 0.0
        self._policy, self._draws, self.update_s = policy, draws, update_s
        self.requirements: Requirements = begin_policy(policy, exchange, n)
        once = self.requirements.whole_rounds, self.requirements.everyone
        self.links = Links(network) if network.hosts == 1 else HostLinks(network, n, *once)
        self.size_bytes = network.size_bytes if row_bytes is None else row_bytes
        self._own_s = self.links.own_s(self.size_bytes)
        self._turns = self.requirements.takes_turns
        self._epoch = None if epoch is None else Epoch(epoch, n, self.requirements.data == "shares")
        self.now_s = self.network_s = 0.0
        self.pushes = self.dropped = self.version = self.contributions = self.ages = 0
        self.last_s = 0.0  # time of the last update
        self.counted = [0, 0]  # contributions until the last update, and now
        self.accounts = [Account() for _ in range(n)]
        self._due: list[tuple[float, int, Happens]] = []
        self._wake_s = math.inf
        self._held: list[tuple[int, int]] = []  # worker, age
        self._told_s, self._before = 0.0, 0  # of the event that the server handles
        self._together = 0  # workers that begin at once, if not those that it releases
        self._replies: list[int] | None = None  # workers to be released when the update has ended
        self._waiting: deque[tuple[float, Happens, int]] = deque()  # events of a busy server
        self._busy = False
        self._asked, self._met = set[int](), set[int]()
        self._to_ask = set(range(n)) if self.requirements.asks else set[int]()
        for worker in range(n):
            policy.on(Joined(worker))
        if contention is not None:
            self._factor = contention.longer(n)
        for worker in range(n):
            self._go_on(worker, 0.0)

    # ---- time -----------------------------------------------------------------------------------

    def run(self, mini_batches: int) -> None:
        """Go on until so many contributions have reached the server, and an update is made."""
        due, pop = self._due, heapq.heappop
        while self.pushes < mini_batches or not self.version:
            if not self._busy and self._wake_s <= (due[0][0] if due else math.inf):
                self.now_s = max(self.now_s, self._wake_s)
                self._on(TIMER, SERVER)
                continue
            self.now_s, worker, what = pop(due)
            if what is LEFT:
                self._leave(worker)
            elif what is FREE:
                self._free()
            else:
                self._on(what, worker)

    # ---- workers --------------------------------------------------------------------------------

    def _go_on(self, worker: int, at_s: float) -> None:
        """At ``at_s`` the worker begins its next mini-batch, asks for its turn, or meets others."""
        if worker not in self._asked:
            if self._epoch is not None and not self._epoch.draw(worker):
                self._say(worker, MEETS, at_s)
                return
            if self._turns or worker in self._to_ask:
                self._to_ask.discard(worker)
                self._asked.add(worker)
                self._say(worker, ASKS, at_s)
                return
        self._asked.discard(worker)
        self.network_s += at_s - self.now_s + self._own_s
        longer = self._factor
        if self._contention is not None and worker in self._contention.slower:
            alone = self._contention.alone
            longer = alone + (longer - alone) / self._contention.slower[worker]
        end_s = at_s + self._draws[worker]() * longer
        self.factors += self._factor
        heapq.heappush(self._due, (end_s + self._own_s, worker, LEFT))

    def _say(self, worker: int, what: Happens, at_s: float) -> None:
        heapq.heappush(self._due, (at_s + self.links.latency_s(worker), worker, what))

    def _leave(self, worker: int) -> None:
        """The worker's contribution has passed its own link, and joins the queues."""
        if self.size_bytes:
            through_s = self.links.enters_s(worker, self.now_s, self.size_bytes)
            if through_s is not None:
                self.links.forget(worker)
                self.network_s += through_s - self.now_s
                heapq.heappush(self._due, (through_s, worker, PUSH))
                return
        self._on(PUSH, worker)

    # ---- the server -----------------------------------------------------------------------------

    def _on(self, what: Happens, worker: int) -> None:
        """The server handles the event, now or when it has made its update."""
        if what is PUSH:
            self.pushes += 1
        elif what is MEETS:
            account = self.accounts[worker]
            account.released_s, account.pushed_s = None, self.now_s
        if self._busy:
            self._waiting.append((self.now_s, what, worker))
        else:
            self._handle(self.now_s, what, worker)

    def _handle(self, told_s: float, what: Happens, worker: int) -> bool:
        """Whether the server makes an update now; its replies come when that has ended."""
        self._told_s, self._before = told_s, self.version
        self._together = len(self._draws) if what is BEGINS else 0
        released = self._tell(what, worker)
        if not self.update_s or self.version == self._before:
            self._answer(released)
            return False
        self._busy, self._replies = True, released
        end_s = self.now_s + self.update_s * (self.version - self._before)
        heapq.heappush(self._due, (end_s, SERVER, FREE))
        return True

    def _free(self) -> None:
        """An update has ended, or the server is free for the next event that waits."""
        if self._replies is not None:
            released, self._replies = self._replies, None
            self._answer(released)
        elif self._waiting and self._handle(*self._waiting.popleft()):
            return
        if self._waiting:
            heapq.heappush(self._due, (self.now_s, SERVER, FREE))
        else:
            self._busy = False

    def _answer(self, released: Sequence[int]) -> None:
        if self._contention is not None and released:
            self._factor = self._contention.longer(self._together or len(released))
        for worker in released:
            loaded = not self._turns or worker in self._asked
            self._go_on(worker, self.links.back_s(worker, self.now_s, loaded, self.version))
        if self._epoch is not None and len(self._met) == len(self._draws):
            self._met.clear()
            self._epoch.begin()
            for worker in range(len(self._draws)):
                self._on(BEGINS, worker)

    def _clock(self) -> float:
        """The time of the event's arrival, then of the end of its update."""
        made = self.version - self._before
        if self.update_s and made:
            return self.now_s + made * self.update_s
        return self._told_s

    def _tell(self, what: Happens, worker: int) -> list[int]:
        """Tell the policy; returns the workers that it releases."""
        if what is PUSH:
            return self._pushed(worker)
        if what is MEETS:
            self._met.add(worker)
            return self._obey(Waiting(worker))
        if what is BEGINS:
            released = self._obey(Joined(worker))
            self._release(worker, released)
            return released
        if what is ASKS:
            account = self.accounts[worker]
            account.released_s, account.pushed_s = None, self._told_s
            return self._obey(Ready(worker))
        at_s, self._wake_s = self._wake_s, math.inf
        return self._obey(TimerFired(max(self._told_s, at_s)))

    def _pushed(self, worker: int) -> list[int]:
        account, begun_s = self.accounts[worker], self.accounts[worker].released_s or 0.0
        now_s = max(self._told_s, begun_s)
        account.computing_s += now_s - begun_s
        account.released_s, account.pushed_s = None, now_s
        self.counted[1] += 1
        last = self._epoch is not None and len(self._epoch.ended) == len(self._draws)
        return self._obey(Pushed(worker, self._told_s, None, last))

    def _obey(self, fact: Fact) -> list[int]:
        released: list[int] = []
        for order in self._policy.on(fact):
            self._do(order, released)
        return released

    def _do(self, order: Order, released: list[int]) -> None:
        match order:
            case Release(workers):
                for worker in workers:
                    self._release(worker, released)
            case Apply(workers):
                self._apply(workers)
            case Accumulate(workers):
                self._held += [(w, self.version - self.accounts[w].read) for w in workers]
            case Drop(workers):
                self.dropped += len(workers)
                self.counted[1] -= len(workers)
                if self._epoch is not None:
                    for worker in workers:
                        self._epoch.give_back(worker)
            case SetTimer(at_s):
                self._wake_s = at_s

    def _apply(self, workers: Sequence[int]) -> None:
        """Count an update of these workers' contributions and all held ones."""
        self.ages += sum(self.version - self.accounts[worker].read for worker in workers)
        self.ages += sum(age for _, age in self._held)
        self.contributions += len(workers) + len(self._held)
        if self._epoch is not None:
            for worker in [*workers, *(holder for holder, _ in self._held)]:
                self._epoch.done(worker)
        self._held.clear()
        self.version += 1
        self.last_s, self.counted[0] = self._clock(), self.counted[1]

    def _release(self, worker: int, released: list[int]) -> None:
        account, now_s = self.accounts[worker], self._clock()
        if account.pushed_s is not None:
            account.waiting_s += now_s - account.pushed_s
        account.released_s, account.pushed_s, account.read = now_s, None, self.version
        released.append(worker)

    # ---- figures --------------------------------------------------------------------------------

    @property
    def waiting_share(self) -> float:
        """Mean over the workers of the share of their time in which they wait for a release."""
        shares = [x.waiting_s / (x.waiting_s + x.computing_s or 1.0) for x in self.accounts]
        return sum(shares) / len(shares)

    @property
    def mean_factor(self) -> float:
        """Times as long as ``draws`` that a mini-batch took."""
        return self.factors / (self.pushes + len(self.accounts))

    @property
    def staleness(self) -> float:
        """Updates between reading parameters and the update with the gradient, on average."""
        return self.ages / self.contributions if self.contributions else 0.0
