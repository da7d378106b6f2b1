"""What a client needs to reach its server."""

from __future__ import annotations

from typing import Protocol

from hybridtrain.messages import Note, Reply, Request


class Line(Protocol):
    """How a client reaches its server."""

    def send(self, message: Request | Note) -> None: ...

    def receive(self) -> tuple[Reply, int | None]:
        """The next reply, and the descriptor that came with it. Blocks."""
        ...

    def ready(self) -> bool:
        """Whether ``receive`` would return at once."""
        ...
