"""A job tells the sweep its metric while it trains, and hears whether to stop: pruning.

Each job has a mailbox, an anonymous file of the sweep's, which a worker opens through ``/proc``
however it was started. The worker that logs (rank 0) writes a report into it after each validation,
or after each epoch if there is none, and waits for the answer, which the sweep writes when it next
looks. All workers share the answer as ``EarlyStopping`` shares its decision. A job whose sweep does
not answer trains on.
"""

from __future__ import annotations

import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from hybridtrain.cli.sweep.job_process import REPORTS
from hybridtrain.lightning.run_context import strategy_of
from hybridtrain.util.anonymous_files import anonymous_descriptor

_REPORT = struct.Struct("=qd")  # step, value
_NUMBER = struct.Struct("=q")  # of the report; written last
_ANSWER = struct.Struct("=qq")  # number of the report, whether to stop
_NUMBER_AT, _ANSWER_AT = _REPORT.size, _REPORT.size + _NUMBER.size
_PATIENCE_S, _LOOK_S = 10.0, 0.005


class Mailbox:
    """The sweep's side. Only this user's processes can open ``path``."""

    def __init__(self) -> None:
        self._fd = anonymous_descriptor()
        os.ftruncate(self._fd, _ANSWER_AT + _ANSWER.size)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self._number = 0

    def take(self) -> tuple[int, float] | None:
        """Step and value of a report that waits for its answer."""
        (number,) = _NUMBER.unpack(os.pread(self._fd, _NUMBER.size, _NUMBER_AT))
        if number == self._number:
            return None
        self._number = number
        step, value = _REPORT.unpack(os.pread(self._fd, _REPORT.size, 0))
        return step, value

    def answer(self, stop: bool) -> None:
        """Answer the report that was taken last."""
        os.pwrite(self._fd, _ANSWER.pack(self._number, stop), _ANSWER_AT)

    def close(self) -> None:
        """The job has ended."""
        os.close(self._fd)


class Reporter(pl.Callback):
    """Reports ``metric`` to the sweep, and stops training if the sweep says so.

    Args:
        path: of the job's mailbox.
        metric: a logged metric.
    """

    def __init__(self, path: str, metric: str) -> None:
        self._path, self.metric = path, metric
        self._validates = False
        self._n_reports = 0

    def state_dict(self) -> dict[str, Any]:
        """The number of reports, which are the steps of the pruner."""
        return {"n_reports": self._n_reports}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue to count."""
        self._n_reports = int(state_dict["n_reports"])

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report what the validation has logged."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._validates = True
        self._report(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report where there is no validation."""
        if not self._validates:
            self._report(trainer)

    def _report(self, trainer: pl.Trainer) -> None:
        value = trainer.callback_metrics.get(self.metric)
        stop = False
        if value is not None:
            number = float(value)  # on every rank: to read it may be a collective
            stop = trainer.is_global_zero and self.ask(self._n_reports, number)
            self._n_reports += 1
        decide = strategy_of(trainer).reduce_boolean_decision
        trainer.should_stop = trainer.should_stop or decide(stop, all=False)

    def ask(self, step: int, value: float) -> bool:
        """Report, and wait for the answer; False if there is none."""
        with suppress(OSError), Path(self._path).open("r+b", buffering=0) as file:
            fd = file.fileno()
            (number,) = _NUMBER.unpack(os.pread(fd, _NUMBER.size, _NUMBER_AT))
            os.pwrite(fd, _REPORT.pack(step, value), 0)
            os.pwrite(fd, _NUMBER.pack(number + 1), _NUMBER_AT)
            until_s = time.monotonic() + _PATIENCE_S
            while time.monotonic() < until_s:
                answered, stop = _ANSWER.unpack(os.pread(fd, _ANSWER.size, _ANSWER_AT))
                if answered == number + 1:
                    return bool(stop)
                time.sleep(_LOOK_S)
        return False

    def was_pruned(self) -> bool:
        """Whether the sweep has stopped this job; in any process of it."""
        with suppress(OSError), Path(self._path).open("rb") as file:
            return bool(_ANSWER.unpack(os.pread(file.fileno(), _ANSWER.size, _ANSWER_AT))[1])
        return False


def reporter(task: Any) -> Reporter | None:
    """The reporter of this job, if a sweep listens to it; also in a rank that is a program."""
    path, metric = os.environ.get(REPORTS), task.monitor or task.metric
    return Reporter(path, str(metric)) if path and metric is not None else None
