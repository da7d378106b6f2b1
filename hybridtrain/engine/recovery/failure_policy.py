"""Decide on a worker's failure, by the user's choice: stop, continue, or restart the worker.

A worker fails when its process dies, when the watchdog kills it because it hangs, or when its code
raises anything but a :class:`hybridtrain.errors.UserError`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hybridtrain.errors import UserError

CHOICES = ("stop", "continue", "restart")
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 30.0
_FORGET_S = 300.0  # after so long without a failure the delay begins at the first one again


@dataclass(frozen=True, slots=True)
class OnFailure:
    """``strategy.on_failure`` and its limits.

    ``choice``: ``stop`` all, ``continue`` with the remaining workers, or ``restart`` the worker;
    ``min_workers``: with fewer, the run stops; ``max_restarts``: per run, ``None``: no limit;
    ``merges``: with fewer the run stops, too, because of its merge rule; ``joins``: hosts may come
    while training runs that were not there at its start.
    """

    choice: str = "stop"
    min_workers: int = 1
    max_restarts: int | None = 3
    merges: int = 1
    joins: bool = False

    @property
    def changes(self) -> bool:
        """Whether the workers that share an evaluation may change."""
        return self.choice != "stop" or self.joins

    @property
    def tells(self) -> bool:
        """Whether a worker may be asked, in the middle of a step, where training is."""
        return self.choice == "restart" or self.joins

    def check(self, n_workers: int) -> None:
        """Compare ``min_workers`` with the number of workers at the start.

        Raises:
            UserError: if it is larger.
        """
        if self.min_workers > n_workers:
            raise UserError(
                f"min_workers={self.min_workers} was given for {n_workers} "
                f"worker{'s' * (n_workers > 1)}; give at most {n_workers}"
            )


@dataclass(frozen=True, slots=True)
class End:
    """End the run; ``reason`` is appended to the error that the user sees."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class GoOn:
    """The remaining workers continue."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Restart the worker after ``delay_s``.

    ``anew``: no process knows the training progress, so all workers begin as at the start.
    """

    delay_s: float
    number: int  # of this restart, from 1
    anew: bool = False


Verdict = End | GoOn | Replace


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The run after a loss: ``workers`` remain; ``known``: there is an earlier progress report.

    ``early``: no worker has reached the point of its first report.
    """

    workers: int
    known: bool = False
    early: bool = False


@dataclass
class Judge:
    """Decides what follows from each failure, by the user's choice."""

    chosen: OnFailure
    restarts: int = 0
    _recent: Counter[int] = field(default_factory=Counter)  # by worker
    _last_s: dict[int, float] = field(default_factory=dict)

    @property
    def ends_all(self) -> bool:
        """Whether any failure ends the run."""
        return self.chosen.choice == "stop"

    def failed(self, worker: int, error: BaseException, left: WorkerGone, at_s: float) -> Verdict:
        """Decide on a worker's failure at ``at_s`` with this error."""
        match self.chosen.choice:
            case _ if isinstance(error, UserError):
                return End()  # a restarted worker would raise it again
            case _ if isinstance(error, KeyboardInterrupt):
                return End()  # raised by user code on purpose: no signal raises one in a worker
            case "continue":
                return self._go_on(worker, left, at_s)
            case "restart":
                return self._replace(worker, left, at_s, getattr(error, "counts", True))
        return End()

    def _go_on(self, worker: int, gone: WorkerGone, at_s: float) -> Verdict:
        """After the last update the progress is ``known``: then one process is enough."""
        n_left, chosen = gone.workers, self.chosen
        if n_left >= (1 if gone.known else max(chosen.min_workers, chosen.merges)):
            return GoOn()
        if gone.known:
            return self._replace(worker, gone, at_s)
        left = f"{n_left} worker{'s' * (n_left != 1)} would be left"
        if n_left < chosen.min_workers:
            return End(f"{left}, fewer than min_workers={chosen.min_workers}")
        return End(f"{left}, and the merge rule needs {chosen.merges}")

    def _replace(self, worker: int, left: WorkerGone, at_s: float, counts: bool = True) -> Verdict:
        """``counts``: not one of several workers that are lost with their host."""
        most = self.chosen.max_restarts
        known = left.known or left.workers > 0
        if not (known or left.early):
            return End("nobody is left who could say where training is")
        if most is not None and self.restarts + counts > most:
            return End(f"it was restarted as often as max_restarts={most} allows in a run")
        if at_s - self._last_s.get(worker, at_s) > _FORGET_S:
            self._recent[worker] = 0
        self._last_s[worker] = at_s
        delay_s = min(_FIRST_DELAY_S * 2 ** self._recent[worker], _LONGEST_DELAY_S)
        self._recent[worker] += 1
        self.restarts += counts
        return Replace(delay_s, self.restarts, anew=not known)
