"""What has gone wrong on purpose so far, and what is due next.

A worker that is about to die cannot be relied on to tell, and the one that takes its place must not
die of the same fault. So it is written to memory that the parent and all workers share.
"""

from __future__ import annotations

import math
import random
import struct
import time
from collections.abc import Container, Iterator, Sequence
from typing import Any

from hybridtrain.testing.faults import KINDS, PHASES, Fault
from hybridtrain.util.anonymous_files import SharedBytes

_CELL = struct.Struct("<qd")  # how often it has happened, and when last
_COUNTERS = struct.Struct("<qq")  # a worker's steps and its process


class FaultLog:
    """What has happened so far, in memory that the parent and all processes of all workers share.

    A worker is about to die when it writes, so it does not send a message. Made by the parent;
    a copy that is sent to another process looks at the same memory.

    Args:
        n_faults: F.
        n_workers: W.
    """

    def __init__(self, n_faults: int, n_workers: int) -> None:
        self.n_faults, self.n_workers = n_faults, n_workers
        self._shared = SharedBytes(n_workers * (_COUNTERS.size + n_faults * _CELL.size))

    def _place(self, worker: int, fault: int) -> int:
        own = worker * (_COUNTERS.size + self.n_faults * _CELL.size)
        return own + _COUNTERS.size + fault * _CELL.size

    def count(self, fault: int, worker: int) -> int:
        """How often it has happened to the worker."""
        return int(_CELL.unpack_from(self._shared.map, self._place(worker, fault))[0])

    def when_s(self, fault: int, worker: int) -> float:
        """When it last has, on the monotonic clock of this host."""
        return float(_CELL.unpack_from(self._shared.map, self._place(worker, fault))[1])

    def happens(self, fault: int, worker: int) -> None:
        """Now."""
        place = self._place(worker, fault)
        _CELL.pack_into(self._shared.map, place, self.count(fault, worker) + 1, time.monotonic())

    def progress(self, worker: int) -> tuple[int, int]:
        """The steps that the worker has made, and the process that it lives in now."""
        steps, pid = _COUNTERS.unpack_from(
            self._shared.map, self._place(worker, 0) - _COUNTERS.size
        )
        return int(steps), int(pid)

    def reach(self, worker: int, steps: int, pid: int) -> None:
        """The worker has made so many steps."""
        _COUNTERS.pack_into(self._shared.map, self._place(worker, 0) - _COUNTERS.size, steps, pid)

    def close(self) -> None:
        """Nobody looks any more."""
        self._shared.close()


class Schedule:
    """Says which faults of one worker are due.

    Args:
        faults: of all workers.
        worker: whose.
        fault_log: of what has happened.
        kinds: that may happen here.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        worker: int,
        fault_log: FaultLog,
        kinds: Container[str] = KINDS,
    ) -> None:
        self._worker, self._fault_log = worker, fault_log
        self._born = fault_log.progress(worker)[0]  # at which step this life begins
        mine = [(n, f) for n, f in enumerate(faults) if f.worker in (None, worker)]
        mine = [(n, f) for n, f in mine if f.kind in kinds]
        self._of: dict[str, list[tuple[int, Fault]]] = {
            phase: [each for each in mine if each[1].phase == phase] for phase in PHASES
        }
        self._left = {n: self._drawn(n, f) for n, f in mine if f.rate is not None}

    def _drawn(self, number: int, fault: Fault) -> int:
        """How many occasions pass, the one included at which it happens next.

        Each life draws anew: with the number of one that was cut short, what is rare would wait
        from the beginning again, and never happen.
        """
        assert fault.rate is not None, "only these are drawn"
        count = self._fault_log.count(number, self._worker)
        stream = (fault.seed, number, self._worker, count, self._born)
        chance = random.Random(repr(stream)).random()
        if fault.rate == 1:
            return 1
        return 1 + int(math.log(1 - chance) / math.log(1 - fault.rate))

    def has(self, *phases: str) -> bool:
        """Whether anything may ever happen in one of these phases."""
        return any(self._of[phase] for phase in phases)

    def due(self, phase: str, step: int) -> Iterator[Fault]:
        """What happens now; it counts as having happened the moment that it is handed out."""
        for number, fault in self._of[phase]:
            if fault.step is not None:
                ready = step >= fault.step and not self._fault_log.count(number, self._worker)
            else:
                self._left[number] -= 1
                ready = self._left[number] <= 0
            if ready:
                self._fault_log.happens(number, self._worker)
                if fault.rate is not None:
                    self._left[number] = self._drawn(number, fault)
                yield fault


def happened(faults: Sequence[Fault], fault_log: FaultLog) -> list[dict[str, Any]]:
    """What has happened to whom, how often, and when last (seconds of the monotonic clock)."""
    rows = []
    for number, fault in enumerate(faults):
        for worker in range(fault_log.n_workers):
            if count := fault_log.count(number, worker):
                row = {"kind": fault.kind, "phase": fault.phase, "worker": worker}
                rows.append({**row, "count": count, "last_s": fault_log.when_s(number, worker)})
    return rows
