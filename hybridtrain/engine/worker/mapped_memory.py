"""The shared memory that the server creates and a worker maps."""

from __future__ import annotations

from hybridtrain.engine.memory import Arena
from hybridtrain.engine.memory.arena import LentState, SharedState
from hybridtrain.engine.protocol.messages import GetState, Lent, Share, Shared
from hybridtrain.engine.worker.requests import Requests


class MappedMemory:
    """Maps arenas, and finds optimizer state in them.

    Args:
        requests: to the server.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._arenas: dict[int, Arena] = {}  # lent by the server

    def map(self, request: Share | GetState) -> Arena:
        """Map shared memory: that of masters and rows, or an arena that the server lends."""
        reply, fd = self._requests.ask(request, Shared)
        assert fd is not None, "the descriptor travels with the message"
        return Arena(fd, reply.n_bytes)

    def borrow(self, optimizer: int) -> SharedState:
        """The places of the optimizer's state."""
        return self._requests.ask(GetState(optimizer), SharedState)[0]

    def borrow_flat(self, optimizer: int) -> tuple[LentState, dict[int, Arena]] | None:
        """The places of the flat update's state, and its arenas, if workers may step it."""
        lent: LentState | None = self._requests.ask(GetState(optimizer, flat=True), Lent)[0].state
        if lent is None:
            return None
        for number in lent.arenas - self._arenas.keys():
            self._arenas[number] = self.map(GetState(arena=number))
        return lent, self._arenas
