"""Repeat a recorded ``trainer.fit`` in this process, in the recorded order of events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytorch_lightning as pl

from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.periodic import scheduled
from hybridtrain.lightning.replay.in_process_runner import CELLS, InProcessRunner
from hybridtrain.lightning.replay.run_record import differences, hash_now, versions
from hybridtrain.lightning.run_context import context_if_ours, strategy_of
from hybridtrain.recording.record_file import Record
from hybridtrain.recording.recorder import Stamp
from hybridtrain.recording.replayer import Replayed, Replayer
from hybridtrain.server.server import Server
from hybridtrain.worlds.in_process import Body

_GO_ON = "to replay it nevertheless, say anyway=true"


class Rerun(InProcessRunner[Replayed]):
    """Replays a record; ``anyway``: also with other data."""

    def __init__(self, record: Record, anyway: bool = False) -> None:
        super().__init__(record)
        self._anyway = anyway

    def run(
        self, server: Server, stamp: Stamp, bodies: Sequence[Body]
    ) -> tuple[Replayed, list[Any]]:
        report, results = Replayer(self.record, server, stamp, self._check_data, CELLS).run(bodies)
        return report, results if report.equal and results[0] is not None else []

    def _check_data(self, said: Mapping[str, Any]) -> None:
        found = list(differences(self.record.told, said))
        if found and not self._anyway:
            raise UserError(f"{'; '.join(found)}; {_GO_ON}")


def replay_fit(
    record: Record,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    anyway: bool = False,
    **options: Any,
) -> Replayed:
    """Repeat the recorded ``trainer.fit``, with a trainer made in the same way.

    Args:
        record: see :func:`hybridtrain.recording.read_record`.
        trainer: with a ``HybridStrategy``.
        module: as before training.
        anyway: even if code, versions or data differ.
        **options: as given to ``fit``.

    Raises:
        UserError: if something differs, naming it.
    """
    _check(record, trainer, anyway)
    scheduled(trainer, record.told)
    return Rerun(record, anyway).fit(trainer, module, **options)


def _check(record: Record, trainer: pl.Trainer, anyway: bool) -> None:
    strategy, kind = context_if_ours(trainer), type(strategy_of(trainer)).__name__
    if strategy is None:
        raise UserError(f"{kind} was given, but only runs of HybridStrategy are replayed")
    if record.in_place:
        raise UserError(
            f"the run's policy was {record.header['policy']}, under which workers write to the "
            "parameters whenever they like; nobody knows the order, so it cannot be replayed"
        )
    if strategy.world_size != record.n_workers:
        raise UserError(
            f"the run had {record.n_workers} workers, and {strategy.world_size} were given; make "
            "the trainer with the same devices and workers_per_device"
        )
    for name, then in record.strategy.items():
        if (given := repr(getattr(strategy, name))) != then:
            raise UserError(
                f"the run's {name} was {then}, and {given} was given; make the "
                "trainer with the same strategy"
            )
    found = [*changed_code(record), *changed_versions(record)]
    if found and not anyway:
        raise UserError(f"{'; '.join(found)}; {_GO_ON}")


def changed_code(record: Record) -> list[str]:
    """Source files that have changed since the run."""
    then: Mapping[str, str] = record.header["code"]
    found = []
    for name, before in then.items():
        if (now := hash_now(name)) != before:
            what = "the package hybridtrain" if name == "hybridtrain" else name
            found.append(f"code: {what} {'has changed' if now else 'is not there'}")
    return found


def changed_versions(record: Record) -> list[str]:
    """Versions that have changed since the run."""
    now = versions()
    return [
        f"{name}: {now.get(name)} here, {before} in the run"
        for name, before in record.header["versions"].items()
        if now.get(name) != before
    ]
