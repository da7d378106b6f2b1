"""Results of ``trainer.predict``: all workers' outputs in one device's order.

Every worker predicts every W-th mini-batch and sends its outputs once, at the end; the calling
process puts them in order.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection

from hybridtrain.errors import UserError
from hybridtrain.lightning.data.evaluation_sampler import Dealt
from hybridtrain.lightning.hooks.loader_hooks import inside
from hybridtrain.lightning.hooks.loop_hooks import combined_loader, predictions


@dataclass(frozen=True)
class Outputs:
    """One worker's outputs: ``payload`` is a pickled list (loaders) of lists (mini-batches).

    ``dealt``: of each loader, whether the workers have shared its mini-batches; of a stream, which
    every worker reads whole, worker 0's outputs count.
    """

    payload: bytes
    dealt: tuple[bool, ...]


def collect(trainer: pl.Trainer) -> Outputs | None:
    """This worker's predictions, if they are to be returned.

    Raises:
        UserError: if they cannot be pickled.
    """
    loop, found = trainer.predict_loop, predictions(trainer)
    if trainer.state.fn != "predict" or not loop.return_predictions or not found:
        return None
    dealt = tuple(_is_dealt(loader) for loader in combined_loader(loop).flattened)
    outputs = apply_to_collection(found, torch.Tensor, _compact)
    try:
        return Outputs(pickle.dumps(outputs, protocol=pickle.HIGHEST_PROTOCOL), dealt)
    except Exception as error:
        raise UserError(
            f"what predict_step returns cannot be brought home from a worker process ({error}); "
            "return tensors and plain data, or use trainer.predict(return_predictions=False) with "
            "a BasePredictionWriter"
        ) from error


def _is_dealt(loader: Any) -> bool:
    batches = getattr(loader, "batch_sampler", None)
    return isinstance(inside(batches), Dealt) or isinstance(getattr(loader, "sampler", None), Dealt)


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Without the rest of the storage that it is a view of."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def in_order(everybodys: Sequence[Outputs | None]) -> list[Any]:
    """Outputs in one device's order: a list of mini-batches, or one for each loader."""
    first = everybodys[0]
    assert first is not None, "the first mini-batch is worker 0's"
    parts = [pickle.loads(each.payload) if each is not None else [] for each in everybodys]
    loaders = [
        _merged([part[n] for part in parts if n < len(part)]) if dealt else parts[0][n]
        for n, dealt in enumerate(first.dealt)
    ]
    return loaders[0] if len(loaders) == 1 else loaders


def _merged(shares: Sequence[list[Any]]) -> list[Any]:
    """Interleave: worker w has mini-batches w, w + W, …; shares may be shorter, or missing."""
    longest = max(len(share) for share in shares)
    return [share[n] for n in range(longest) for share in shares if n < len(share)]
