"""Hide advertisements and known, harmless warnings of our dependencies."""

from __future__ import annotations

import logging
import os
import re
import warnings
from typing import Any

from hybridtrain.util import streams

_NEEDLESS = (
    # Lightning 2.6 calls a function that torch 2.13 deprecates.
    r".*isinstance\(treespec, LeafSpec\).* is deprecated",
    # Hydra 1.4 deprecates calls without arguments that 1.3 lacks; we allow both versions.
    ".*version_base parameter is deprecated.*",
    r".*register_new_resolver\(\) is deprecated.*",
    r".*instantiate\(\) resolved _target_=",
    # Lightning's that do not apply here.
    ".*does not have many workers which may be a bottleneck.*",
    ".*The number of training batches .* is smaller than the logging interval.*",
    ".*The dirpath has changed from.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*callbacks used to create the checkpoint need to be provided.*",
)
_HIDDEN = (
    "Tip:",  # advertisements of other products, one or two for each Trainer
    "TPU available",
    "HPU available",
    "IPU available",
)
_PACKAGES = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")
_LOGGERS = tuple(f"{package}.utilities.rank_zero" for package in _PACKAGES)


def is_no_advertisement(record: logging.LogRecord) -> bool:
    """A filter of log records: whether to keep one."""
    return not any(x in record.getMessage() for x in _HIDDEN)


def hush() -> None:
    """Install the filters here and, through the environment, in new processes."""
    for message in _NEEDLESS:
        warnings.filterwarnings("ignore", message=message)
    # PYTHONWARNINGS takes the literal beginning of the message, without commas.
    mine = "ignore:`isinstance(treespec"
    others = os.environ.get("PYTHONWARNINGS", "")
    if mine not in others:
        os.environ["PYTHONWARNINGS"] = f"{others},{mine}".lstrip(",")
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(is_no_advertisement)  # once, however often it is added


def hush_lightning() -> None:
    """Keep Lightning's own handler from printing beside Hydra's; Lightning must be imported."""
    logging.getLogger("lightning").handlers.clear()


def show_warning(message: Warning | str, category: type[Warning], *where: Any, **to: Any) -> None:
    """``warnings.showwarning`` of a run, also in spawned workers, which have no filters."""
    if not any(re.match(needless, str(message), re.IGNORECASE) for needless in _NEEDLESS):
        streams.show_warning(message, category, *where, **to)
