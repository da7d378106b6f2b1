"""Spans of time in one thread: sums of all spans, and a timeline of bounded length.

Theory of operation. Spans nest. A span's *own* time leaves out the spans inside it, so own times
add up to the time passed. Sums count every span, in constant memory. The timeline keeps single
spans, 34 bytes each: of every step at first, of every second one when it is full, and so on, so it
always covers the whole run. Times are of ``CLOCK_MONOTONIC``, the same for all processes of a host.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

# ---- the phases of a step, and the phase of each of Lightning's profiler actions ----------------


class Phase(StrEnum):
    """A row of the profile's table."""

    FORWARD = "forward"
    BACKWARD = "backward"
    DATA = "data"
    PUSH = "push"
    WAIT = "wait"
    PULL = "pull"
    UPDATE = "update"
    HOOKS = "hooks"
    LOOP = "loop"
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"
    SERVE = "serve"


MEANINGS = {
    Phase.FORWARD: "the training step, loss included",
    Phase.BACKWARD: "backward, and copying gradients while they are hot",
    Phase.DATA: "fetching the mini-batch and moving it to the device",
    Phase.PUSH: "collecting, checking and announcing gradients",
    Phase.WAIT: "for others, for the update, for the server's answer",
    Phase.PULL: "bringing parameters up to date",
    Phase.UPDATE: "the optimizer's arithmetic",
    Phase.HOOKS: "callbacks, hooks, schedulers, loggers",
    Phase.LOOP: "Lightning's loop, and what is not measured",
    Phase.VALIDATION: "all of it",
    Phase.CHECKPOINT: "until training goes on",
    Phase.SERVE: "requests, apart from the above",
}

# Spans inside these count for them, whatever their own phase; the later one wins.
ENCLOSING = (Phase.VALIDATION, Phase.CHECKPOINT)


def phase_of(action: str) -> Phase | None:
    """The phase of an action of Lightning's profilers; ``None``: it is not measured.

    Actions that only enclose others are not measured: their own time is the loop's.
    """
    kind, _, what = action.rpartition(".")
    if what.endswith(("_next", "batch_to_device", "_batch_transfer")):
        return None if kind == "[_EvaluationLoop]" else Phase.DATA
    if action == "save_checkpoint":
        return Phase.CHECKPOINT
    if kind.startswith("[Strategy]"):
        return {
            "training_step": Phase.FORWARD,
            "backward": Phase.BACKWARD,
            "on_train_batch_start": Phase.HOOKS,
        }.get(what)
    users = kind.startswith(("[Callback]", "[LightningModule]", "[LightningDataModule]"))
    return Phase.HOOKS if users and what != "optimizer_step" else None


def short_name(action: str) -> str:
    """The action's name in a timeline: ``[Callback]A{...}.hook`` becomes ``A.hook``."""
    kind, _, what = action.rpartition(".")
    if kind.startswith("[Callback]"):
        return f"{kind.removeprefix('[Callback]').partition('{')[0]}.{what}"
    if kind.startswith("[Lightning"):
        return f"{'module' if kind.startswith('[LightningModule]') else 'data'}.{what}"
    if kind.startswith("[Strategy]"):
        return what
    return "next mini-batch" if what.endswith("_next") else action


LIMIT = 200_000  # most spans in a timeline, all tracks together


@dataclass(slots=True)
class SpanSum:
    """All spans of one kind; times in nanoseconds."""

    own_ns: int = 0
    longest_ns: int = 0
    n: int = 0


@dataclass(slots=True)
class _Open:
    kind: int
    phase: Phase
    begin_ns: int
    inside_ns: int = 0  # time of the spans inside this one


