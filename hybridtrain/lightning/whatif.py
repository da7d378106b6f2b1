"""Trains as a recorded run did, but under another policy, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl

from hybridtrain.lightning.instead import CELLS, Instead
from hybridtrain.recording.file import Record
from hybridtrain.recording.rehearsal import Rehearsal, check_regime
from hybridtrain.recording.times import times_of
from hybridtrain.recording.witness import Stamp
from hybridtrain.server import Server
from hybridtrain.worlds.measured import Measured
from hybridtrain.worlds.threads import Body


class WhatIf(Instead[dict[str, Any]]):
    """Lets workers take as long as they took; what comes of it are the server's figures."""

    def run(
        self, server: Server, stamp: Stamp, bodies: Sequence[Body]
    ) -> tuple[dict[str, Any], list[Any]]:
        check_regime(server)
        measured = Measured(times_of(self.record))
        times = [measured.stream(worker, 0) for worker in range(len(bodies))]
        threads = int(self.record.header["threads"])
        results = Rehearsal(server, stamp, threads, times, CELLS).run(bodies)
        return server.ledger.stats(), results


def rehearse_fit(
    record: Record, trainer: pl.Trainer, module: pl.LightningModule, **options: Any
) -> dict[str, Any]:
    """Train with workers as fast as those of the record; see :meth:`Ledger.stats` for the result.

    Args:
        record: of a run with as many workers.
        trainer: with a ``HybridStrategy`` of any policy.
        module: to be trained.
        **options: as for ``fit``.

    Raises:
        UserError: if the policy cannot be simulated, or the record has too little to say.
    """
    return WhatIf(record).fit(trainer, module, **options)
