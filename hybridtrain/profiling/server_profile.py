"""Measure the server: each event that it handles, and the threads of an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hybridtrain.profiling.time_spans import Phase, Track, follow, timed


class ServerWatch:
    """Measures one server until the end of its run.

    Args:
        server: a :class:`hybridtrain.server.server.Server`.
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
            track.note = getattr(event, "worker", -1)
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
