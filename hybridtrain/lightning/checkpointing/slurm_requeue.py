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
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment

from hybridtrain.engine.worlds.signals import restore
from hybridtrain.lightning.hooks.points import Point, around
from hybridtrain.lightning.hooks.trainer_hooks import dump_checkpoint, requeue_slurm_job
from hybridtrain.lightning.run_context import context_of
from hybridtrain.util.anonymous_files import SharedBytes

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
def warnings_noted(trainer: Any) -> Iterator[Warned | None]:
    """In the calling process, while workers run: count signals that Lightning would handle."""
    environment: Any = context_of(trainer).cluster_environment
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


def listen(trainer: Any, warned: Warned | None) -> None:
    """In a worker: ignore the signal, and add the callback."""
    if warned is not None:
        signal.signal(warned.number, signal.SIG_IGN)  # the calling process counts it
        requeue = Requeue(warned, trainer)
        trainer.callbacks.append(requeue)
        around(Point.SAVE, trainer, requeue.save)


class Requeue(pl.Callback):
    """Saves and requeues the job after a warning."""

    def __init__(self, warned: Warned, trainer: pl.Trainer) -> None:
        self._warned, self._trainer = warned, trainer

    def save(self, proceed: Callable[..., None], filepath: Any, *args: Any, **kwargs: Any) -> None:
        """While the job is requeued: without the other workers."""
        context = context_of(self._trainer)
        if context.saves_alone:
            context.save_checkpoint(dump_checkpoint(self._trainer), filepath)
        else:
            proceed(filepath, *args, **kwargs)

    def _look(self, trainer: Any, *_: Any, **__: Any) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run or not self._warned.heed():
            return
        with context_of(trainer).saving_alone():
            requeue_slurm_job(trainer, self._warned.number)

    on_train_batch_end = on_validation_batch_end = _look
    on_test_batch_end = on_predict_batch_end = _look
