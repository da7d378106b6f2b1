"""An offered push whose release has not arrived yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridtrain.engine.protocol.messages import Draw, Push, Released

Taking = Callable[[Released], object]
Undoing = Callable[[], object]


@dataclass
class PendingPush:
    """``then`` gets the release; if none arrives, all of ``undoing`` is called instead.

    ``draws``: its requests to the shared queue; ``covers``: how many mini-batches it covers.
    ``later``: the worker computes on until it needs the release; ``lost``: none will arrive.
    ``made``: the worker has made the steps already. ``unsent``: the push, while the worker has
    arrived with it in a shared round.
    """

    then: Taking
    undoing: list[Undoing]
    draws: tuple[Draw, ...] = ()
    later: bool = False
    covers: int = 0
    lost: bool = False
    made: bool = False
    unsent: Push | None = None

    def lose(self) -> None:
        """No release will arrive."""
        self.lost = True

    def is_sent(self) -> None:
        """The shared round is left to the server, which has the push."""
        self.unsent = None

    def settle(self, wait: Callable[[Taking, PendingPush], object]) -> None:
        """Call ``wait`` for the release; if it fails, undo the last change first."""
        try:
            wait(self._take, self)
        except BaseException:
            while self.undoing:
                self.undoing.pop()()
            raise

    def _take(self, released: Released) -> object:
        self.undoing.clear()  # the update has been made, whatever ``then`` raises
        return self.then(released)
