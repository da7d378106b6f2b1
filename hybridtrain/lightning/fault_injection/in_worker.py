"""Fault injection inside a worker.

A run without faults is unchanged. With faults, methods of the worker's objects first check whether
one is due. :mod:`hybridtrain.engine.faults` lists the kinds. The phases:

- *compute*: before the module's ``training_step``;
- *push*: the gradient is in shared memory, the push is not sent;
- *pull*: the release is received, the parameters are not refreshed (or the worker has made the
  update itself, and perhaps not reported it);
- *validation*: before one of its mini-batches;
- *checkpoint*: when half of the file is written; in workers that write none, as it begins;
- *teardown*: as the run ends;
- *update*: see :func:`interrupt_updates`.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.strategies import Strategy

from hybridtrain.engine.exchanges import Requirements
from hybridtrain.engine.faults import KINDS, Fault, FaultLog, Schedule, check_workers, happened
from hybridtrain.engine.protocol.messages import Push
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worker.pending_push import Taking, Undoing
from hybridtrain.engine.worker.pushes import Pushes
from hybridtrain.errors import UserError
from hybridtrain.lightning.hooks.points import Point, before
from hybridtrain.lightning.hooks.trainer_hooks import dumper
from hybridtrain.util import files

# ---- in the parent ------------------------------------------------------------------------------
# A run's injected faults, and those that the parent carries out: of the phase *update*.
# The parent kills or stops a worker while the server steps the parameters with its push, in the
# middle of the arithmetic (if that is one task: after it, before any worker is released).

_DYING_S = 5.0


@dataclass
class Faults:
    """The faults to inject into a run, and their log.

    Args:
        wanted: by the user.
    """

    wanted: tuple[Fault, ...] = ()
    fault_log: FaultLog | None = None  # of the run under way
    rehearses: bool = False  # the run is a replay

    @property
    def in_updates(self) -> bool:
        """Whether a fault is of the phase *update*."""
        return any(fault.phase == "update" for fault in self.wanted)

    def check(self, requirements: Requirements, n_workers: int) -> None:
        """Check the faults before a process starts. Raises UserError."""
        check_workers(self.wanted, n_workers)
        if requirements.in_place and self.in_updates:
            raise UserError(
                "faults: phase update was given, but under hogwild workers make their updates "
                "themselves; use push (before it) or pull (in it), or strategy=async"
            )

    def begin(self, trainer: pl.Trainer, n_workers: int, rehearses: bool = False) -> None:
        """A run begins; faults are injected only into training."""
        self.fault_log, self.rehearses = None, rehearses
        if self.wanted and trainer.state.fn == "fit":
            self.fault_log = FaultLog(len(self.wanted), n_workers)

    def conclude(self, well: bool, here: Collection[int] | None = None) -> dict[str, Any]:
        """The log, for the run's statistics; if the run ended ``well``, warn of missed faults.

        ``here``: the workers of this host, of which alone it knows, if not all are.
        """
        if self.fault_log is None:
            return {}
        fault_log, self.fault_log = self.fault_log, None
        rows = happened(self.wanted, fault_log)
        for number, fault in enumerate(self.wanted if well else ()):
            if here is not None and fault.worker not in here:
                continue
            if fault.worker is not None and not fault_log.count(number, fault.worker):
                steps = fault_log.progress(fault.worker)[0]
                rank_zero_warn(f"faults: {fault}: it never came to it (the worker made {steps})")
        fault_log.close()
        return {"faults": rows}


def say(text: str) -> None:
    """Print a whole line to stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def interrupt_updates(server: ParameterServer, faults: Faults) -> None:
    """Let the server's updates kill or stop workers whose pushes they use."""
    fault_log, wanted = faults.fault_log, faults.wanted
    if fault_log is None or faults.rehearses or not faults.in_updates:
        return
    rounds: Any = server._rounds
    schedules = [Schedule(wanted, worker, fault_log) for worker in range(fault_log.n_workers)]
    step = rounds._step
    own = server.requirements.parameters == "own"  # the step has been counted before its push

    def stepping(pushes: Mapping[int, Push]) -> Any:
        reached = {worker: fault_log.progress(worker) for worker in pushes}
        due = [
            (pid, fault)
            for worker, (progress, pid) in reached.items()
            for fault in schedules[worker].due("update", progress - own)
        ]
        return _struck(server._pool, due, lambda: step(pushes)) if due else step(pushes)

    rounds._step = stepping


