"""Workers and a server in one process and virtual time, of which a worker dies at a chosen write.

Theory of operation. All that workers share is real: the server, the store with its words, their
clients, the updates that they make themselves. Each worker has a thread, of which one runs at a
time; it is suspended where it waits, and now and then where it writes. Which one goes on, when the
server hears of a message or of a death, and when time passes, is drawn from a seed. A worker's
writes to shared memory are counted, and at one of them it dies, or is stopped and found.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridtrain.engine.memory import Arena, Layout
from hybridtrain.engine.policies.registry import make_policy
from hybridtrain.engine.protocol import locked_steps, shared_round
from hybridtrain.engine.protocol.events import Completed, Looked, Received, Removed, Restarted
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.step import in_place
from hybridtrain.engine.updates.flat import lent_state
from hybridtrain.engine.updates.flat.flat_update import FlatUpdate
from hybridtrain.engine.updates.kernels.kernel import Kernel
from hybridtrain.engine.worker import inbox
from hybridtrain.engine.worker.makers import in_place as counting
from hybridtrain.util.turn_taking import Asked, FunctionEnded, TurnTaking
from tests.support.deaths import Died, Words
from tests.support.mortal_life import Life

_CHUNK = 16  # elements that are moved together
_TICK_S = 0.1
_STANDS = 300  # ticks in which nothing happens: they wait for ever
_FOUND = 40  # ticks, after which a stopped worker is found by the watchdog


@dataclass(frozen=True)
class Plan:
    """What is tried. ``deaths``: numbers of writes, of all workers in their order."""

    policy: str
    on_failure: str = "restart"
    deaths: tuple[int, ...] = ()
    stopped: bool = False  # there, and killed by whoever needs its lock
    seed: int = 0
    workers: int = 2
    steps: int = 4  # mini-batches of each worker in an epoch, if all are as fast
    switches: float = 0.0  # how often a worker is suspended at a write
    late: float = 0.0  # how often time passes while somebody could go on


@dataclass
class Mortal:
    """A worker: its thread, what it waits for, and its two lines."""

    number: int
    turns: TurnTaking = field(default_factory=TurnTaking)
    body: Callable[[], None] | None = None  # until it has begun
    waits: str = ""  # for what
    rung: bool = False
    inbox: deque[Any] = field(default_factory=deque)
    outbox: deque[Any] = field(default_factory=deque)
    state: str = "there"  # dead: nobody has heard of it yet; missing: it comes back; gone; done


class Model:
    """One run."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rng = plan, random.Random(plan.seed)
        self.now_s, self.ticks, self.n_writes = 0.0, 0, 0
        self.running: Mortal | None = None  # else the server
        self.died: set[int] = set()
        self.owner: Mortal | str | None = None  # of the lock
        self.size = plan.workers * plan.steps  # samples
        self.parameter = torch.nn.Parameter(torch.zeros(max(self.size, 2 * _CHUNK)))
        self.layout = Layout.of([("counts", self.parameter)])
        policy = make_policy(plan.policy)
        self.server = ParameterServer(policy, plan.workers, clock=lambda: self.now_s)
        self.server.membership.queue.covered = self._covered
        self.server.workers_updates.free_by(lambda worker, for_s: self.kill(self.mortals[worker]))
        self.mortals = [Mortal(number) for number in range(plan.workers)]
        for mortal in self.mortals:
            mortal.body = self._body_of(mortal, False)

    def _covered(self, worker: int) -> int:
        store = self.server.store
        return (
            0 if store is None or store.step_counts is None else store.step_counts.covered(worker)
        )

    # ---- the scheduler --------------------------------------------------------------------------

    def run(self) -> Model:
        """To the end."""
        try:
            while any(mortal.state not in ("done", "gone") for mortal in self.mortals):
                acts = self._possible()
                if acts and self.rng.random() >= self.plan.late:
                    self.rng.choice(acts)()
                else:
                    self._pass_time(idle=not acts)
        finally:
            for mortal in self.mortals:
                mortal.turns.close()
        return self

    def _possible(self) -> list[Callable[[], object]]:
        acts: list[Callable[[], object]] = []
        for mortal in self.mortals:
            if mortal.outbox:
                acts.append(lambda m=mortal: self._hears(m))
            elif mortal.state == "dead":
                acts.append(lambda m=mortal: self._hears_of_death(m))
            elif mortal.state == "missing" and self._may_start(mortal):
                acts.append(lambda m=mortal: self._starts(m))
            if mortal.state == "there" and self._goes_on(mortal):
                acts.append(lambda m=mortal: self.resume(m))
        return acts or self._ends()

    def _goes_on(self, mortal: Mortal) -> bool:
        match mortal.waits:
            case "message":
                return bool(mortal.inbox)
            case "bell":
                return bool(mortal.inbox) or mortal.rung
            case "lock" | "lock for a while":
                return self.owner is None
            case "stopped" | "end":
                return False
        return True

    def _ends(self) -> list[Callable[[], object]]:
        """All are at the end of the epoch: they do what is left, or go."""
        if any(m.state in ("dead", "missing") for m in self.mortals):
            return []
        there = [mortal for mortal in self.mortals if mortal.state == "there"]
        if any(mortal.waits != "end" for mortal in there):
            return []
        left = self.server.membership.remaining
        return [lambda: [self.resume(mortal, left) for mortal in there]]

    def _pass_time(self, idle: bool) -> None:
        """Whoever waits for a while has waited; the server looks; a stopped worker is found."""
        self.now_s, self.ticks = self.now_s + _TICK_S, self.ticks + idle
        assert self.ticks < _STANDS, f"they wait for ever: {self.mortals}"
        if self.server.training and self.rng.random() < _TICK_S:
            self._on(Looked())
        for mortal in self.mortals:
            if mortal.state == "there" and mortal.waits in ("bell", "lock for a while"):
                self.resume(mortal, "in vain")
            elif mortal.waits == "stopped" and self.ticks > _FOUND:
                self.kill(mortal)

    def resume(self, mortal: Mortal, answer: Any = None) -> None:
        """Let the worker run on until it waits, or has ended."""
        before, self.running = self.running, mortal
        body, mortal.body, mortal.waits, mortal.rung = mortal.body, None, "", False
        said = mortal.turns.answer(answer) if body is None else mortal.turns.start(body)
        self.running = before
        match said:
            case Asked(what):
                mortal.waits = what
            case FunctionEnded(None):
                mortal.state = "finishing"
                mortal.outbox.append(None)
            case FunctionEnded(error):
                if not isinstance(error, Died):
                    raise error
                self.died.add(mortal.number)
                mortal.state = "dead"

    def kill(self, mortal: Mortal) -> None:
        """It dies where it was stopped."""
        assert mortal.waits == "stopped"
        self.resume(mortal, Died())

    # ---- the server -----------------------------------------------------------------------------

    def _on(self, event: Any) -> None:
        for number, reply in self.server.on(event):
            if self.mortals[number].state in ("there", "finishing"):
                self.mortals[number].inbox.append(reply)

    def _hears(self, mortal: Mortal) -> None:
        message = mortal.outbox.popleft()
        if message is None:
            mortal.state = "done"
            self._on(Completed(mortal.number))
        else:
            self._on(Received(mortal.number, message))

    def _hears_of_death(self, mortal: Mortal) -> None:
        returns = self.plan.on_failure == "restart"
        mortal.state = "missing" if returns else "gone"
        self._on(Removed(mortal.number, announced=True, returns=returns))

    def _may_start(self, mortal: Mortal) -> bool:
        lock_step = self.server.requirements.whole_rounds
        return not (lock_step and mortal.number in self.server.membership.rounds.pushed)

    def _starts(self, mortal: Mortal) -> None:
        mortal.turns.close()
        again = self.mortals[mortal.number] = Mortal(mortal.number)
        again.body = self._body_of(again, True)
        self._on(Restarted(mortal.number))

    # ---- a worker -------------------------------------------------------------------------------

    def ask(self, what: str) -> Any:
        """By a worker: it waits, or is suspended."""
        assert self.running is not None
        answer = self.running.turns.ask(what)
        if isinstance(answer, Died):
            raise answer
        return answer

    def write(self) -> None:
        """By a worker, in whose life every write to shared memory comes here before it is made."""
        mortal = self.running
        if mortal is None or not self.server.training:
            return
        number, self.n_writes = self.n_writes, self.n_writes + 1
        if number in self.plan.deaths:
            if not self.plan.stopped:
                raise Died
            self.ask("stopped")
        if self.rng.random() < self.plan.switches:
            self.ask("suspended")

    def _body_of(self, mortal: Mortal, joins: bool) -> Callable[[], None]:
        version = self.server.membership.rounds.version

        def body() -> None:
            with torch.enable_grad():
                Life(self, mortal, joins, version).live()

        return body


