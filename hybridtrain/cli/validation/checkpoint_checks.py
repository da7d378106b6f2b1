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
from hybridtrain.lightning.checkpointing.checkpoint_content import check_content
from hybridtrain.lightning.checkpointing.checkpoint_sizes import check_sizes
from hybridtrain.lightning.checkpointing.mid_epoch import next_row
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
        _check_parameters(path, weights, module)
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


def _check_parameters(path: Path, found: Mapping[str, Any], module: pl.LightningModule) -> None:
    wanted = module.state_dict()
    if not wanted or not module.strict_loading:
        return  # built later (configure_model), or not strict
    problems = [f"it lacks {x}" for x in wanted if x not in found]
    problems += [f"it has an unknown {x}" for x in found if x not in wanted]
    problems += [
        f"{x} has {_kind(found[x])} instead of {_kind(value)}"
        for x, value in wanted.items()
        if x in found and isinstance(value, torch.Tensor) and _kind(found[x]) != _kind(value)
    ]
    weights = {x: value for x, value in found.items() if isinstance(value, torch.Tensor)}
    problems += [f"{x} has no content" for x, value in weights.items() if value.is_meta]
    if problems:
        more = f", and {len(problems) - 2} more differences" if len(problems) > 2 else ""
        raise UserError(
            f"ckpt={path}: this is a checkpoint of another model: {'; '.join(problems[:2])}{more}; "
            "give the model and task options it was trained with"
        )


def _kind(value: Any) -> str:
    """Type, shape and dtype in words; all floating-point dtypes are the same."""
    if not isinstance(value, torch.Tensor):
        return f"type {type(value).__name__}"
    numbers = "" if value.is_floating_point() else f" of {value.dtype}"
    layout = "" if value.layout is torch.strided else f" in {value.layout}"
    return f"shape {tuple(value.shape)}{numbers}{layout}"
