"""How long each worker of a recorded run took for each of its mini-batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hybridtrain.errors import UserError
from hybridtrain.recording.record_file import Record
from hybridtrain.recording.record_reader import find_record, read_record


def service_times(run: str | Path) -> dict[int, list[float]]:
    """Seconds of computing behind each push, worker by worker, in the order of the pushes.

    From a release to the next push, without what the worker waited for in between (meetings, the
    mean of all gradients) and without validation.

    Args:
        run: a run's directory, or its record.

    Raises:
        UserError: if there is no record, or a worker has pushed nothing.
    """
    return times_of(read_record(find_record(Path(run))))


def times_of(record: Record) -> dict[int, list[float]]:
    """The same, of a record that has been read."""
    pushes = record.of_kind("Push")
    times = {
        worker: pushes["own_s"][pushes["worker"] == worker].astype(np.float64).tolist()
        for worker in range(record.n_workers)
    }
    for worker, found in times.items():
        if not found:
            raise UserError(
                f"{record.path}: worker {worker} has pushed nothing in this run, so its service "
                "times are not known"
            )
    return times
