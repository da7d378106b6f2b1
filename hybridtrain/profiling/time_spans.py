"""Spans of time in one thread: sums of all of them, and a bounded sample one by one.

Theory of operation. Spans nest. What a span takes apart from those inside it is its *own* time, so
own times add up to the time that has passed. Sums are kept of every span, at a constant amount of
memory. The timeline keeps spans one by one, 34 bytes each: of every step at first; when there is no
room left, of every second one, and so on, so that it always covers the whole run. Times are of
``CLOCK_MONOTONIC``, which is one clock for all processes of a host.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hybridtrain.profiling.phases import ENCLOSING, Phase

LIMIT = 200_000  # spans in a timeline, of all tracks together


@dataclass(slots=True)
class Sum:
    """Of all spans of one kind: times in nanoseconds."""

    own_ns: int = 0
    longest_ns: int = 0
    n: int = 0


@dataclass(slots=True)
class _Open:
    kind: int
    phase: Phase
    begin_ns: int
    inside_ns: int = 0  # of spans within this one


@dataclass
class Track:
    """The spans of one thread.

    Args:
        name: as shown.
        limit: how many spans to keep one by one.
        clock: nanoseconds.
    """

    name: str
    limit: int = LIMIT
    clock: Callable[[], int] = time.monotonic_ns
    step: int = 0  # under way
    note: int = 0  # a second number that goes with each span
    every: int = 1  # steps between those that are kept
    kinds: list[tuple[str, Phase]] = field(default_factory=list)
    sums: dict[tuple[str, Phase], Sum] = field(default_factory=dict)
    first_ns: int = 0
    last_ns: int = 0
    n_steps: int = 0

    def __post_init__(self) -> None:
        self._number: dict[tuple[str, Phase], int] = {}
        self._open: list[_Open] = []
        self._kept = True
        self._empty()
        self.made_ns = self.first_ns = self.last_ns = self.clock()

    def _empty(self) -> None:
        self.kind, self.begun, self.ended = array("H"), array("q"), array("q")
        self.steps, self.notes = array("q"), array("q")

    # ---- measuring ------------------------------------------------------------------------------

    def kind_of(self, name: str, phase: Phase) -> int:
        """The number of a kind of span, to begin such spans with."""
        if (name, phase) not in self._number:
            self._number[name, phase] = len(self.kinds)
            self.kinds.append((name, phase))
        return self._number[name, phase]

    def begin(self, kind: int) -> None:
        """A span begins, inside the one that is open."""
        phase = self.kinds[kind][1]
        if self._open:
            outer = self._open[-1].phase
            if outer in ENCLOSING and phase is not ENCLOSING[-1]:
                phase = outer
        self._open.append(_Open(kind, phase, self.clock()))

    def end(self) -> None:
        """The innermost open span ends."""
        one, now = self._open.pop(), self.clock()
        length = now - one.begin_ns
        self._count((self.kinds[one.kind][0], one.phase), length - one.inside_ns, length)
        if self._open:
            self._open[-1].inside_ns += length
        self.last_ns = now
        if self._kept:
            self.keep(one.kind, one.begin_ns, now)

    def _count(self, key: tuple[str, Phase], own_ns: int, length_ns: int) -> None:
        total = self.sums.get(key)
        if total is None:
            total = self.sums[key] = Sum()
        total.own_ns += own_ns
        total.n += 1
        if length_ns > total.longest_ns:
            total.longest_ns = length_ns

    def add(self, kind: int, begin_ns: int, end_ns: int, own_ns: int) -> None:
        """A span that was measured elsewhere; ``own_ns`` of it were spent on what it is about."""
        self._count(self.kinds[kind], own_ns, end_ns - begin_ns)
        self.last_ns = end_ns
        if self._kept:
            self.keep(kind, begin_ns, end_ns)

    def end_all(self, kind: int) -> None:
        """End the innermost open span of this kind, and what an exception has left open in it."""
        if any(one.kind == kind for one in self._open):
            while self._open[-1].kind != kind:
                self.end()
            self.end()

    def next_step(self, step: int) -> None:
        """A step begins."""
        self.step, self._kept = step, step % self.every == 0
        self.n_steps += 1

    def keep(self, kind: int, begin_ns: int, end_ns: int) -> None:
        """One span of the timeline."""
        self.kind.append(kind)
        self.begun.append(begin_ns)
        self.ended.append(end_ns)
        self.steps.append(self.step)
        self.notes.append(self.note)
        if len(self.kind) >= self.limit:
            self._thin_out()

    def _thin_out(self) -> None:
        """Keep half of the steps, those that make one."""
        while len(self.kind) >= self.limit and self.every <= max(1, self.step):
            self.every *= 2
            old = zip(self.kind, self.begun, self.ended, self.steps, self.notes, strict=True)
            rows = [row for row in old if row[3] % self.every == 0]
            self._empty()
            for kind, begun, ended, step, note in rows:
                self.kind.append(kind)
                self.begun.append(begun)
                self.ended.append(ended)
                self.steps.append(step)
                self.notes.append(note)
        if len(self.kind) >= self.limit:  # one step alone is more than there is room for
            self._empty()
        self._kept = self.step % self.every == 0

    def restart(self) -> None:
        """What was measured so far was start-up: it stays in the timeline, but in no sum."""
        self.sums.clear()
        self.n_steps = 0
        self.first_ns = self.last_ns = self.clock()
        for one in self._open:
            one.inside_ns = self.first_ns - one.begin_ns

    # ---- afterwards -----------------------------------------------------------------------------

    def phases(self) -> dict[Phase, float]:
        """Seconds of each phase; what is in no span is the loop's."""
        seconds = dict.fromkeys(Phase, 0.0)
        for (_, phase), total in self.sums.items():
            seconds[phase] += total.own_ns / 1e9
        seconds[Phase.LOOP] += max(0.0, self.seconds - sum(seconds.values()))
        return {phase: s for phase, s in seconds.items() if s > 0}

    @property
    def seconds(self) -> float:
        """From the first span to the last."""
        return (self.last_ns - self.first_ns) / 1e9

    def packed(self) -> dict[str, Any]:
        """In plain data, for another process."""
        self.end_open()
        return {
            "name": self.name,
            "every": self.every,
            "kinds": [[name, str(phase)] for name, phase in self.kinds],
            "sums": [[n, str(p), t.own_ns, t.longest_ns, t.n] for (n, p), t in self.sums.items()],
            "span": [self.made_ns, self.first_ns, self.last_ns, self.n_steps],
            "rows": [
                list(each) for each in (self.kind, self.begun, self.ended, self.steps, self.notes)
            ],
        }

    def end_open(self) -> None:
        """Nothing more will come."""
        while self._open:
            self.end()

    @classmethod
    def unpacked(cls, data: dict[str, Any]) -> Track:
        """The other way round."""
        track = cls(data["name"], every=data["every"])
        track.kinds = [(name, Phase(phase)) for name, phase in data["kinds"]]
        track.sums = {(n, Phase(p)): Sum(own, top, k) for n, p, own, top, k in data["sums"]}
        track.made_ns, track.first_ns, track.last_ns, track.n_steps = data["span"]
        kind, begun, ended, steps, notes = data["rows"]
        track.kind, track.begun = array("H", kind), array("q", begun)
        track.ended = array("q", ended)
        track.steps, track.notes = array("q", steps), array("q", notes)
        return track


def cost_of_span_ns() -> float:
    """What measuring one span takes on this machine, now."""
    track = Track("", limit=4096)
    kind = track.kind_of("", Phase.LOOP)
    for _ in range(2000):
        track.begin(kind)
        track.end()
    return (track.last_ns - track.first_ns) / 2000
