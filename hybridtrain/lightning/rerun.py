"""Repeats a recorded ``trainer.fit`` in this process.

Every worker gets a copy of trainer, module and data, as if they had been sent to a process of its
own, and runs Lightning's loops on them, on a thread; a record says whose turn it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.loggers.logger import DummyLogger

from hybridtrain.errors import UserError
from hybridtrain.lightning.batch_norm import HostBatchNorm
from hybridtrain.lightning.collectives import Collectives
from hybridtrain.lightning.recording import (
    Recording,
    differences,
    hash_now,
    server_maker,
    versions,
)
from hybridtrain.recording.file import Record
from hybridtrain.recording.player import Player, Replayed
from hybridtrain.recording.witness import Stamp
from hybridtrain.worlds.processes import one_thread
from hybridtrain.worlds.threads import Body, Cell

if TYPE_CHECKING:
    from hybridtrain.lightning.strategy import HybridStrategy

_GO_ON = "to replay it nevertheless, say anyway=true"


@dataclass
class Rerun:
    """What the launcher is to do instead of starting processes.

    ``anyway``: whatever differs. ``report`` and ``error`` are what came of it.
    """

    record: Record
    anyway: bool = False
    report: Replayed | None = None
    error: BaseException | None = None

    def __deepcopy__(self, memo: Any) -> Rerun:
        return self  # workers need no copy

    def play(self, strategy: HybridStrategy, body: Callable[[Any], Body], job: Any) -> list[Any]:
        """Run it; what the workers brought home, or nothing if they did not come to it.

        Args:
            strategy: of this trainer.
            body: makes a worker's body from its copy of the job.
            job: what every worker gets a copy of.
        """
        try:
            bodies = [body(copied(job)) for _ in range(self.record.n_workers)]
            stamp, threads = Stamp(), int(self.record.header["server_threads"])
            server = server_maker(strategy, threads)(clock=stamp)
            player = Player(self.record, server, stamp, self._check_data, CELLS)
            with one_thread():
                self.report, results = player.run(bodies)
            strategy.remember_stats(server.ledger.stats())
            server.close()
        except BaseException as error:  # the launcher's callers would make a checkpoint of it
            self.error = error
            return []
        return results if self.report.equal and results[0] is not None else []

    def _check_data(self, said: Mapping[str, Any]) -> None:
        found = list(differences(self.record.told, said))
        if found and not self.anyway:
            raise UserError(f"{'; '.join(found)}; {_GO_ON}")


def replay_fit(
    record: Record,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    anyway: bool = False,
    **options: Any,
) -> Replayed:
    """Repeat the ``trainer.fit`` that has left this record, with a trainer made in the same way.

    Args:
        record: see :func:`hybridtrain.recording.read_record`.
        trainer: with a ``HybridStrategy``.
        module: as it was before training.
        anyway: even if code, versions or data differ.
        **options: as they were given to ``fit``.

    Raises:
        UserError: if something differs, naming it.
    """
    strategy: Any = trainer.strategy
    _check(record, strategy, anyway)
    rerun, former = Rerun(record, anyway), strategy.recording
    strategy.recording = Recording(record.path, rerun=rerun)
    try:
        trainer.fit(module, **options)
    finally:
        strategy.recording = former
    if rerun.error is not None:
        raise rerun.error
    assert rerun.report is not None, "the launcher has played"
    return rerun.report


def _check(record: Record, strategy: Any, anyway: bool) -> None:
    if not hasattr(strategy, "recording"):
        raise UserError(
            f"{type(strategy).__name__} was given, but only runs of HybridStrategy are replayed"
        )
    if record.header["regime"]["lock_free"]:
        raise UserError(
            f"the run's policy was {record.header['policy']}, under which workers write to the "
            "parameters whenever they like; nobody knows the order, so it cannot be replayed"
        )
    if strategy.world_size != record.n_workers:
        raise UserError(
            f"the run had {record.n_workers} workers, and {strategy.world_size} were given; make "
            "the trainer with the same devices and workers_per_device"
        )
    for name in ("policy", "correction"):
        if (given := repr(getattr(strategy, name))) != record.header[name]:
            raise UserError(
                f"the run's {name} was {record.header[name]}, and {given} was given; make the "
                "trainer with the same strategy"
            )
    found = [*changed_code(record), *changed_versions(record)]
    if found and not anyway:
        raise UserError(f"{'; '.join(found)}; {_GO_ON}")


def changed_code(record: Record) -> list[str]:
    """Which source files are not those of the run."""
    then: Mapping[str, str] = record.header["code"]
    found = []
    for name, before in then.items():
        if (now := hash_now(name)) != before:
            what = "the package hybridtrain" if name == "hybridtrain" else name
            found.append(f"code: {what} {'has changed' if now else 'is not there'}")
    return found


def changed_versions(record: Record) -> list[str]:
    """Which versions are not those of the run."""
    now = versions()
    return [
        f"{name}: {now.get(name)} here, {before} in the run"
        for name, before in record.header["versions"].items()
        if now.get(name) != before
    ]


def copied(job: Any) -> Any:
    """A job of a worker's own, as a process of its own would have.

    Raises:
        UserError: if something in it cannot be copied.
    """
    # Lightning's own dummy answers to any name, even to that of the method that would copy it.
    dummies = [each for each in job.trainer.loggers if isinstance(each, DummyLogger)]
    try:
        return deepcopy(job, {id(each): DummyLogger() for each in dummies})
    except Exception as error:
        raise UserError(
            "the trainer, the module or the data cannot be copied, and every worker of a replay "
            f"needs one of its own: {type(error).__name__}: {error}"
        ) from error


def _set_rank(rank: int | None) -> None:
    if rank is None:
        vars(rank_zero_only).pop("rank", None)
    else:
        rank_zero_only.rank = rank  # type: ignore[attr-defined]


def _set_collectives(collectives: Collectives | None) -> None:
    HostBatchNorm.collectives = collectives


# What the glue and Lightning keep once in a process.
CELLS = (
    Cell(partial(getattr, rank_zero_only, "rank", None), _set_rank),
    Cell(lambda: HostBatchNorm.collectives, _set_collectives),
)
