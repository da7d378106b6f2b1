"""After the sanity validation: whether a monitored metric of the validation is logged at all.

Lightning says so at the first validation of training, which may be hours later.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.utilities.exceptions import MisconfigurationException

_NOT_THE_USERS = ("pytorch_lightning", "lightning", "torch", "hybridtrain", "builtins")
_ALIKE = 0.8
_STAGE = re.compile(r"[A-Za-z]+[/_]")
# As Lightning words it later.
_TEXTS = {
    "ModelCheckpoint": "`ModelCheckpoint(monitor='{}')` could not find the monitored key in the "
    "returned metrics: [{}].",
    "EarlyStopping": "Early stopping conditioned on metric `{}` which is not available. Pass in or "
    "modify your `EarlyStopping` callback to use any of the following: `{}`",
    "ReduceLROnPlateau": "ReduceLROnPlateau conditioned on metric {} which is not available. "
    "Available metrics are: [{}].",
}


def check_monitored(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse a misspelt metric of the validation.

    That is one which begins as those do that were logged (``val/``), is nearly one of them, and is
    none. Not where user code asks ``sanity_checking``: it may log others later.

    Raises:
        MisconfigurationException: naming it, and what was logged.
    """
    logged = sorted(trainer.callback_metrics)
    for user, metric in _monitors(trainer):
        if _is_misspelt(metric, logged) and not _asks_for_stage(module, *trainer.callbacks):  # type: ignore[attr-defined]
            raise MisconfigurationException(_TEXTS[user].format(metric, ", ".join(logged)))


def _monitors(trainer: pl.Trainer) -> Iterator[tuple[str, str]]:
    """Yield each callback or scheduler that monitors a metric, and the metric's name."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        metric = getattr(callback, "monitor", None)
        names = {each.__name__ for each in type(callback).__mro__} & _TEXTS.keys()
        if isinstance(metric, str) and names:
            yield names.pop(), metric
    for schedule in trainer.lr_scheduler_configs:
        if schedule.reduce_on_plateau and schedule.strict and isinstance(schedule.monitor, str):
            yield "ReduceLROnPlateau", schedule.monitor


def _is_misspelt(metric: str, logged: Collection[str]) -> bool:
    stage = _STAGE.match(metric)
    alike = [name for name in logged if stage and name.startswith(stage[0])]
    return metric not in logged and bool(get_close_matches(metric, alike, 1, _ALIKE))


def _asks_for_stage(*objects: Any) -> bool:
    """Whether a class of the user's asks ``sanity_checking``, or has no source to look at."""
    kinds = {kind for each in objects for kind in type(each).__mro__}
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in _NOT_THE_USERS]
    try:
        return any("sanity_checking" in inspect.getsource(kind) for kind in own)
    except (OSError, TypeError):
        return True
