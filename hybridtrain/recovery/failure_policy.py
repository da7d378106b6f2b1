"""What is done about a worker that fails: the user's choice, and the decision of each case.

A worker fails when its process dies, when it is killed because it hangs, or when its code raises
what is not the user's own mistake in using this package (:class:`hybridtrain.errors.UserError`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hybridtrain.errors import UserError

CHOICES = ("stop", "continue", "restart")
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 30.0
_FORGET_S = 300.0  # a worker that has lived so long is as good as new


@dataclass(frozen=True, slots=True)
class OnFailure:
    """What the user has chosen.

    ``choice``: ``stop`` all, ``continue`` with those who are left, or ``restart`` the worker;
    ``min_workers``: with fewer left, the run stops; ``max_restarts``: in the whole run, ``None``:
    any number.
    """

    choice: str = "stop"
    min_workers: int = 1
    max_restarts: int | None = 3

    def check(self, n_workers: int) -> None:
        """There must be so many workers.

        Raises:
            UserError: if there are fewer from the start.
        """
        if self.min_workers > n_workers:
            raise UserError(
                f"min_workers={self.min_workers} was given for {n_workers} "
                f"worker{'s' * (n_workers > 1)}; give at most {n_workers}"
            )


@dataclass(frozen=True, slots=True)
class End:
    """The run is to end; ``reason`` is to be added to what has happened, if anything is."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class GoOn:
    """Those who are left go on."""


@dataclass(frozen=True, slots=True)
class Replace:
    """A new process is to take the worker's place, after ``delay_s``.

    ``anew``: nobody can tell it where training is, so all workers begin as at the start.
    """

    delay_s: float
    number: int  # of this restart, from 1
    anew: bool = False


Verdict = End | GoOn | Replace


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker is lost. ``workers``: the number of others; ``known``: where training was earlier.

    ``early``: no worker has come to where it would tell that.
    """

    workers: int
    known: bool = False
    early: bool = False


@dataclass
class Judge:
    """Decides what follows from a failure.

    Args:
        chosen: by the user.
    """

    chosen: OnFailure
    restarts: int = 0
    _recent: Counter[int] = field(default_factory=Counter)  # by worker
    _last_s: dict[int, float] = field(default_factory=dict)

    @property
    def ends_all(self) -> bool:
        """Whether any failure is the end."""
        return self.chosen.choice == "stop"

    def failed(self, worker: int, error: BaseException, left: WorkerGone, at_s: float) -> Verdict:
        """The worker has failed at ``at_s`` with this error."""
        match self.chosen.choice:
            case _ if isinstance(error, UserError):
                return End()  # it would happen again
            case _ if isinstance(error, KeyboardInterrupt):
                return End()  # of the user's code, as no signal makes one: so it is meant
            case "continue":
                return self._go_on(worker, left, at_s)
            case "restart":
                return self._replace(worker, left, at_s)
        return End()

    def _go_on(self, worker: int, gone: WorkerGone, at_s: float) -> Verdict:
        """Where training is is known behind the last update: then one process is enough."""
        n_left = gone.workers
        if n_left >= (1 if gone.known else self.chosen.min_workers):
            return GoOn()
        if gone.known:
            return self._replace(worker, gone, at_s)
        left = f"{n_left} worker{'s' * (n_left != 1)} would be left"
        return End(f"{left}, fewer than min_workers={self.chosen.min_workers}")

    def _replace(self, worker: int, left: WorkerGone, at_s: float) -> Verdict:
        most = self.chosen.max_restarts
        known = left.known or left.workers > 0
        if not (known or left.early):
            return End("nobody is left who could say where training is")
        if most is not None and self.restarts >= most:
            return End(f"it was restarted as often as max_restarts={most} allows in a run")
        if at_s - self._last_s.get(worker, at_s) > _FORGET_S:
            self._recent[worker] = 0
        self._last_s[worker] = at_s
        delay_s = min(_FIRST_DELAY_S * 2 ** self._recent[worker], _LONGEST_DELAY_S)
        self._recent[worker] += 1
        self.restarts += 1
        return Replace(delay_s, self.restarts, anew=not known)
