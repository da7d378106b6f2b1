"""The contract of all makers: apply updates without the server, and report them to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybridtrain.engine.protocol.messages import Changed, Draw, DrawnBatch, MadeStep, Push
from hybridtrain.engine.worker.makers.logged_steps import LoggedSteps
from hybridtrain.engine.worker.pending_push import PendingPush, Taking

Covers = Callable[[], Sequence[DrawnBatch]]  # takes the mini-batches that a push covers


class Maker:
    """The server makes each update; the other makers override what they do without it.

    Args:
        log: of a run that is recorded or replayed.
    """

    makes_alone = False  # an update of one push, at once
    counts = False  # the steps of this worker, of which the server hears later
    untold: Sequence[MadeStep] = ()  # such steps

    def __init__(self, log: LoggedSteps | None = None) -> None:
        self.log = log or LoggedSteps()

    def begin(self, last: int | None) -> None:
        """The server has new optimizers. ``last``: after this version no update is made."""

    def timed(self) -> list[tuple[object, str, str]]:
        """Methods that step the masters, for profiles: object, method, name in the profile."""
        return []

    # ---- an update of one push ------------------------------------------------------------------

    def make(self, push: Push, covers: Covers) -> int | None:
        """Apply the gradient in the row; returns the version, or ``None``: send the push instead.

        Afterwards the worker's parameters are those of its update.
        """
        return None

    # ---- an update of all workers' pushes -------------------------------------------------------

    def come(self, push: Push, number: int, whole: bool) -> bool:
        """Arrive in this round with the gradient in the row; False: send the push instead.

        ``whole``: all workers train.
        """
        return False

    def wait(self, push: Push, number: int, disturbed: Callable[[], bool]) -> Push | None:
        """Wait for the round, after arriving; returns the push to send if the server makes it."""
        return push

    def leave(self, push: Push, number: int) -> Push | None:
        """Leave the round, after arriving; returns the push to send, unless the round is made."""
        return None

    def owed(self, made: bool) -> Changed | None:
        """Take the changed hyper-parameters that the server does not know; the caller sends them.

        ``made``: this round is made here; else its push carries its own.
        """
        return None

    # ---- steps that are counted here ------------------------------------------------------------

    @property
    def total(self) -> int:
        """The steps of all workers and the server, where workers count theirs."""
        return 0

    @property
    def may_wait(self) -> bool:
        """Whether the last report was recent."""
        return True

    @property
    def must_tell(self) -> bool:
        """Whether so many steps are unreported that the worker must wait for the last answer."""
        return False

    def count(self, push: Push, covers: Sequence[DrawnBatch], then: Taking) -> int:
        """Count a step made without the server; returns the number of steps of all workers."""
        raise NotImplementedError("only the server counts steps")

    def asked(self, covers: int, version: int) -> None:
        """The server has counted a step, which covers so many mini-batches."""

    def read(self, version: int) -> None:
        """The server has updated the worker's parameters to this version."""

    def tell(self, draws: tuple[Draw, ...]) -> tuple[MadeStep, PendingPush]:
        """Report all steps: the push to send, and its pending answer."""
        raise NotImplementedError("only the server counts steps")

    def forget(self) -> None:
        """This worker has failed: the server counts its steps from shared memory."""
