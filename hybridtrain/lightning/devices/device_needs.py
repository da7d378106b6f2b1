"""How much of its device's memory each worker of a run has needed, for all of them to read.

Measured by each worker behind its first mini-batches (the 1st, 2nd, 4th, ...) and at the end of
each epoch: the most that torch has reserved, cache included, driver's part left out.
"""

from __future__ import annotations

from hybridtrain.util.anonymous_files import SharedBytes

_NEEDED, _TOTAL = 0, 1  # int64 of each worker, in bytes; 0: not measured yet
_N_WORDS = 2


class DeviceNeeds:
    """Written by each worker for itself, read by all and by the calling process.

    Args:
        n_workers: W.
        n_devices: worker ``w`` computes on device ``w % n_devices``.
    """

    def __init__(self, n_workers: int, n_devices: int) -> None:
        self._n_workers, self._n_devices = n_workers, n_devices
        self._shared = SharedBytes(8 * _N_WORDS * n_workers)

    def note(self, worker: int, needed: int, total: int) -> None:
        """The worker has needed so many of its device's ``total`` bytes, if never more."""
        self._write(worker, _TOTAL, total)
        self._write(worker, _NEEDED, max(needed, self.of(worker)))

    def of(self, worker: int) -> int:
        """Bytes that it has needed so far; 0: it has not measured yet."""
        return self._read(worker, _NEEDED)

    def others(self, worker: int) -> dict[int, int]:
        """The others on the worker's device -> the bytes that each has needed; 0: see ``of``."""
        first = worker % self._n_devices
        there = range(first, self._n_workers, self._n_devices)
        return {each: self.of(each) for each in there if each != worker}

    def share(self, worker: int) -> float | None:
        """Of its device: what it has needed, and an equal part of what nobody there has needed.

        ``None`` until all workers on the device have measured, or where their needs do not fit.
        """
        own, others = self.of(worker), self.others(worker).values()
        total, needed = self._read(worker, _TOTAL), own + sum(others)
        if not own or not all(others) or needed > total:
            return None
        return (own + (total - needed) / (1 + len(others))) / total

    def figures(self) -> dict[str, dict[str, list[int]]]:
        """For the run's summary; nothing where nobody has measured."""
        workers = range(self._n_workers)
        needed, total = ([self._read(w, n) for w in workers] for n in (_NEEDED, _TOTAL))
        if not any(needed):
            return {}
        return {"device_memory": {"needed_bytes": needed, "total_bytes": total}}

    def close(self) -> None:
        """The calling process looks no more."""
        self._shared.close()

    def _read(self, worker: int, word: int) -> int:
        begin = 8 * (_N_WORDS * worker + word)
        return int.from_bytes(self._shared.map[begin : begin + 8], "little")

    def _write(self, worker: int, word: int, value: int) -> None:
        begin = 8 * (_N_WORDS * worker + word)
        self._shared.map[begin : begin + 8] = value.to_bytes(8, "little")
