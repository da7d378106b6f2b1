"""Train like a recorded run, but under another policy, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl

from hybridtrain.errors import UserError
from hybridtrain.lightning.replay.in_process_runner import CELLS, InProcessRunner
from hybridtrain.lightning.run_context import RunContext, context_of
from hybridtrain.recording.record_file import Record
from hybridtrain.recording.record_reader import times_of
from hybridtrain.recording.recorder import Stamp
from hybridtrain.recording.virtual_rerun import Rehearsal
from hybridtrain.server.server import Server
from hybridtrain.worlds.in_process import Body
from hybridtrain.worlds.virtual.measured_times import Measured


class WhatIf(InProcessRunner[dict[str, Any]]):
    """Gives workers their recorded times; the outcome is the server's statistics."""

    def run(
        self, server: Server, stamp: Stamp, bodies: Sequence[Body]
    ) -> tuple[dict[str, Any], list[Any]]:
        measured = Measured(times_of(self.record))
        times = [measured.stream(worker, 0) for worker in range(len(bodies))]
        threads = int(self.record.header["threads"])
        results = Rehearsal(server, stamp, threads, times, CELLS).run(bodies)
        return server.statistics.stats(), results


def rehearse_fit(
    record: Record, trainer: pl.Trainer, module: pl.LightningModule, **options: Any
) -> dict[str, Any]:
    """Train with workers as fast as the record's; the result is :meth:`RunStatistics.stats`.

    Args:
        record: of a run with as many workers.
        trainer: with a ``HybridStrategy`` of any policy.
        module: to be trained.
        **options: as for ``fit``.

    Raises:
        UserError: if policy or exchange cannot be simulated, or the record says too little.
    """
    _check_times(record, context_of(trainer))
    return WhatIf(record).fit(trainer, module, **options)


def _check_times(record: Record, strategy: RunContext) -> None:
    """The record has a time for each push, but none for the steps between two pushes."""
    recorded, each_step = record.strategy.get("exchange", "Gradient()"), ("Gradient()", "InPlace()")
    known = {recorded, repr(strategy.exchange)}
    if len(known) > 1 and not known <= {*each_step}:
        raise UserError(
            f"exchange={strategy.exchange} was given, and the run's was {recorded}; the record has "
            "a time for each push, not for each of a worker's own steps, so only strategies with "
            "the run's exchange can be tried with it; run the other one itself, or compare "
            "policies (hybrid, ssp, async, ...)"
        )