@dataclass
class Track:
    """The spans of one thread.

    Args:
        name: shown in the timeline.
        limit: most spans in the timeline.
        clock: returns nanoseconds.
    """

    name: str
    limit: int = LIMIT
    clock: Callable[[], int] = time.monotonic_ns
    step: int = 0  # the current one
    note: int = 0  # stored with each span of the timeline
    every: int = 1  # the timeline keeps one step in this many
    kinds: list[tuple[str, Phase]] = field(default_factory=list)
    sums: dict[tuple[str, Phase], SpanSum] = field(default_factory=lambda: defaultdict(SpanSum))
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
        self.columns = (self.kind, self.begun, self.ended, self.steps, self.notes)

    # ---- measuring ------------------------------------------------------------------------------

    def kind_of(self, name: str, phase: Phase) -> int:
        """Number of this kind of span, for :meth:`begin`."""
        if (name, phase) not in self._number:
            self._number[name, phase] = len(self.kinds)
            self.kinds.append((name, phase))
        return self._number[name, phase]

    def begin(self, kind: int) -> None:
        """Begin a span inside the one that is open."""
        phase = self.kinds[kind][1]
        if self._open:
            outer = self._open[-1].phase
            if outer in ENCLOSING and phase is not ENCLOSING[-1]:
                phase = outer
        self._open.append(_Open(kind, phase, self.clock()))

    def end(self) -> None:
        """End the innermost open span."""
        one, now = self._open.pop(), self.clock()
        length = now - one.begin_ns
        self._count((self.kinds[one.kind][0], one.phase), length - one.inside_ns, length)
        if self._open:
            self._open[-1].inside_ns += length
        self.last_ns = now
        if self._kept:
            self.keep(one.kind, one.begin_ns, now)

    def _count(self, key: tuple[str, Phase], own_ns: int, length_ns: int) -> None:
        total = self.sums[key]
        total.own_ns += own_ns
        total.n += 1
        if length_ns > total.longest_ns:
            total.longest_ns = length_ns

    def add(self, kind: int, begin_ns: int, end_ns: int, own_ns: int) -> None:
        """Add a span measured elsewhere, of which ``own_ns`` are its own time."""
        self._count(self.kinds[kind], own_ns, end_ns - begin_ns)
        self.last_ns = end_ns
        if self._kept:
            self.keep(kind, begin_ns, end_ns)

    def end_all(self, kind: int) -> None:
        """End the innermost open span of this kind, and those inside it left by an exception."""
        if any(one.kind == kind for one in self._open):
            while self._open[-1].kind != kind:
                self.end()
            self.end()

    def next_step(self, step: int) -> None:
        """Begin a step."""
        self.step, self._kept = step, step % self.every == 0
        self.n_steps += 1

    def mark(self, note: int) -> None:
        """Spans that are kept from now on have this number."""
        self.note = note

    def rename(self, name: str) -> None:
        """The name of the track on the timeline."""
        self.name = name

    def keep(self, kind: int, begin_ns: int, end_ns: int) -> None:
        """Add a span to the timeline."""
        self.kind.append(kind)
        self.begun.append(begin_ns)
        self.ended.append(end_ns)
        self.steps.append(self.step)
        self.notes.append(self.note)
        if len(self.kind) >= self.limit:
            self._thin_out()

    def _thin_out(self) -> None:
        """Keep every second step of the timeline, until there is room."""
        while len(self.kind) >= self.limit and self.every <= max(1, self.step):
            self.every *= 2
            rows = zip(*self.columns, strict=True)
            kept = [row for row in rows if row[3] % self.every == 0]
            self._empty()
            for column, values in zip(self.columns, zip(*kept, strict=True), strict=False):
                column.extend(values)
        if len(self.kind) >= self.limit:  # a single step exceeds the limit
            self._empty()
        self._kept = self.step % self.every == 0

    def restart(self) -> None:
        """End start-up: its spans stay in the timeline, but in no sum."""
        self.sums.clear()
        self.n_steps = 0
        self.first_ns = self.last_ns = self.clock()
        for one in self._open:
            one.inside_ns = self.first_ns - one.begin_ns

    # ---- afterwards -----------------------------------------------------------------------------

    def phases(self) -> dict[Phase, float]:
        """Seconds of each phase; time in no span counts for the loop."""
        seconds = dict.fromkeys(Phase, 0.0)
        for (_, phase), total in self.sums.items():
            seconds[phase] += total.own_ns / 1e9
        seconds[Phase.LOOP] += max(0.0, self.seconds - sum(seconds.values()))
        return {phase: s for phase, s in seconds.items() if s > 0}

    @property
    def seconds(self) -> float:
        """Seconds from the first span to the last."""
        return (self.last_ns - self.first_ns) / 1e9

    def packed(self) -> dict[str, Any]:
        """The track as plain data, for another process."""
        self.end_open()
        return {
            "name": self.name,
            "every": self.every,
            "kinds": [[name, str(phase)] for name, phase in self.kinds],
            "sums": [[n, str(p), t.own_ns, t.longest_ns, t.n] for (n, p), t in self.sums.items()],
            "span": [self.made_ns, self.first_ns, self.last_ns, self.n_steps],
            "rows": [list(each) for each in self.columns],
        }

    def end_open(self) -> None:
        """End all open spans."""
        while self._open:
            self.end()

    @classmethod
    def unpacked(cls, data: dict[str, Any]) -> Track:
        """The track from its plain data."""
        track = cls(data["name"], every=data["every"])
        track.kinds = [(name, Phase(phase)) for name, phase in data["kinds"]]
        track.sums |= {(n, Phase(p)): SpanSum(own, top, k) for n, p, own, top, k in data["sums"]}
        track.made_ns, track.first_ns, track.last_ns, track.n_steps = data["span"]
        for column, values in zip(track.columns, data["rows"], strict=True):
            column.extend(values)
        return track


