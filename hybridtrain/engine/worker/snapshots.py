"""Snapshots of the training state that the server has, for checkpoints."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from hybridtrain.engine.memory.scratch_file import Scratch, read
from hybridtrain.engine.protocol.messages import LoaderPass, OptimizerState, Snapshot
from hybridtrain.engine.protocol.spans import Spans
from hybridtrain.engine.worker.requests import Requests
from hybridtrain.engine.worker.steps import Steps


class Snapshots:
    """Takes snapshots, and keeps what the last one says of data and counts.

    Args:
        requests: to the server.
        steps: the parameters may be updated with a snapshot.
        apart: there are workers on other hosts, so that no file is shared with all of them.
    """

    def __init__(self, requests: Requests, steps: Steps, apart: bool) -> None:
        self._requests, self._steps, self._apart = requests, steps, apart
        self.unseen: dict[LoaderPass, Spans] = {}  # of the shared queue, at the last snapshot
        self.counts: dict[str, int] = {}  # updates, samples of this run at that moment

    def take(self, refresh: bool = True) -> tuple[int, list[Any]]:
        """The version, and what each optimizer would save
        (:class:`hybridtrain.engine.updates.SavedOptimizer`).

        With ``refresh``, this worker's parameters are updated to the same version.
        """
        with closing(Scratch(self._apart)) as scratch:
            reply, _ = self._requests.ask(Snapshot(refresh, scratch.path), OptimizerState)
            self.unseen = reply.unseen
            self.counts = {"updates": reply.updates, "samples": reply.samples}
            if refresh:
                self._steps.read(reply.version)
            return reply.version, read(scratch.path, reply.payload)
