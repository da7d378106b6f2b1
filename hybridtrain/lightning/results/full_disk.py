"""Loggers that a full disk does not turn into the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.loggers import Logger

_WRITING = (
    *("log_metrics", "log_hyperparams", "log_graph", "save", "finalize"),
    "after_save_checkpoint",
)


@dataclass
class _Patient:
    """A method of a logger; what the disk refuses is said once for each logger."""

    method: Callable[..., Any]
    name: str
    said: list[bool] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.method(*args, **kwargs)
        except Exception as error:
            refusal = _refusal(error)
            if refusal is None:
                raise
            if not self.said:
                rank_zero_warn(
                    f"{self.name} could not write its log ({refusal.strerror or refusal}); "
                    "training goes on, the log has gaps"
                )
            self.said.append(True)


def _refusal(error: BaseException | None) -> OSError | None:
    """The disk's, which Lightning's TensorBoardLogger takes for a value that it cannot log."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error


def let_write(loggers: list[Logger]) -> None:
    """From now on the disk may refuse what they write."""
    for logger in loggers:
        said: list[bool] = []
        for name in _WRITING:
            method = getattr(logger, name, None)
            if method is not None and not isinstance(method, _Patient):
                vars(logger)[name] = _Patient(method, type(logger).__name__, said)
