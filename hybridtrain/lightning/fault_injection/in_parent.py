"""A run's injected faults, and those that the parent carries out: of the phase *update*.

The parent kills or stops a worker while the server steps the parameters with its push, in the
middle of the arithmetic (if that is one task: after it, before any worker is released).
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_warn

from hybridtrain.errors import UserError
from hybridtrain.exchanges import Requirements
from hybridtrain.protocol.messages import Push
from hybridtrain.server.server import Server
from hybridtrain.testing.faults import (
    Fault,
    FaultLog,
    Schedule,
    check_workers,
    happened,
    read_faults,
)

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

    @classmethod
    def of(cls, given: Any) -> Faults:
        """Parse the user's argument. Raises UserError."""
        return cls(read_faults(given))

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

    def conclude(self, well: bool) -> dict[str, Any]:
        """The log, for the run's statistics; if the run ended ``well``, warn of missed faults."""
        if self.fault_log is None:
            return {}
        fault_log, self.fault_log = self.fault_log, None
        rows = happened(self.wanted, fault_log)
        for number, fault in enumerate(self.wanted if well else ()):
            if fault.worker is not None and not fault_log.count(number, fault.worker):
                steps = fault_log.progress(fault.worker)[0]
                rank_zero_warn(f"faults: {fault}: it never came to it (the worker made {steps})")
        fault_log.close()
        return {"faults": rows}


def say(text: str) -> None:
    """Print a whole line to stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def interrupt_updates(server: Server, faults: Faults) -> None:
    """Let the server's updates kill or stop workers whose pushes they use."""
    fault_log, wanted = faults.fault_log, faults.wanted
    if fault_log is None or faults.rehearses or not faults.in_updates:
        return
    rounds: Any = server._rounds
    schedules = [Schedule(wanted, worker, fault_log) for worker in range(fault_log.n_workers)]
    step = rounds._step

    def stepping(pushes: Mapping[int, Push]) -> Any:
        due = [
            (fault_log.progress(worker)[1], fault)
            for worker in pushes
            for fault in schedules[worker].due("update", fault_log.progress(worker)[0])
        ]
        return _struck(server._pool, due, lambda: step(pushes)) if due else step(pushes)

    rounds._step = stepping


def _struck(pool: Any, due: Sequence[tuple[int, Fault]], run: Callable[[], Any]) -> Any:
    """Run it, and inject the faults in the middle."""
    left = list(due)

    def strike() -> None:
        while left:
            _strike(*left.pop())

    def halfway(function: Callable[[int, Any], Any], tasks: Sequence[Any]) -> Any:
        middle = len(tasks) // 2
        numbered = list(enumerate(tasks))

        def each(lane: int, task: tuple[int, Any]) -> Any:
            if task[0] == middle:
                strike()
            return function(lane, task[1])

        return type(pool).map(pool, each, numbered)

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