# ---- what is put in the place of the system's ----------------------------------------------------


class VirtualLock:
    """As :class:`hybridtrain.engine.protocol.kernel_lock.KernelLock`, among the threads of a
    model."""

    model: Model

    def __init__(self, fd: int) -> None:
        """There is one of all."""

    @contextmanager
    def held(self, waits: bool = True) -> Iterator[None]:
        while self.model.owner is not None:
            if not waits:
                raise BlockingIOError
            self.model.ask("lock")
        with self._owned():
            yield

    @contextmanager
    def within(self, for_s: float) -> Iterator[bool]:
        while self.model.owner is not None:
            if self.model.ask("lock for a while") == "in vain":
                yield False
                return
        with self._owned():
            yield True

    @contextmanager
    def seized(self, frees: Callable[[int, float], object]) -> Iterator[None]:
        """By the server: whoever has it goes on, or is stopped, and killed."""
        while isinstance(owner := self.model.owner, Mortal):
            if owner.waits == "stopped":
                frees(owner.number, 1.0)
            else:
                self.model.resume(owner)
        with self._owned():
            yield

    @contextmanager
    def _owned(self) -> Iterator[None]:
        assert self.model.owner is None
        self.model.owner = self.model.running or "server"
        try:
            yield
        finally:
            self.model.owner = None


