"""On SLURM's warning that a job is about to end: save a checkpoint and queue the job again.

Lightning does that in the signal handler of the training process. Here the calling process receives
the signal and counts it in shared memory; workers ignore it. After each mini-batch the saving
worker reads the count, writes Lightning's own ``hpc_ckpt_N.ckpt`` alone, and requeues the job.
Training continues until SLURM ends it; the next job resumes from that file.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment

from hybridtrain.engine.worlds.signals import restore
from hybridtrain.lightning.hooks.points import Point, around
from hybridtrain.lightning.hooks.trainer_hooks import dump_checkpoint, requeue_slurm_job
from hybridtrain.lightning.run_context import strategy_of
from hybridtrain.util.anonymous_files import SharedBytes
from hybridtrain.util.attributes import temporarily

_ASKED, _DONE = 0, 1  # bytes of the shared memory; counts modulo 256


@dataclass
class Warned:
    """``number``: of the signal; ``shared``: counts of signals received and handled."""

    number: int
    shared: SharedBytes

    def note(self, *_: Any) -> None:
        """Count a signal."""
        self.shared.map[_ASKED] = (self.shared.map[_ASKED] + 1) % 256

    def heed(self) -> bool:
        """Whether a signal was received since the last call in any process."""
        asked = self.shared.map[_ASKED]
        news, self.shared.map[_DONE] = asked != self.shared.map[_DONE], asked
        return news


@contextmanager
def warnings_noted(environment: Any) -> Iterator[Warned | None]:
    """In the calling process, while workers run: count signals that Lightning would handle.

    ``environment``: Lightning's, of the cluster.
    """
    queued = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
    number = environment.requeue_signal if queued else None
    in_main = threading.current_thread() is threading.main_thread()
    if number is None or not in_main or signal.getsignal(number) not in (None, signal.SIG_DFL):
        yield None
        return
    warned = Warned(number, SharedBytes(2))
    former = signal.signal(number, warned.note)
    try:
        yield warned
    finally:
        restore({number: former})
        warned.shared.close()


def listen(
    trainer: Any, warned: Warned | None, alone: Callable[[], AbstractContextManager[None]]
) -> None:
    """In a worker: ignore the signal, and add the callback.

    ``alone``: a context in which this worker writes a checkpoint that the others do not know of.
    """
    if warned is not None:
        signal.signal(warned.number, signal.SIG_IGN)  # the calling process counts it
        requeue = Requeue(warned, trainer, alone)
        trainer.callbacks.append(requeue)
        around(Point.SAVE, trainer, requeue.save)


class Requeue(pl.Callback):
    """Saves and requeues the job after a warning."""

    def __init__(
        self,
        warned: Warned,
        trainer: pl.Trainer,
        alone: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._warned, self._trainer, self._alone = warned, trainer, alone
        self._requeues = False

    def save(self, proceed: Callable[..., None], filepath: Any, *args: Any, **kwargs: Any) -> None:
        """While the job is requeued: without the other workers."""
        if self._requeues:
            strategy_of(self._trainer).save_checkpoint(dump_checkpoint(self._trainer), filepath)
        else:
            proceed(filepath, *args, **kwargs)

    def _look(self, trainer: Any, *_: Any, **__: Any) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run or not self._warned.heed():
            return
        with self._alone(), temporarily(self, _requeues=True):
            requeue_slurm_job(trainer, self._warned.number)

    on_train_batch_end = on_validation_batch_end = _look
    on_test_batch_end = on_predict_batch_end = _look
