"""Streams of the stand-in: each does what it was given in its order, and as late as it may.

What is launched on a stream waits in a queue. It is done when somebody waits for it, or now and
then before, in an order drawn by chance; what it is going to write is spoilt until then. A device's
first stream ("default") computes: it does a kernel at once, after all that it was given before.
That is one of the orders that are allowed, so it would hide who has not waited for it. Therefore
each launch also knows what it comes after, as a vector of clocks: the last launch of each stream
that it, or the host that launched it, has waited for. Two that use the same memory, one of them to
write, neither after the other, are a :class:`Race`, whatever order they have run in.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.standin.memory import Block

Clock = dict[int, int]  # stream -> its launches so far


class Race(RuntimeError):
    """Two streams use the same memory, and nothing says in which order."""


@dataclass(eq=False)
class Mark:
    """``after``: what has been done when it is reached."""

    after: Clock = field(default_factory=dict)
    reached: bool = True


class Lanes:
    """All streams of one process, by number; those below ``n_devices`` are the devices' first.

    Args:
        n_devices: how many compute.
        seed: of the order.
        eagerness: how often something is done without being waited for.
    """

    def __init__(self, n_devices: int, seed: int = 0, eagerness: float = 0.3) -> None:
        self.n_devices, self.eagerness = n_devices, eagerness
        self._chance = random.Random(seed)
        self._device_of = list(range(n_devices))
        self._queues: dict[int, deque[Callable[[], bool]]] = defaultdict(deque)
        self._counts: Clock = defaultdict(int)
        self._known: dict[int, Clock] = defaultdict(dict)  # what each stream comes after
        self._host: Clock = {}
        self._current = threading.local()

    def begin_again(self, seed: int, eagerness: float) -> None:
        """From now on another order."""
        self._chance.seed(seed)
        self.eagerness = eagerness

    # ---- which ----------------------------------------------------------------------------------

    def new(self, device: int) -> int:
        self._device_of.append(device)
        return len(self._device_of) - 1

    def current(self, device: int) -> int:
        """Of the calling thread."""
        return getattr(self._current, "of", {}).get(device, device)

    @contextmanager
    def using(self, stream: int) -> Iterator[None]:
        device, before = self._device_of[stream], getattr(self._current, "of", {})
        self._current.of = before | {device: stream}
        try:
            yield
        finally:
            self._current.of = before

    def of(self, device: int) -> list[int]:
        """All streams of a device."""
        return [n for n, each in enumerate(self._device_of) if each == device]

    def computes(self, stream: int) -> bool:
        return stream < self.n_devices

    @property
    def n_queued(self) -> int:
        """What has not been done yet."""
        return sum(map(len, self._queues.values()))

    # ---- launching ------------------------------------------------------------------------------

    def launch(
        self,
        stream: int,
        work: Callable[[], object],
        reads: Iterable[Block] = (),
        writes: Iterable[Block] = (),
    ) -> None:
        """Queue it, or raise :class:`Race`."""
        reads, writes = tuple(reads), tuple(writes)
        known = self._join(stream, self._host)
        for block in (*reads, *writes):
            self._check(stream, block.writers, known)
        for block in writes:
            self._check(stream, block.readers, known)
        self._counts[stream] += 1
        for block in reads:
            block.readers[stream] = self._counts[stream]
        for block in writes:
            block.writers[stream] = self._counts[stream]
        self._queue(stream, lambda: bool(work()) or True)

    def used(self, stream: int, blocks: Iterable[Block]) -> None:
        """By the stream's last launch, which has made them."""
        for block in blocks:
            block.writers[stream] = self._counts[stream]

    def _check(self, stream: int, users: Clock, known: Clock) -> None:
        for other, count in users.items():
            if other != stream and known.get(other, 0) < count:
                raise Race(
                    f"stream {stream} is about to use memory that stream {other} uses, and has "
                    "not waited for it"
                )

    def _join(self, stream: int, other: Clock) -> Clock:
        _join(self._known[stream], other)
        return self._known[stream]

    def record(self, stream: int) -> Mark:
        """What the stream has been given so far."""
        after = self._join(stream, self._host) | {stream: self._counts[stream]}
        mark = Mark(after, reached=False)

        def reach() -> bool:
            mark.reached = True
            return True

        self._queue(stream, reach)
        return mark

    def wait(self, stream: int, mark: Mark) -> None:
        """What the stream is given from now on comes after the mark."""
        self._join(stream, mark.after)
        self._queue(stream, lambda: mark.reached)

    def synchronise(self, mark: Mark) -> None:
        """The host waits."""
        self._run_until(lambda: mark.reached)
        _join(self._host, mark.after)

    def drain(self, stream: int) -> None:
        """Do all that the stream was given; the host does not know of it."""
        self._run_until(lambda: not self._queues[stream])

    def learn(self, stream: int, marks: Iterable[Mark]) -> None:
        """The host has seen that these are reached, before it gives the stream more."""
        for mark in marks:
            self._join(stream, mark.after)

    def later(self, stream: int, work: Callable[[], object]) -> None:
        """As soon as the stream has done what it was given; no launch."""
        if self._queues[stream]:
            self._queues[stream].append(lambda: bool(work()) or True)
        else:
            work()

    # ---- doing it -------------------------------------------------------------------------------

    def _queue(self, stream: int, work: Callable[[], bool]) -> None:
        self._queues[stream].append(work)
        self.run_some()

    def run_some(self) -> None:
        """What happens meanwhile."""
        while self._chance.random() < self.eagerness and self._run_one():
            pass

    def _run_one(self) -> bool:
        """Whether some stream could do the next thing in its queue."""
        streams = [stream for stream, queue in self._queues.items() if queue]
        self._chance.shuffle(streams)
        for stream in streams:
            work = self._queues[stream].popleft()
            if work():
                return True
            self._queues[stream].appendleft(work)
        return False

    def _run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            assert self._run_one(), "the streams wait for one another for ever"


def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)
