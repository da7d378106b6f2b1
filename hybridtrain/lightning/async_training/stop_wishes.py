"""If one worker stops training (``trainer.should_stop``), all stop.

Lightning would end the epoch in that worker and go on in the others. Here the worker asks, at the
end of its mini-batch, whether all want it. If they do, training ends there, as elsewhere. If not,
all hear of it and end together at the beginning of the next mini-batch but one, or, where workers
run freely, of their next.
"""

from __future__ import annotations

from typing import Any

from hybridtrain.lightning.hooks.loop_hooks import has_trained_epoch, may_stop_early
from hybridtrain.worker.client import Client


class OthersStop(Exception):
    """A worker has wanted training to end; the mini-batch that was to begin is not done."""


class Stopping:
    """Of one worker.

    Args:
        trainer: of this worker.
        client: to the server.
        whole_rounds: all take the same steps.
    """

    def __init__(self, trainer: Any, client: Client, whole_rounds: bool) -> None:
        self._trainer, self._client, self._whole_rounds = trainer, client, whole_rounds
        self._told = False

    def begin_batch(self) -> None:
        """Before anything of it is run.

        Raises:
            OthersStop: if it is not to be run.
        """
        client, stop = self._client, self._client.stop
        if stop is None or stop.behind is None or client.solo or client.version < stop.behind:
            return
        if may_stop_early(self._trainer):
            self._trainer.should_stop = self._told = True
            raise OthersStop

    def end_batch(self) -> None:
        """The mini-batch has ended, and Lightning is about to look whether training has."""
        trainer, client = self._trainer, self._client
        if not trainer.should_stop or self._told or client.n_workers == 1:
            return
        if not may_stop_early(trainer) or has_trained_epoch(trainer):
            return
        client.gather("a wish to stop", None, wish=True)
        all_wish = set(client.met) >= set(client.there)
        self._told = all_wish or not self._whole_rounds
        if not self._told:
            trainer.should_stop = False  # until the others are where this worker is then

    def meet(self) -> None:
        """All are here, at the end of an epoch or before a validation."""
        trainer, client = self._trainer, self._client
        if self._whole_rounds and client.n_workers > 1 and not trainer.sanity_checking:
            told = client.stop is not None and client.stop.behind is not None
            wishes = client.gather("who wants to stop", trainer.should_stop or told)
            trainer.should_stop = any(wishes)
