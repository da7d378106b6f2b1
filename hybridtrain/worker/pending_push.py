"""A gradient that was offered, and whose release is still under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridtrain.protocol.messages import Draw, Push, Released

Taking = Callable[[Released], object]
Undoing = Callable[[], object]


@dataclass
class PendingPush:
    """``then`` takes the release; if none ever comes, all of ``undoing`` is called instead.

    ``draws``: what is drawn from the shared queue with it; ``covers``: how many mini-batches are
    done with it. ``later``: the worker computes on, and nobody looks for the release before it is
    needed; ``lost``: there will be none. ``made``: the worker has made its steps already. ``met``:
    the push itself, which was not sent, as all meet in shared memory.
    """

    then: Taking
    undoing: list[Undoing]
    draws: tuple[Draw, ...] = ()
    later: bool = False
    lost: bool = False
    covers: int = 0
    made: bool = False
    met: Push | None = None

    def settle(self, wait: Callable[[Taking, PendingPush], object]) -> None:
        """``wait`` for the release; without one, what was done last is undone first."""
        try:
            wait(self._take, self)
        except BaseException:
            while self.undoing:
                self.undoing.pop()()
            raise

    def _take(self, released: Released) -> object:
        self.undoing.clear()  # the update has been made, whatever taking it leads to
        return self.then(released)
