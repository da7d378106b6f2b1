"""A logger that keeps nothing, in the place of a run's own when the run is repeated."""

from __future__ import annotations

from typing import Any

from pytorch_lightning.loggers import Logger


class _Deaf:
    """Takes whatever is said to it, as an experiment of any logger would."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Deaf()

    def __call__(self, *_: Any, **__: Any) -> None:
        return None


class Mute(Logger):
    """Takes everything and writes nothing.

    Args:
        save_dir: for callbacks that write beside the logs.
    """

    def __init__(self, save_dir: str) -> None:
        super().__init__()
        self._save_dir = save_dir

    @property
    def name(self) -> str:
        return "mute"

    @property
    def version(self) -> str:
        return "0"

    @property
    def save_dir(self) -> str:
        return self._save_dir

    @property
    def log_dir(self) -> str:
        """As loggers that write files have it."""
        return self._save_dir

    @property
    def experiment(self) -> Any:
        """Takes any call."""
        return _Deaf()

    def log_metrics(self, *_: Any, **__: Any) -> None:
        pass

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass
