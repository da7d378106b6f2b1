"""Keep advertisements and known, harmless warnings of our dependencies off the terminal."""

from __future__ import annotations

import logging
import os
import warnings

_PYTREE = r".*isinstance\(treespec, LeafSpec\).* is deprecated"
_HIDDEN = (
    "Tip:",  # advertisements of other products, one or two for each Trainer
    "TPU available",
    "HPU available",
    "IPU available",
)
_PACKAGES = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")
_LOGGERS = tuple(f"{package}.utilities.rank_zero" for package in _PACKAGES)


class HideAdvertisements(logging.Filter):
    """Drops the records that say nothing about the run."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to let the record through."""
        text = record.getMessage()
        return not any(x in text for x in _HIDDEN)


def hush() -> None:
    """Install the filters, here and, through the environment, in processes started afresh."""
    # Lightning 2.6 calls what torch 2.13 deprecates, once for each process.
    warnings.filterwarnings("ignore", message=_PYTREE)
    # Hydra 1.4 announces the end of what 1.3 needs; we admit both.
    warnings.filterwarnings("ignore", message=".*version_base parameter is deprecated.*")
    warnings.filterwarnings("ignore", message=r".*register_new_resolver\(\) is deprecated.*")
    # The environment's form takes the literal beginning of the message, and no comma.
    mine = "ignore:`isinstance(treespec"
    others = os.environ.get("PYTHONWARNINGS", "")
    if mine not in others:
        os.environ["PYTHONWARNINGS"] = f"{others},{mine}".lstrip(",")
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(x, HideAdvertisements) for x in logger.filters):
            logger.addFilter(HideAdvertisements())


def hush_lightning() -> None:
    """Warnings that are right in general and pointless for us; needs Lightning imported."""
    logging.getLogger("lightning").handlers.clear()  # that package prints beside Hydra's handlers
    for text in (
        ".*does not have many workers which may be a bottleneck.*",
        ".*The number of training batches .* is smaller than the logging interval.*",
        ".*The dirpath has changed from.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*callbacks used to create the checkpoint need to be provided.*",
    ):
        warnings.filterwarnings("ignore", message=text)
