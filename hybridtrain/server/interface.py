"""What a world needs of a server."""

from __future__ import annotations

from typing import Protocol

from hybridtrain.memory import Store
from hybridtrain.protocol.messages import Note, Request
from hybridtrain.server.membership import Membership
from hybridtrain.server.rounds import Replies


class ServerInterface(Protocol):
    """What a world calls; see :class:`hybridtrain.server.server.Server`."""

    @property
    def store(self) -> Store | None: ...

    @property
    def failure(self) -> BaseException | None: ...

    def handle(self, worker: int, request: Request) -> Replies: ...

    def note(self, worker: int, note: Note) -> Replies: ...

    def finished(self, worker: int) -> Replies: ...

    @property
    def wake_at_s(self) -> float | None: ...

    def wake(self) -> Replies: ...

    @property
    def training(self) -> bool: ...

    def lost(self, worker: int) -> Replies: ...

    def leave(self, worker: int) -> Replies: ...

    def miss(self, worker: int) -> Replies: ...

    def break_off(self) -> Replies: ...

    @property
    def membership(self) -> Membership: ...

    def close(self) -> None: ...
