"""Interfaces of a client: its connection, the wake-ups of other workers, and its callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hybridtrain.engine.protocol.messages import Reply, ScheduleCall

Pause = Callable[[], float | None]
TakeCalls = Callable[[tuple[ScheduleCall, ...]], object]


class Connection(Protocol):
    """Carries messages between a client and its server."""

    def send(self, message: Any) -> None:
        """Send a request, a note, or the end of the worker."""

    def receive(self) -> tuple[Reply, int | None]:
        """Wait for the next reply; returns it with the descriptor sent beside it."""

    def ready(self) -> bool:
        """Whether ``receive`` would return at once."""


class Bells(Protocol):
    """How workers wake one another."""

    def ring(self) -> None:
        """Wake the other workers."""

    def wait(self, for_s: float) -> None:
        """Wait for a ring or a message of the server, at most ``for_s`` seconds."""


class Listeners:
    """Callbacks of the client; each part of its worker registers its own once."""

    def __init__(self) -> None:
        self.change: Callable[[], object] = lambda: None
        self.calls: TakeCalls = lambda calls: None
        self.come: Callable[[str], object] = lambda to: None
        self.tell: Callable[[], bytes] | None = None
        self.meanwhile: Pause | None = None

    def on_change(self, then: Callable[[], object]) -> None:
        """A worker is gone or back."""
        self.change = then

    def on_calls(self, take: TakeCalls) -> None:
        """Other workers have called learning-rate schedules."""
        self.calls = take

    def on_invitation(self, come: Callable[[str], object]) -> None:
        """A patient worker is invited to a round or a meeting: join it, then wait again."""
        self.come = come

    def on_question(self, tell: Callable[[], bytes]) -> None:
        """The server asks for the state of training."""
        self.tell = tell

    def while_waiting(self, do: Pause | None) -> None:
        """Called again and again while this worker waits for its release; returns the seconds
        until the next call, or ``None`` if nothing is left to do."""
        self.meanwhile = do
