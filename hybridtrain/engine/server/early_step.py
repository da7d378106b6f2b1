"""An update that begins while rows of other hosts are still arriving.

Where an update takes one gradient of each worker, the last pushes are known before their rows are
here. A thread steps the masters meanwhile, chunk by chunk as rows arrive, and keeps what it
overwrites. The server receives each push once its row is complete, as always; with the last one it
takes the step that was begun. If anything else happens before, the step is undone.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from hybridtrain.engine.protocol.events import Arrivals, Event, NotArrived, Received
from hybridtrain.engine.protocol.messages import Push
from hybridtrain.engine.updates import Optimizers, Stepped


class EarlyStep:
    """One step of an optimizer, begun early.

    Args:
        optimizers: which may not be used otherwise before ``take`` or ``drop``.
        pushes: of all workers, in the order in which they are added.
        arrivals: tells how far their rows have come.
        received: the workers whose pushes the server has already.
        version: the number of updates before this one.
    """

    def __init__(
        self,
        optimizers: Optimizers,
        pushes: Mapping[int, Push],
        arrivals: Arrivals,
        received: frozenset[int],
        version: int,
    ) -> None:
        self._optimizers, self._pushes, self._arrivals = optimizers, dict(pushes), arrivals
        self._awaited, self._version = set(pushes.keys() - received), version
        self._stepped: Stepped | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._step, name="early step", daemon=True)
        self._thread.start()

    def _step(self) -> None:
        torch.set_num_threads(1)  # of this thread; the update has a pool
        try:
            # Not what a profiler has put in its place: that measures the server's thread.
            step = type(self._optimizers).step
            pushes = self._pushes
            self._stepped = step(
                self._optimizers,
                pushes,
                arrivals=self._arrivals,
                lead=min(pushes),
                version=self._version,
            )
        except NotArrived:  # the update has undone it
            pass
        except BaseException as error:
            self._error = error

    def expects(self, event: Event) -> bool:
        """Whether this is one of the pushes that have not been received yet; it is now."""
        if not isinstance(event, Received) or event.worker not in self._awaited:
            return False
        self._awaited.discard(event.worker)
        return event.message is self._pushes[event.worker]

    @property
    def is_due(self) -> bool:
        """Whether all pushes have been received."""
        return not self._awaited

    def take(self, pushes: Mapping[int, Push]) -> Stepped | None:
        """The outcome, if it is the step of these pushes; else it is undone.

        Raises:
            BaseException: what the step has raised.
        """
        if list(pushes) != list(self._pushes) or any(
            push is not self._pushes[worker] for worker, push in pushes.items()
        ):
            self.drop()
            return None
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._stepped

    def drop(self) -> None:
        """Undo the step."""
        self._arrivals.give_up()
        self._thread.join()
        if self._stepped is not None:
            self._optimizers.undo(next(iter(self._pushes.values())).optimizer)
