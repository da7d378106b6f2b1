"""Which workers train, as one of them knows it."""

from __future__ import annotations

from hybridtrain.engine.protocol.messages import Gone


class WorkerGroup:
    """The workers of a run: which train, which are lost, and which of them leads.

    Args:
        worker: the number of this worker.
        n_workers: W, of which some may be gone or restarting.
    """

    def __init__(self, worker: int, n_workers: int) -> None:
        self.worker, self.n_workers = worker, n_workers
        self.solo = False  # the others have ended: a meeting has one participant
        self.is_saver = False  # acts as the leader, whatever its number
        self.met: tuple[int, ...] = tuple(range(n_workers))  # in the last meeting
        self.gone: list[Gone] = []  # for good
        self.remaining = False  # lost workers left mini-batches in the queue
        self.away: set[int] = set()  # to be restarted
        self.lost_at = 0  # version at the last loss
        self.joins = False  # restarted, and without a step so far

    @property
    def there(self) -> tuple[int, ...]:
        """The workers that train or will be restarted."""
        gone = {each.worker for each in self.gone}
        return tuple(worker for worker in range(self.n_workers) if worker not in gone)

    @property
    def is_whole(self) -> bool:
        """Whether all workers of the start train."""
        return not (self.gone or self.away or self.solo or self.joins)

    @property
    def place(self) -> int:
        """The index of this worker's item among those of the last meeting."""
        return 0 if self.solo else self.met.index(self.worker)

    @property
    def is_leader(self) -> bool:
        """Whether this worker logs, saves and draws for all."""
        if self.is_saver or (not self.gone and not self.away):  # read many times in a step
            return self.is_saver or self.worker == 0
        return self.worker == next(each for each in self.there if each not in self.away)

    def go_alone(self) -> None:
        """The others have ended, or are not to be waited for."""
        self.solo = True

    def rejoin(self, joined: bool = False) -> None:
        """Restarted: this worker makes its first step alone. ``joined``: it needs none."""
        self.joins = self.solo = not joined

    def choose_saver(self, is_saver: bool) -> None:
        """The server has chosen who saves: that worker acts as the leader."""
        self.is_saver = is_saver

    def meet(self, workers: tuple[int, ...], remaining: bool) -> None:
        """These workers have met. ``remaining``: lost workers left mini-batches in the queue."""
        self.met, self.remaining = workers, remaining

    def lose(self, notice: Gone) -> None:
        """A worker is lost, for good or until it is restarted."""
        self.lost_at = notice.version
        self.away |= {notice.worker} if notice.for_now else set()
        self.gone = [*self._gone_but(notice.worker), *([] if notice.for_now else [notice])]

    def restore(self, worker: int) -> None:
        """A worker has been restarted."""
        self.away -= {worker}
        self.gone = self._gone_but(worker)

    def _gone_but(self, worker: int) -> list[Gone]:
        return [each for each in self.gone if each.worker != worker]
