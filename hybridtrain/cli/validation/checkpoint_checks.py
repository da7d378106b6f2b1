"""Check, before any process starts, that the model can resume from a checkpoint.

It is loaded with ``weights_only=True``: tensors and plain containers, no code.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytorch_lightning as pl
import torch

from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.checkpoint_content import check_content, check_weights
from hybridtrain.lightning.checkpointing.checkpoint_sizes import check_sizes
from hybridtrain.lightning.checkpointing.saved_counters import next_row
from hybridtrain.util.files import check_input, fault_of, fault_of_old, is_archive


def check_checkpoint(path: Path, module: pl.LightningModule, resumes: bool = True) -> int:
    """Check the checkpoint; returns the number of the loggers' next row, 0: unknown.

    Args:
        resumes: training resumes from it, which needs more than weights.

    Raises:
        UserError: unless ``path`` is an undamaged Lightning checkpoint of ``module``.
    """
    content = load_checkpoint(path)
    weights = content.get("state_dict") if isinstance(content, Mapping) else None
    if isinstance(weights, Mapping):
        # What is built later (configure_model) has no weights yet.
        strict = bool(module.strict_loading and module.state_dict())
        check_weights(f"ckpt={path}", weights, module, strict)
    check_content(content, f"ckpt={path}", resumes)
    return next_row(content)


def load_checkpoint(path: Path) -> Any:
    """Load plain data and tensors; raises UserError for a damaged file, and for code in it."""
    check_input(path, "the checkpoint ckpt=")
    zipped = is_archive(path)  # older ones are none, and have no checksums
    if (fault := fault_of(path) if zipped else fault_of_old(path)) is not None:
        raise UserError(f"ckpt={path}: the file is corrupt: {fault}; choose another, or ckpt=last")
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's, about unusual pickles
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # readers of damaged files raise exceptions of any type
        words = _words_of_code(path)
        if isinstance(error, UnpicklingError) if zipped else any(x in str(error) for x in words):
            raise UserError(
                f"ckpt={path}: it contains code or objects besides tensors and plain containers, "
                f"and loading those would run them ({_unsafe(error)}); it was not loaded"
            ) from None
        raise UserError(
            f"ckpt={path}: the file is corrupt or no checkpoint "
            f"({type(error).__name__}); choose another"
        ) from None
    check_sizes(content, f"ckpt={path}", path.stat().st_size)
    return content


def _words_of_code(path: Path) -> list[str]:
    """Parts of torch's messages about objects; an operand is one only where a pickle begins so."""
    with path.open("rb") as file:
        return ["GLOBAL", "Can only", *["Unsupported operand"] * (file.read(1) == b"\x80")]


def _unsafe(error: Exception) -> str:
    for line in str(error).splitlines():
        if "GLOBAL" in line or "Unsupported" in line or "Can only" in line:
            return line.strip().removeprefix("WeightsUnpickler error:").strip()[:120]
    return type(error).__name__