def _struck(pool: Any, due: Sequence[tuple[int, Fault]], run: Callable[[], Any]) -> Any:
    """Run it, and inject the faults in the middle."""
    left = list(due)

    def strike() -> None:
        while left:
            _strike(*left.pop())

    def halfway(function: Callable[[int, Any], Any], tasks: Sequence[Any]) -> list[Any]:
        middle = len(tasks) // 2
        results = type(pool).map(pool, function, tasks[:middle])
        strike()
        return results + type(pool).map(pool, function, tasks[middle:])

    pool.map = halfway
    try:
        result = run()
    finally:
        del pool.map
    strike()
    return result


def _strike(pid: int, fault: Fault) -> None:
    """Kill or stop the process, and wait until it is."""
    say(f"faults: {fault}, process {pid}")
    with suppress(OSError):  # it has ended by itself
        if os.getsid(pid) != os.getsid(0):
            return  # long ended, and the number is another's
        if fault.kind == "hang":
            os.kill(pid, signal.SIGSTOP)
            return
        descriptor = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGKILL)
            select.select([descriptor], [], [], _DYING_S)
        finally:
            os.close(descriptor)


EXIT_CODE = 70  # of a worker that ends without a message
_OF_GRADIENTS = ("nan", "corrupt_gradient", "oom")  # a replay repeats these, too


class InjectedFault(RuntimeError):
    """Raised on purpose."""


def inject(
    trainer: Any,
    client: Client,
    faults: Faults,
    strategy: Strategy,
    session: Callable[[], object],
) -> None:
    """Prepare the faults of this worker, which has a session once it trains."""
    if faults.fault_log is None:
        return
    kinds = _OF_GRADIENTS if faults.rehearses else KINDS  # a replay must not die
    schedule = Schedule(faults.wanted, client.worker, faults.fault_log, kinds)
    trainer.callbacks.insert(
        1, Injection(schedule, client.worker, client.pushes, faults.fault_log, strategy, session)
    )


