"""Results of ``self.log``: entries, metrics of callbacks and loggers, states of torchmetrics."""

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
    """The training's logged entries of this epoch, by name."""
    return trainer.fit_loop.epoch_loop._results


def forget_batch(trainer: Any, and_its_size: bool = False) -> None:
    """Forget the current mini-batch, for logging."""
    results = trainer._results
    results.batch = None
    if and_its_size:
        results.batch_size = None


def described(entry: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of an entry, and of its reduction."""
    meta: _Metadata = entry.meta
    about = {each.name: getattr(meta, each.name) for each in fields(meta) if each.name != "_sync"}
    return about, {name: getattr(meta.sync, name) for name in _SYNC}


def entry_of(about: dict[str, Any], sync: dict[str, Any], is_tensor: bool, reduce: Any) -> Any:
    """An entry without a value, with these options."""
    meta = _Metadata(**about)
    meta.sync = _Sync(fn=reduce, **sync)
    return _ResultMetric(meta, is_tensor)


def begin_anew(entry: Any) -> None:
    """Mark the entry as updated in this epoch, or it would warn."""
    entry.has_reset = False
    entry._computed = None  # may be of an earlier epoch
    entry._update_count = 1


# ---- metrics of callbacks, loggers and the progress bar -----------------------------------------


def callback_metrics(trainer: Any) -> dict[str, Any]:
    """The metrics as last collected; the trainer's property would collect, a meeting of all."""
    return trainer._logger_connector._callback_metrics


def shown_metrics(trainer: Any) -> dict[str, dict[str, Any]]:
    """The three collections, as last collected."""
    connector = trainer._logger_connector
    return {name: dict(getattr(connector, name)) for name in _SHOWN}


def show_metrics(trainer: Any, metrics: dict[str, dict[str, Any]]) -> None:
    """Add to each of them."""
    for name, values in metrics.items():
        getattr(trainer._logger_connector, name).update(values)


def reset_metrics(trainer: Any) -> None:
    """Empty the collections."""
    trainer._logger_connector.reset_metrics()


def log_connector(trainer: Any) -> Any:
    """Lightning's connector, which collects logged values at the ends of steps and epochs."""
    return trainer._logger_connector


# ---- torchmetrics -------------------------------------------------------------------------------


def state_of_metric(metric: Metric) -> tuple[dict[str, Any], dict[str, Any]]:
    """A metric's states, copied, and its private attributes."""
    known = vars(metric)
    return metric._copy_state_dict(), {name: known[name] for name in _OF_METRIC if name in known}


def put_back_metric(metric: Metric, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Restore them."""
    for name, value in state[0].items():
        setattr(metric, name, value)
    vars(metric).update(state[1])
