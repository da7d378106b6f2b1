"""The training that the scripts of this folder time."""

from __future__ import annotations

import argparse
import logging
import warnings
from typing import Any

import pytorch_lightning as pl
from benchmarks.jobs.loops import trainer

from hybridtrain import HybridStrategy

WORKERS = 2


def pairs_asked_for(description: str | None, default: int) -> int:
    """``--repeats`` of the command line; from here on Lightning says errors only."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repeats", type=int, default=default, help=f"pairs of runs (default {default})"
    )
    repeats = parser.parse_args().repeats
    if repeats < 1:
        parser.error(f"--repeats={repeats} was given, but at least one pair must be run")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return int(repeats)


def fit(
    strategy: HybridStrategy, module: pl.LightningModule, data: Any, epochs: int
) -> dict[str, Any]:
    """Train, with nothing besides that would take time; the run's own figures of itself."""
    pl.seed_everything(0, verbose=False)
    trainer(strategy, WORKERS, max_epochs=epochs, limit_val_batches=0).fit(module, data)
    return strategy.run_stats()
