"""What ``self.log`` leaves behind: entries, metrics that callbacks see, states of torchmetrics."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pytorch_lightning.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from torchmetrics import Metric

_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_SYNC = ("_should", "rank_zero_only", "_op")
_OF_METRIC = ("_computed", "_forward_cache", "_update_count", "_is_synced", "_cache")

# ---- entries of an epoch ------------------------------------------------------------------------


def training_results(trainer: Any) -> dict[str, Any]:
    """What training has logged in this epoch, by name."""
    return trainer.fit_loop.epoch_loop._results


def forget_batch(trainer: Any, and_its_size: bool = False) -> None:
    """The mini-batch of which something might be logged."""
    results = trainer._results
    results.batch = None
    if and_its_size:
        results.batch_size = None


def described(entry: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``self.log`` was told of a metric, and how it is reduced."""
    meta: _Metadata = entry.meta
    about = {each.name: getattr(meta, each.name) for each in fields(meta) if each.name != "_sync"}
    return about, {name: getattr(meta.sync, name) for name in _SYNC}


def entry_of(about: dict[str, Any], sync: dict[str, Any], is_tensor: bool, reduce: Any) -> Any:
    """One with nothing in it, described like another."""
    meta = _Metadata(**about)
    meta.sync = _Sync(fn=reduce, **sync)
    return _ResultMetric(meta, is_tensor)


def begin_anew(entry: Any) -> None:
    """It is of this epoch, and has been updated, or it warns that it was not."""
    entry.has_reset = False
    entry._computed = None  # perhaps in an earlier epoch
    entry._update_count = 1


# ---- what callbacks, loggers and the progress bar see -------------------------------------------


def callback_metrics(trainer: Any) -> dict[str, Any]:
    """As they were collected last; the trainer's own would collect them, a meeting of all."""
    return trainer._logger_connector._callback_metrics


def shown_metrics(trainer: Any) -> dict[str, dict[str, Any]]:
    """The three collections, as they are."""
    connector = trainer._logger_connector
    return {name: dict(getattr(connector, name)) for name in _SHOWN}


def show_metrics(trainer: Any, metrics: dict[str, dict[str, Any]]) -> None:
    """Add to each of them."""
    for name, values in metrics.items():
        getattr(trainer._logger_connector, name).update(values)


def reset_metrics(trainer: Any) -> None:
    """Nothing is seen any more."""
    trainer._logger_connector.reset_metrics()


def log_connector(trainer: Any) -> Any:
    """Collects what was logged, at the ends of steps and epochs."""
    return trainer._logger_connector


# ---- torchmetrics -------------------------------------------------------------------------------


def state_of_metric(metric: Metric) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its states, copied, and what it knows of them."""
    known = vars(metric)
    return metric._copy_state_dict(), {name: known[name] for name in _OF_METRIC if name in known}


def put_back_metric(metric: Metric, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Make it what it was."""
    for name, value in state[0].items():
        setattr(metric, name, value)
    vars(metric).update(state[1])
