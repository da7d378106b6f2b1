"""If one worker stops training (``trainer.should_stop``), all stop.

Lightning would end the epoch in that worker and continue in the others. Here the worker asks, at
the end of its mini-batch, whether all want to stop. If so, training ends there. If not, all receive
the request and end together at the beginning of the next mini-batch but one; free-running workers
of their next.
"""

from __future__ import annotations

from typing import Any

from hybridtrain.engine.step.session import WorkerSession
from hybridtrain.engine.worker.client import Client
from hybridtrain.lightning.hooks.loop_hooks import has_trained_epoch, may_stop_early


class OthersStop(Exception):
    """A worker has stopped training; the next mini-batch is not begun."""


class Stopping:
    """Exchanges requests to stop for one worker.

    Args:
        trainer: of this worker.
        client: to the server.
        whole_rounds: whether all workers take the same steps.
    """

    def __init__(self, trainer: Any, client: Client, whole_rounds: bool) -> None:
        self._trainer, self._client, self._whole_rounds = trainer, client, whole_rounds
        self._told = False
        self._session: WorkerSession | None = None

    def begin(self, session: WorkerSession) -> None:
        """Training begins."""
        self._session = session

    def begin_batch(self) -> None:
        """Before a mini-batch.

        Raises:
            OthersStop: if training ends here.
        """
        self._told &= self._trainer.should_stop  # or another training has begun
        if self._behind is None or self._client.group.solo or self._version < self._behind:
            return
        if may_stop_early(self._trainer):
            self._trainer.should_stop = self._told = True
            raise OthersStop

    @property
    def _behind(self) -> int | None:
        """The version behind which all stop, once a worker has asked for it."""
        return None if self._client.inbox.stop is None else self._client.inbox.stop.behind

    @property
    def _version(self) -> int:
        """In lock-step that of the last answer taken over: when an answer comes goes by clocks."""
        session = self._session
        steps = () if session is None or not self._whole_rounds else session.steps
        taken = [step.answered for step in steps if step.answered is not None]
        return min([self._client.steps.version, *taken])

    def end_batch(self) -> None:
        """After a mini-batch, before Lightning reads ``should_stop``."""
        trainer, client = self._trainer, self._client
        if not trainer.should_stop or self._told or client.n_workers == 1:
            return
        if not may_stop_early(trainer) or has_trained_epoch(trainer):
            return
        if self._whole_rounds and self._behind is not None:
            trainer.should_stop = False  # a second wish would move the end of this worker alone
            return
        client.gather("a wish to stop", None, wish=True)
        all_wish = set(client.group.met) >= set(client.group.there)
        self._told = all_wish or not self._whole_rounds
        if not self._told:
            trainer.should_stop = False  # until all workers stop at the same step

    def meet(self) -> None:
        """All workers meet, at the end of an epoch or before a validation."""
        trainer, client = self._trainer, self._client
        if self._whole_rounds and client.n_workers > 1 and not trainer.sanity_checking:
            wish = trainer.should_stop or self._behind is not None
            wishes = client.gather("who wants to stop", wish)
            trainer.should_stop = any(wishes)
