"""A world in virtual time: one process, thousands of workers, a clock that jumps.

Theory of operation. A heap holds when each worker's next contribution will reach the server. The
world takes the earliest, turns the clock there, and hands the worker's push to the very server that
serves real processes, with the same policy and the same update code; whoever is released begins
anew from the parameters as they are then. What lies between the two, and what else happens, is
told by the :class:`Conditions`. Nothing waits and nothing depends on this machine's speed, so a run
is the same for its seed, down to the last bit. With a *task* gradients are real; without one only
time is simulated.

What is due at the same moment goes in this order: timers of the policy, the script, workers by
their numbers.

Legend: P elements of one dtype's buffer, W workers.
"""

from __future__ import annotations

import heapq
import math

import torch

from hybridtrain.errors import UserError
from hybridtrain.memory import Store
from hybridtrain.messages import Pull, Push, Refused, Released
from hybridtrain.policies import Policy
from hybridtrain.rounds import Replies
from hybridtrain.server import Server
from hybridtrain.update.corrections import Correction
from hybridtrain.update.idle import IdleOptimizers
from hybridtrain.worlds.conditions import Conditions
from hybridtrain.worlds.curve import Curve
from hybridtrain.worlds.script import Dies, Finish, Joins
from hybridtrain.worlds.service import Times
from hybridtrain.worlds.task import MakeOptimizer, Pupils, Task, layout_of

# When, which worker, the number of what it does (an older one will not happen), and what. Events of
# the script have negative numbers in the worker's place, so that they come first.
Due = tuple[float, int, int, Push | Dies | Joins]

INWARDS, OUTWARDS = 0, 1


class VirtualWorld:
    """Workers that take turns by the clock.

    Args:
        policy: when a contribution counts.
        n_workers: W, those that join later included.
        times: how long a worker computes.
        batch_size: samples of each mini-batch.
        seed: of the service times.
        task: what is trained, with ``optimizer``; without one, only time passes.
        optimizer: makes the user's optimizer for the task's parameters.
        conditions: the network, what happens to workers, and whether they can be interrupted.
        correction: of late gradients.

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
    ) -> None:
        self.now_s = 0.0
        self.events = 0  # contributions that have reached the server
        self.interrupted = 0  # mini-batches that were begun anew
        self.network_s = 0.0  # spent under way, by all workers together
        self.server = Server(policy, n_workers, 1, lambda: self.now_s, correction)
        self._contribution = Push(0, float(batch_size))
        self._passed = Push(0, float(batch_size))  # the same, behind the server's link
        self._draws = [times.stream(worker, seed) for worker in range(n_workers)]
        self._due: list[Due] = []
        self._doing = [0] * n_workers  # the number of what the worker does
        self._under = conditions or Conditions()
        self._read: dict[int, int] = {}  # who computes, where it matters -> version it has read
        self.curve = Curve()  # of the losses, where there are some
        self._link_s = [0.0, 0.0]  # until when the server's link is busy, inwards and outwards
        self._pupils = self._share(task, optimizer, n_workers)
        self._start(n_workers)

    def _share(
        self, task: Task | None, optimizer: MakeOptimizer | None, n_workers: int
    ) -> Pupils | None:
        if task is None or optimizer is None:
            self.server.adopt(None, IdleOptimizers())
            return None
        store = Store(layout_of(task), n_workers, private_parameters=True)
        pupils = Pupils(task, optimizer, store)
        self.server.adopt(store, pupils.optimizers)
        return pupils

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
        self.server.ledger.start()
        for worker in sorted(absent):
            self._deliver(self.server.lost(worker))
        for worker in range(n_workers):
            if worker not in absent:
                self._begin(worker, self.now_s)

    def parameters(self) -> list[torch.Tensor]:
        """The masters as they are now, copied."""
        return [] if self._pupils is None else self._pupils.masters()

    # ---- time -----------------------------------------------------------------------------------

    def run(
        self,
        updates: float = math.inf,
        until_s: float = math.inf,
        mini_batches: float = math.inf,
    ) -> None:
        """Go on until so much has been done in all (and an update made), or that time has come.

        Raises:
            UserError: if nothing would ever happen again, or the server refuses something.
        """
        ledger = self.server.ledger
        while ledger.version < updates and (self.events < mini_batches or not ledger.version):
            if until_s != math.inf and self._next_s() > until_s:
                return
            self._step()

    def _next_s(self) -> float:
        return self._due[0][0] if self._due else math.inf

    def _step(self) -> None:
        """The next thing happens."""
        if not self._due:
            raise UserError("nobody is left who computes: all workers have died, or wait for ever")
        at_s, worker, number, what = heapq.heappop(self._due)
        if worker >= 0 and number != self._doing[worker]:
            return  # it was interrupted, or is dead
        self.now_s = at_s
        match what:
            case Push():
                self._arrive(worker, number, what)
            case Dies():
                self._doing[what.worker] += 1
                self._read.pop(what.worker, None)
                self._deliver(self.server.lost(what.worker))
            case Joins():
                self._deliver(self.server.admit(what.worker))

    # ---- workers --------------------------------------------------------------------------------

    def _released(self, worker: int) -> None:
        """The server lets the worker go on; the parameters are on their way."""
        sent_s = self._passes_s(OUTWARDS) if self._passing_s else self.now_s
        self._begin(worker, sent_s + self._load_s)

    def _begin(self, worker: int, begin_s: float) -> None:
        """The worker has the parameters as they are now, and computes from ``begin_s`` on.

        Who is due at the same moment as others goes by its number.
        """
        number = self._doing[worker] = self._doing[worker] + 1
        work_s, finish = self._draws[worker](), self._finish.get(worker)
        end_s = begin_s + work_s if finish is None else finish(begin_s, work_s)
        self.network_s += begin_s - self.now_s + self._load_s
        if self._under.interrupt:
            self._read[worker] = self.server.ledger.version
        heapq.heappush(self._due, (end_s + self._load_s, worker, number, self._contribution))

    def _arrive(self, worker: int, number: int, push: Push) -> None:
        """A contribution has come over the worker's link; the server's own may be busy."""
        if self._passing_s and push is self._contribution:
            through_s = self._passes_s(INWARDS)
            self.network_s += through_s - self.now_s
            heapq.heappush(self._due, (through_s, worker, number, self._passed))
            return
        self.events += 1
        if self._pupils is not None:
            self._pupils.compute(worker)
        before = self.server.ledger.version
        self._read.pop(worker, None)
        self._deliver(self.server.handle(worker, push))
        if self._read and self.server.ledger.version > before:
            self._interrupt()

    def _passes_s(self, way: int) -> float:
        """When what comes to the server's link now has passed it."""
        self._link_s[way] = max(self._link_s[way], self.now_s) + self._passing_s
        return self._link_s[way]

    def _deliver(self, replies: Replies) -> None:
        for worker, reply in replies:
            if isinstance(reply, Released):
                self._released(worker)
            elif isinstance(reply, Refused):
                raise UserError(reply.reason)

    def _interrupt(self) -> None:
        """Those who compute for a round that is over begin anew, with the newest parameters."""
        version = self.server.ledger.version
        for worker in sorted(w for w, read in self._read.items() if read < version):
            self.interrupted += 1
            self._deliver(self.server.handle(worker, Pull()))
