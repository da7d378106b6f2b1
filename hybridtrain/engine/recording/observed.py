"""A recorded run as virtual time needs it: times, mini-batches, epochs, strategy.

Theory of operation. The record holds the computing time of each mini-batch and the order in which
the workers' messages came. A worker is released a computing time before its next push. From the
push before that (the last that the server waited for) to the release lies an update, with the
replies' way. The record has some pushes of updates that workers make themselves too late, so the
update's time is the median of the minima of every W of these gaps. All workers have met where each
has asked for a meeting since its last push: at the end of an epoch, or for a validation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hybridtrain.engine.recording.record_file import DROPPED, Record
from hybridtrain.engine.recording.record_reader import (
    Cells,
    batch_size_of,
    batch_times,
    batches_in,
    find_record,
    read_record,
    usual,
)
from hybridtrain.errors import UserError
from hybridtrain.util.streams import printable_in

MOST_EVENTS = 20_000  # of a record that are read: what follows is taken to be alike
MOST_PUSHES = 2_000


@dataclass(frozen=True)
class Observed:
    """A run without what it trained.

    ``times``: worker -> seconds of its mini-batches, ``steps`` of which make a contribution on
    average (then each is the mean of one's). ``epoch``: samples between two
    meetings of all workers; ``None``: they never met. ``update_s``: of an update, with the replies'
    way. ``mini_batches``: the first ones of the run, of all workers together. ``strategy``: as
    configured; empty for a run from Python. ``hosts``: if there were several, the times of workers
    have the network in them. ``size_bytes``: of the parameters; 0: unknown.
    """

    times: Mapping[int, list[float]]
    batch_size: int
    steps: float
    epoch: int | None
    update_s: float
    mini_batches: int
    strategy: Mapping[str, Any]
    hosts: int = 1
    size_bytes: int = 0

    @property
    def n_workers(self) -> int:
        return len(self.times)


def observe(run: str | Path) -> Observed:
    """Read the beginning of a run's record, at most ``MOST_EVENTS``.

    Raises:
        UserError: if there is no record, a worker has pushed nothing, or the workers' usual
            mini-batches differ by more than a sample, or a tenth.
    """
    return observed_in(read_record(find_record(run), MOST_EVENTS))


def observed_in(record: Record) -> Observed:
    """:func:`observe` a record that has been read."""
    pushes, times, size = record.of_kind("Push"), batch_times(record), batch_size_of(record)
    given = pushes[pushes["samples"] > 0]
    batches = batches_in(record, given["samples"], size)
    each = given["samples"] / batches
    sizes = {usual(each[given["worker"] == worker]) for worker in times}
    least, most = min(sizes), max(sizes)
    # Workers that share an epoch of less than a mini-batch each have one sample more or less.
    if most - least > min(1, most / 10) or not least >= 1:
        raise UserError(
            f"{record.path}: mini-batches of {', '.join(f'{x:g}' for x in sorted(sizes))} samples "
            "were recorded; virtual time without a task has one size for all workers: give a run "
            "in which most mini-batches of each worker have the same (a smaller data.batch_size, "
            "or more data; no batch_size_per_worker)"
        )
    steps = float(batches.mean())
    return Observed(
        times=times,
        batch_size=max(1, round(size)),
        steps=steps,
        epoch=_epoch(record, round(size * steps)),
        update_s=_update_s(pushes, len(times)),
        mini_batches=round(min(len(given), MOST_PUSHES) * steps),
        strategy=printable_in(record.header["about"].get("config", {}).get("strategy", {})),
        hosts=record.n_hosts,
        size_bytes=record.told.get("begin", {}).get("bytes", 0),
    )


def _epoch(record: Record, pushed: int) -> int | None:
    """Samples between two meetings of all, without those of dropped pushes."""
    met, total, marks = set[int](), 0.0, [0.0]
    kinds = [record.kinds[kind] for kind in record.cells["kind"].tolist()]
    columns = (record.cells[name].tolist() for name in ("worker", "samples"))
    for kind, worker, samples in zip(kinds, *columns, strict=True):
        if kind == "Push":
            met.discard(worker)
            total += samples
        elif kind == DROPPED:
            total -= pushed
        elif kind == "Gather":
            met.add(worker)
            if len(met) == record.n_workers and total > marks[-1]:
                marks.append(total)
    if len(marks) < 2:
        return None
    return round(median(later - sooner for sooner, later in pairwise(marks))) or None


def _update_s(pushes: Cells, n_workers: int) -> float:
    at_s = pushes["at_s"]
    released_s = at_s - pushes["own_s"]
    before = np.searchsorted(at_s, released_s, side="right") - 1
    gaps = (released_s - at_s[before])[before >= 0]
    whole = gaps[: len(gaps) // n_workers * n_workers].reshape(-1, n_workers)
    return float(np.median(whole.min(axis=1))) if len(whole) else 0.0
