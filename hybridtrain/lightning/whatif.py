"""Trains as a recorded run did, but under another policy, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl

from hybridtrain.lightning.recording import Recording, server_maker
from hybridtrain.lightning.rerun import CELLS, copied
from hybridtrain.recording.file import Record
from hybridtrain.recording.rehearsal import Rehearsal, check_regime
from hybridtrain.recording.times import times_of
from hybridtrain.recording.witness import Stamp
from hybridtrain.worlds.measured import Measured
from hybridtrain.worlds.processes import one_thread
from hybridtrain.worlds.threads import Body

if TYPE_CHECKING:
    from hybridtrain.lightning.strategy import HybridStrategy


@dataclass
class WhatIf:
    """What the launcher is to do instead of starting processes; ``stats`` are what comes of it."""

    record: Record
    stats: dict[str, Any] | None = None
    error: BaseException | None = None

    def __deepcopy__(self, memo: Any) -> WhatIf:
        return self  # workers need no copy

    def play(self, strategy: HybridStrategy, body: Callable[[Any], Body], job: Any) -> list[Any]:
        """Run it; what the workers brought home."""
        try:
            stamp, threads = Stamp(), int(self.record.header["server_threads"])
            server = server_maker(strategy, threads)(clock=stamp)
            check_regime(server)
            measured = Measured(times_of(self.record))
            times = [measured.stream(w, 0) for w in range(self.record.n_workers)]
            worker_threads = int(self.record.header["threads"])
            rehearsal = Rehearsal(server, stamp, worker_threads, times, CELLS)
            with one_thread():
                results = rehearsal.run([body(copied(job)) for _ in times])
            self.stats = server.ledger.stats()
            strategy.remember_stats(self.stats)
            server.close()
        except BaseException as error:  # the launcher's callers would make a checkpoint of it
            self.error = error
            return []
        return results


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
    strategy: Any = trainer.strategy
    whatif, former = WhatIf(record), strategy.recording
    strategy.recording = Recording(record.path, rerun=whatif)
    try:
        trainer.fit(module, **options)
    finally:
        strategy.recording = former
    if whatif.error is not None:
        raise whatif.error
    assert whatif.stats is not None, "the launcher has played"
    return whatif.stats
