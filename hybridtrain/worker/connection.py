"""What a client needs to reach its server."""

from __future__ import annotations

from typing import Any, Protocol

from hybridtrain.protocol.messages import Reply


class Connection(Protocol):
    """How a client reaches its server."""

    def send(self, message: Any) -> None:
        """A request, a note, or how the worker's life has ended."""
        ...

    def receive(self) -> tuple[Reply, int | None]:
        """The next reply, and the descriptor that came with it. Blocks."""
        ...

    def ready(self) -> bool:
        """Whether ``receive`` would return at once."""
        ...