def cost_of_span_ns() -> float:
    """Measure the time that one span costs on this machine."""
    track = Track("", limit=4096)
    kind = track.kind_of("", Phase.LOOP)
    for _ in range(2000):
        track.begin(kind)
        track.end()
    return (track.last_ns - track.first_ns) / 2000


# ---- spans of method calls ----------------------------------------------------------------------


def timed(track: Track, owner: Any, method: str, phase: Phase, name: str = "") -> None:
    """Replace ``owner.method``, if there is one, so that each call is a span."""
    original = getattr(owner, method, None)
    if original is None or hasattr(original, "measured"):
        return
    kind = track.kind_of(name or method, phase)
    begin, end = track.begin, track.end

    def call(*args: Any, **kwargs: Any) -> Any:
        begin(kind)
        try:
            return original(*args, **kwargs)
        finally:
            end()

    call.measured = True  # type: ignore[attr-defined]
    setattr(owner, method, call)


def follow(owner: Any, method: str, then: Callable[[], object]) -> None:
    """Replace ``owner.method``, so that ``then`` runs after every call."""
    original = getattr(owner, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then()
        return result

    setattr(owner, method, call)


# ---- measure the server: each event that it handles, and the threads of an update ---------------


class ServerWatch:
    """Measures one server until the end of its run.

    Args:
        server: a :class:`hybridtrain.engine.server.server.ParameterServer`.
        limit: most spans in each track's timeline.
    """

    def __init__(self, server: Any, limit: int) -> None:
        self._limit = limit
        self.track = Track("server", limit)
        self.lanes: dict[int, Track] = {}
        self._server = server
        self._measure_events()
        follow(self._server, "adopt", self._adopted)
        pool = self._server._pool
        self._map = pool.map
        pool.map = self._measured_map

    @property
    def tracks(self) -> list[Track]:
        """The server's own track, then those of the threads of updates."""
        return [self.track, *(self.lanes[lane] for lane in sorted(self.lanes))]

    def _measure_events(self) -> None:
        track, original, statistics = self.track, self._server.on, self._server.statistics
        kinds: dict[type, int] = {}

        def on(event: Any) -> Any:
            what = type(getattr(event, "message", event))
            kind = kinds.get(what)
            if kind is None:
                kind = kinds[what] = track.kind_of(what.__name__.lower(), Phase.SERVE)
            track.mark(getattr(event, "worker", -1))
            if behind := statistics.version - track.step:
                track.next_step(statistics.version)
                track.n_steps += max(0, behind - 1)  # updates made without the server
            track.begin(kind)
            try:
                return original(event)
            finally:
                track.end()

        self._server.on = on

    def _adopted(self) -> None:
        """Training begins: measure the store and the optimizers, which now exist."""
        self.track.restart()
        self.track.step = self._server.statistics.version
        optimizers, store = self._server.optimizers, self._server.store
        for method in ("step", "hold"):
            timed(self.track, optimizers, method, Phase.UPDATE, "update")
        timed(self.track, optimizers, "dump", Phase.CHECKPOINT, "state of the optimizers")
        if store is not None and store.private_parameters:
            timed(self.track, store, "refresh", Phase.PULL, "copy parameters")

    def _measured_map(self, function: Callable[[int, Any], Any], tasks: Sequence[Any]) -> list[Any]:
        """Make one span of each thread's calls, from the begin of the first to the last's end."""
        seen: dict[int, list[int]] = {}  # lane -> begin, end, busy
        clock = self.track.clock

        def measured(lane: int, task: Any) -> Any:
            begun = clock()
            try:
                return function(lane, task)
            finally:
                span = seen.setdefault(lane, [begun, 0, 0])
                span[1] = clock()
                span[2] += span[1] - begun

        try:
            return self._map(measured, tasks)
        finally:
            for lane, (begun, ended, busy) in seen.items():
                self._note(lane, begun, ended, busy)

    def _note(self, lane: int, begun: int, ended: int, busy: int) -> None:
        if lane not in self.lanes:
            self.lanes[lane] = Track(f"update, thread {lane}", self._limit)
            self.lanes[lane].first_ns = self.track.first_ns
        track = self.lanes[lane]
        if track.step != self.track.step:
            track.next_step(self.track.step)
        track.add(track.kind_of("arithmetic", Phase.UPDATE), begun, ended, busy)
