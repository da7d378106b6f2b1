"""The timeline of a recorded run, made of the times in its record; nothing is computed again.

Theory of operation. Each request's cell says when it came and how long its worker had computed
since its release, without waiting and validation. So the worker has computed just before, and
waited before that. Workers that make updates one by one never wait. Where they make the updates of
rounds, the cell of a worker that was sooner than the one before it has that one's time, so both
begin together. Times are of training: validation takes none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridtrain.engine.protocol.messages import (
    Average,
    Begin,
    Gather,
    Install,
    Paused,
    Pull,
    Push,
    Resumed,
)
from hybridtrain.engine.recording.record_file import DROPPED, UPDATED, WAITED, Record, RecordEvent
from hybridtrain.engine.server.timeline import BarState, Timeline, TrainingTime

_PUSH, _PAUSED, _RESUMED = Push.__name__, Paused.__name__, Resumed.__name__
_FRESH = (_PUSH, Begin.__name__, Pull.__name__)  # computing is counted anew after their answer
_ENDS = (*_FRESH, Average.__name__, Gather.__name__)  # of a bar; the others are quick


@dataclass(slots=True)
class _RecordedWorker:
    """The end of the last bar, and how long the worker had computed since its release."""

    since_s: float = 0.0
    own_s: float = 0.0
    waited_s: float = 0.0  # before it sends its next push


def timeline_of(record: Record, begin_s: float | None = None) -> Timeline:
    """The timeline of a recorded run.

    Args:
        begin_s: seconds of training; default: when each worker has pushed once, as first steps
            take longer.
    """
    if begin_s is not None:
        return _read(record, begin_s)
    found, firsts = _read(record, 0.0), dict[int, float]()
    for bar in found.bars:
        if bar.doing is not BarState.WAITING:
            firsts.setdefault(bar.worker, bar.end_s)
    if len(firsts) < record.n_workers or (latest_s := max(firsts.values())) >= found.end_s:
        return found
    return _read(record, latest_s)


def _read(record: Record, begin_s: float) -> Timeline:
    reading = _Reading(record, begin_s)
    for event, own_s in zip(record.events(), record.cells["own_s"].tolist(), strict=True):
        if event.at_s >= reading.begin_s:
            reading.take(event, own_s)
    return reading.timeline


class _Reading:
    """Reads events from the begin of training on."""

    def __init__(self, record: Record, begin_s: float) -> None:
        pushes, installs = record.of_kind(_PUSH), record.of_kind(Install.__name__)["at_s"]
        complete = UPDATED in record.kinds or bool(pushes["made"].all())
        self.timeline = Timeline(record.n_workers, begin_s, complete=complete)
        self.begin_s = float(max(installs, default=0.0))
        self._in_place = record.in_place
        whole_rounds = record.header["requirements"].get("whole_rounds", True)
        self._per_update = record.n_workers if whole_rounds else 1
        self._workers = [_RecordedWorker() for _ in range(record.n_workers)]
        # The workers that have come: number, begin, end and length of their computing.
        self._round: list[tuple[int, float, float, float]] = []
        self._time = TrainingTime(self.begin_s)

    def take(self, event: RecordEvent, own_s: float) -> None:
        """Add what the next event shows."""
        now_s, kind = self._time.of(event.at_s), event.kind
        if kind == _PAUSED:
            self._time.pause(event.at_s)
        elif kind == _RESUMED:
            self._time.resume(event.at_s)
        elif kind == UPDATED:
            self.timeline.updated(now_s)
        elif kind == WAITED:
            self._workers[event.worker].waited_s = own_s
        elif kind == DROPPED:
            self.timeline.dropped(event.worker)
        elif event.made:
            self._made(event.worker, own_s, now_s)
        elif kind in _ENDS:
            self._ended(event.worker, kind, own_s, now_s)

    def _ended(self, number: int, kind: str, own_s: float, now_s: float) -> None:
        """The worker has waited, computed, and perhaps waited again until now."""
        worker = self._workers[number]
        end_s, worker.waited_s = now_s - worker.waited_s, 0.0
        computing_s = now_s if self._in_place else max(0.0, own_s - worker.own_s)
        self._add(number, max(worker.since_s, end_s - computing_s), end_s, now_s)
        worker.own_s = 0.0 if kind in _FRESH else own_s

    def _made(self, number: int, own_s: float, now_s: float) -> None:
        """The push is part of an update that workers have made."""
        if self._per_update == 1:
            self._add(number, self._workers[number].since_s, now_s, now_s)
            self.timeline.updated(now_s)
            return
        latest_s = self._round[-1][2] if self._round else -math.inf
        begin_s = now_s - own_s if now_s > latest_s else min(now_s - own_s, self._round[0][1])
        self._round.append((number, max(begin_s, self._workers[number].since_s), now_s, own_s))
        if len(self._round) == self._per_update:
            for each, begin_s, _, computing_s in self._round:
                self._add(each, begin_s, min(begin_s + computing_s, now_s), now_s)
            self._round.clear()
            self.timeline.updated(now_s)

    def _add(self, number: int, begin_s: float, end_s: float, until_s: float) -> None:
        """The worker waits until ``begin_s``, computes, and waits again from ``end_s`` on."""
        worker = self._workers[number]
        self.timeline.waited(number, worker.since_s, begin_s)
        self.timeline.computed(number, begin_s, end_s)
        self.timeline.waited(number, end_s, until_s)
        worker.since_s, worker.own_s = until_s, 0.0
