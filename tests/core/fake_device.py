"""A device whose lanes run late, and in an order drawn by chance.

Computation is the host's own and happens at once. What is queued on another lane is done only when
somebody waits for it, or now and then before; until then its destination holds NaN, so whoever
reads too early reads that. A source is read when the copy is done, so whoever changes it too early
changes what arrives. A gradient that is copied before its lane has waited for what made it arrives
as NaN, too.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hybridtrain.device import Lane

_SIDES = (Lane.OUT, Lane.BACK, Lane.DATA)


@dataclass(eq=False)
class Mark:
    """``made``: how much had been computed when it was recorded."""

    reached: bool = False
    made: int = 0


@dataclass
class FakeStreams:
    """See the module.

    Args:
        seed: of the order.
        eagerness: how often a lane does something without being waited for.
        lockable_bytes: how much memory can be page-locked.
    """

    seed: int = 0
    eagerness: float = 0.3
    lockable_bytes: float = float("inf")
    log: list[str] = field(default_factory=list)
    locked: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._queues: dict[Lane, deque[Callable[[], bool]]] = {lane: deque() for lane in _SIDES}
        self._clock = 0
        self._made: dict[torch.Tensor, int] = {}  # parameter -> when its gradient was
        self._nodes: list[Any] = []  # of the graph; without them their hooks would be gone
        self._knows = dict.fromkeys(_SIDES, 0)  # how much of what was computed a lane waited for

    # ---- what tests say and ask -----------------------------------------------------------------

    def observe(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note when their gradients are made; their own hooks stay as they are."""
        for parameter in parameters:
            if parameter.requires_grad:
                (node, _), *_ = parameter.view_as(parameter).grad_fn.next_functions
                node.register_prehook(partial(self._note, parameter))
                self._nodes.append(node)

    def _note(self, parameter: torch.Tensor, _: Any) -> None:
        self._clock += 1
        self._made[parameter] = self._clock

    def _when(self, source: torch.Tensor) -> int:
        """When it was computed, if it is a gradient that is observed."""
        for parameter, when in self._made.items():
            gradient = parameter.grad
            dense = gradient is not None and not gradient.is_sparse
            if dense and gradient.data_ptr() == source.data_ptr():
                return when
        return 0

    @property
    def n_queued(self) -> int:
        """What has not been done yet."""
        return sum(map(len, self._queues.values()))

    # ---- the protocol ---------------------------------------------------------------------------

    def current(self) -> str:
        return "the host"

    def record(self, lane: Lane, stream: str | None = None) -> Mark:
        if lane is Lane.COMPUTE:
            return Mark(True, self._clock)
        mark = Mark()

        def reach() -> bool:
            mark.reached = True
            return True

        self._queue(lane, reach)
        return mark

    def wait(self, lane: Lane, mark: Mark) -> None:
        if lane is Lane.COMPUTE:
            self._run_until(mark)
            return

        def go_on() -> bool:
            if mark.reached:
                self._knows[lane] = max(self._knows[lane], mark.made)
            return mark.reached

        self._queue(lane, go_on)

    def synchronise(self, mark: Mark) -> None:
        self.log.append("synchronise")
        self._run_until(mark)

    def reached(self, mark: Mark) -> bool:
        self._run_some()
        return mark.reached

    def copy(
        self, lane: Lane, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        for destination, source in zip(destinations, sources, strict=True):
            self._copy(lane, destination, source)

    def _copy(self, lane: Lane, destination: torch.Tensor, source: torch.Tensor) -> None:
        assert destination.shape == source.shape
        self.log.append(lane.value)
        if lane is Lane.COMPUTE:
            destination.copy_(source)
            return
        _poison(destination)
        when = self._when(source)

        def copy() -> bool:
            too_early = when > self._knows[lane]
            _poison(destination.data) if too_early else destination.data.copy_(source.data)
            return True

        self._queue(lane, copy)

    def landing(self, n: int) -> torch.Tensor:
        return torch.full((n,), float("nan"), dtype=torch.float64)

    def do(self, lane: Lane, work: Callable[[], None]) -> None:
        def run() -> bool:
            work()
            return True

        self._queue(lane, run)

    def keep(self, lane: Lane, tensor: torch.Tensor) -> None:
        pass

    def lock(self, region: torch.Tensor) -> str:
        if sum(each.nbytes for each in self.locked) + region.nbytes > self.lockable_bytes:
            return "the limit is reached"
        self.locked.append(region)
        return ""

    def unlock(self, region: torch.Tensor) -> None:
        self.locked = [each for each in self.locked if each is not region]

    # ---- doing it -------------------------------------------------------------------------------

    def _queue(self, lane: Lane, work: Callable[[], bool]) -> None:
        self._queues[lane].append(work)
        self._run_some()

    def _run_some(self) -> None:
        while self._chance.random() < self.eagerness and self._run_one():
            pass

    def _run_one(self) -> bool:
        """Whether some lane could do the next thing in its queue."""
        lanes = [lane for lane in _SIDES if self._queues[lane]]
        self._chance.shuffle(lanes)
        for lane in lanes:
            work = self._queues[lane].popleft()
            with torch.no_grad(), torch._C.DisableTorchFunction():
                done = work()
            if done:
                return True
            self._queues[lane].appendleft(work)
        return False

    def _run_until(self, mark: Mark) -> None:
        while not mark.reached:
            assert self._run_one(), "the lanes wait for one another for ever"


@torch.no_grad()
def _poison(tensor: torch.Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else 77)
