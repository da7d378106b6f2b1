"""Samplers of validation, test and prediction: all workers together use each sample once."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.data import sized_len
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.trainer.states import RunningStage
from torch.utils.data import Sampler

from hybridtrain.engine.worker.worker_group import WorkerGroup
from hybridtrain.errors import UserError
from hybridtrain.lightning.data.user_loaders import sampler_in
from hybridtrain.lightning.hooks.loop_hooks import combined_loader, limited_batches, predictions


@dataclass
class Group:
    """The lengths of an evaluation's loaders, and the number of workers that share them."""

    n_workers: int
    lengths: list[int] = field(default_factory=list)

    @property
    def n_active(self) -> int:
        """Workers with a sample in every loader; empty loaders do not count."""
        return min([self.n_workers, *(n for n in self.lengths if n)])


class SharedSampler(Sampler[Any]):
    """A sampler of ours in an evaluation or a prediction."""

    asked = False  # it has been iterated over


class EvaluationSampler(SharedSampler):
    """Every m-th sample, of m workers, in the order of the user's sampler."""

    def __init__(self, indices: Sequence[int], place: int, group: Group) -> None:
        self._indices, self._place, self._group = indices, place, group
        group.lengths.append(len(indices))

    def _share(self) -> range:
        n_active, everything = self._group.n_active, range(len(self._indices))
        return everything[self._place :: n_active] if self._place < n_active else range(0)

    def __len__(self) -> int:
        return len(self._share())

    def __iter__(self) -> Iterator[int]:
        self.asked = True
        return (self._indices[place] for place in self._share())


class Dealt(SharedSampler):
    """Every W-th of one device's mini-batches for prediction, starting with this worker's number.

    Args:
        batches: all mini-batches, or all items where items are mini-batches.
        group: knows this worker's number.
        limit: ``Trainer(limit_predict_batches=…)``, of all workers together.
    """

    def __init__(self, batches: Any, group: WorkerGroup, limit: int | float) -> None:
        self._batches, self._group, self._limit = batches, group, limit

    def _total(self) -> int | None:
        length = sized_len(self._batches)
        if length is None:
            return self._limit if isinstance(self._limit, int) else None
        return int(limited_batches(RunningStage.PREDICTING, length, self._limit))

    def __len__(self) -> int:
        total = self._total()
        if sized_len(self._batches) is None or total is None:
            raise TypeError("the batch sampler has no length")
        return len(range(self._group.worker, total, self._group.n_workers))

    def __iter__(self) -> Iterator[Any]:
        group, self.asked = self._group, True
        return islice(iter(self._batches), group.worker, self._total(), group.n_workers)


# ---- results of trainer.predict: all workers' outputs in one device's order ---------------------
# Every worker predicts every W-th mini-batch and sends its outputs once, at the end; the calling
# process puts them in order.


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
    dealt = tuple(is_dealt(loader) for loader in combined_loader(loop).flattened)
    outputs = apply_to_collection(found, torch.Tensor, _compact)
    try:
        return Outputs(pickle.dumps(outputs, protocol=pickle.HIGHEST_PROTOCOL), dealt)
    except Exception as error:
        raise UserError(
            f"what predict_step returns cannot be brought home from a worker process ({error}); "
            "return tensors and plain data, or use trainer.predict(return_predictions=False) with "
            "a BasePredictionWriter"
        ) from error


def is_dealt(loader: Any) -> bool:
    """Whether workers share its mini-batches."""
    return sampler_in(loader, Dealt) is not None


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a view, so that it does not keep the rest of its storage; else return the tensor."""
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