class Injection(pl.Callback):
    """Makes this worker fail where it is due.

    Args:
        schedule: of this worker.
        worker: its number.
        pushes: of this worker; the exchange is a phase.
        fault_log: counts the worker's steps.
        strategy: whose end is a phase.
        session: of the worker, once it trains.
    """

    def __init__(
        self,
        schedule: Schedule,
        worker: int,
        pushes: Pushes,
        fault_log: FaultLog,
        strategy: Strategy,
        session: Callable[[], object],
    ) -> None:
        self._schedule, self._worker, self._pushes = schedule, worker, pushes
        self._fault_log, self._strategy, self._session = fault_log, strategy, session
        self._step = fault_log.progress(worker)[0]
        self._began_s = 0.0  # start of this step
        self._factor = 1.0  # of the next loss
        self._slow: tuple[float, float] = (1.0, 0)  # slowdown, until which step
        self._own = False  # the worker makes several steps between two exchanges
        fault_log.reach(worker, self._step, os.getpid())

    def on_fit_start(self, trainer: Any, *_: Any) -> None:
        """All objects to be wrapped exist now."""
        session: Any = self._session()
        self._wrap_computing(session)
        if session.has_own_parameters:
            self._wrap_own_steps(session._gathered)
        self._wrap_exchange()
        before(Point.TEARDOWN, self._strategy, self.tear_down)
        if not self._schedule.has("checkpoint"):
            return
        if self._worker == 0:
            cast(Any, files)._write_part = self._half_written(files._write_part)
        else:
            before(Point.DUMP, dumper(trainer), self.begin_checkpoint)

    def tear_down(self) -> None:
        """The run ends."""
        self._visit("teardown")

    def begin_checkpoint(self) -> None:
        """A checkpoint is put together."""
        self._visit("checkpoint")

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._visit("validation")

    def _wrap_computing(self, session: Any) -> None:
        step, scaled = session.training_step, session.scaled

        def computing(run: Callable[[], Any]) -> Any:
            self._began_s = time.monotonic()

            def first() -> Any:
                self._visit("compute")
                return run()

            return step(first)

        def poisoned(loss: torch.Tensor) -> torch.Tensor:
            factor, self._factor = self._factor, 1.0
            return scaled(loss) if factor == 1.0 else scaled(loss) * factor

        session.training_step, session.scaled = computing, poisoned

    def _wrap_own_steps(self, gathered: Any) -> None:
        step, self._own = gathered.step, True

        def counting() -> None:
            self._dawdle()
            step()
            self._advance()

        gathered.step = counting

    def _wrap_exchange(self) -> None:
        offer, make = self._pushes.offer, self._pushes.make

        def offering(
            push: Push, then: Taking, undo: Undoing | None = None, settles: bool = True
        ) -> None:
            if not self._own:
                self._dawdle()
            self._visit("push", self._step - self._own)

            def take(released: Any) -> object:
                self._count()
                return then(released)

            offer(push, take, undo, settles)

        def making(step: Callable[[], object], push: Push, then: Taking) -> int:
            self._dawdle()
            self._visit("push")
            version = make(step, push, then)
            self._count()
            return version

        self._pushes.offer = offering  # type: ignore[method-assign]
        self._pushes.make = making  # type: ignore[method-assign]

    def _advance(self) -> None:
        """The step has been made."""
        self._step += 1
        self._fault_log.reach(self._worker, self._step, os.getpid())

    def _count(self) -> None:
        """The masters have the worker's contribution; its own steps have been counted before."""
        if not self._own:
            self._advance()
        self._visit("pull", self._step - 1)

    def _half_written(self, write: Callable[..., bool]) -> Callable[..., bool]:
        def torn(part: str, folder: int, content: Any, name: str) -> bool:
            fd, _ = files._open(part, folder)
            with os.fdopen(fd, "wb") as file:
                file.write(memoryview(content)[: len(content) // 2])
                file.flush()
                self._visit("checkpoint")
            return write(part, folder, content, name)

        return torn

    # ---- the faults -----------------------------------------------------------------------------

    def _visit(self, phase: str, step: int | None = None) -> None:
        step, worker = self._step if step is None else step, self._worker
        for fault in self._schedule.due(phase, step):
            say(f"faults: {fault.kind}, worker {worker}, step {step}, in {fault.phase}")
            self._act(fault)

    def _act(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                while True:
                    time.sleep(3600.0)
            case "exit":
                os._exit(EXIT_CODE)
            case "exception":
                raise InjectedFault(f"on purpose: {fault}")
            case "oom":
                raise torch.OutOfMemoryError(f"out of memory on purpose: {fault}")
            case "slow":
                last = fault.steps or (1 if fault.step is None else None)
                until = float("inf") if last is None else self._step + last
                self._slow = (fault.strength, until)
            case "nan":
                self._factor = float("nan")
            case "corrupt_gradient":
                self._factor = fault.strength
            case "lose_data_loader":
                _lose_data_loader(fault)

    def _dawdle(self) -> None:
        """Slow this step down."""
        factor, until = self._slow
        if factor > 1 and self._step < until:
            time.sleep((factor - 1) * (time.monotonic() - self._began_s))


def _lose_data_loader(fault: Fault) -> None:
    """Kill the DataLoader's worker processes, or fail if there are none."""
    readers = multiprocessing.active_children()
    for reader in readers:
        with suppress(OSError):
            os.kill(reader.pid or 0, signal.SIGKILL)
    if not readers:
        raise InjectedFault(f"on purpose: {fault} (the loader has no process of its own)")
