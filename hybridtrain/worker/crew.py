"""Which workers train beside this one, as far as it has been told."""

from __future__ import annotations

from collections.abc import Callable

from hybridtrain.protocol.notices import Back, Gone


class Crew:
    """The workers of a run, seen by one of them.

    Args:
        worker: its number.
        n_workers: W, of which some may be gone, or about to come back.
    """

    def __init__(self, worker: int, n_workers: int) -> None:
        self.worker, self.n_workers = worker, n_workers
        self.solo = False  # the others have ended: meetings are with oneself
        self.is_saver = False  # does what one has to do for all, whoever it is
        self.met: tuple[int, ...] = tuple(range(n_workers))  # in the last meeting
        self.gone: list[Gone] = []  # who will not come back
        self.left = False  # whether they left something of the shared queue
        self.away: set[int] = set()  # who will come back
        self.lost_at = 0  # updates when the last of them was lost
        self.joins = False  # training has begun long ago, without this worker
        self.on_change: Callable[[], object] = lambda: None  # somebody has gone, or is back

    @property
    def there(self) -> tuple[int, ...]:
        """The workers that are there, or about to come back."""
        gone = {each.worker for each in self.gone}
        return tuple(worker for worker in range(self.n_workers) if worker not in gone)

    @property
    def is_whole(self) -> bool:
        """Whether all who have begun are there."""
        return not (self.gone or self.away or self.solo or self.joins)

    @property
    def rank(self) -> int:
        """This worker's place among those that are there."""
        return self.there.index(self.worker)

    @property
    def place(self) -> int:
        """Where this worker's item lies among those of the last meeting."""
        return 0 if self.solo else self.met.index(self.worker)

    @property
    def is_leader(self) -> bool:
        """Whether this worker does what one has to do for all: log, save, draw."""
        if self.is_saver or (not self.gone and not self.away):  # asked for many times in a step
            return self.is_saver or self.worker == 0
        return self.worker == next(each for each in self.there if each not in self.away)

    def hear_of(self, news: Gone | Back) -> None:
        """Somebody has gone, perhaps for now, or is back."""
        match news:
            case Gone(worker, version, for_now):
                self.lost_at = version
                self.away |= {worker} if for_now else set()
                self.gone += [] if for_now else [news]
            case Back(worker):
                self.away.discard(worker)
        self.on_change()