def tried(plan: Plan) -> Model:
    """The run of this plan, to its end."""
    with pytest.MonkeyPatch.context() as patch:
        model = Model(plan)
        VirtualLock.model = model
        patch.setattr(shared_round, "KernelLock", VirtualLock)
        patch.setattr(locked_steps, "KernelLock", VirtualLock)
        clock = SimpleNamespace(
            monotonic=lambda: model.now_s, monotonic_ns=lambda: int(1e9 * model.now_s)
        )
        for module in (inbox, counting, shared_round):
            patch.setattr(module, "time", clock)
        _note_writes(patch, model)
        return model.run()


def _note_writes(patch: pytest.MonkeyPatch, model: Model) -> None:
    words = Arena.words

    def noted(arena: Arena, offset_bytes: int, n: int) -> Any:
        return Words(words(arena, offset_bytes, n), model.write)

    patch.setattr(Arena, "words", noted)
    patch.setattr(Kernel, "chunk", _CHUNK)
    patch.setattr(shared_round, "_FEWEST", 0)  # or the server would make most rounds
    for kind, name in ((FlatUpdate, "_step_chunk"), (in_place, "own_step")):
        patch.setattr(kind, name, _between(getattr(kind, name), model.write))
    for name in ("keep", "restore"):
        patch.setattr(lent_state.LentFlatUpdate, name, _halves(name == "restore", model.write))


def _between(made: Callable[..., Any], write: Callable[[], None]) -> Callable[..., Any]:
    """A death is tried before it and behind it."""

    def noted(*args: Any) -> Any:
        write()
        result = made(*args)
        write()
        return result

    return noted


def _halves(restores: bool, write: Callable[[], None]) -> Callable[..., Any]:
    """The copy of each tensor is made in two parts, a death tried before each."""

    def copy(lent: Any) -> None:
        for live, kept in lent._pairs:
            one, other = (live, kept) if restores else (kept, live)
            half = one.numel() // 2
            write()
            one.view(-1)[:half].copy_(other.view(-1)[:half])
            write()
            one.view(-1)[half:].copy_(other.view(-1)[half:])

    return copy
