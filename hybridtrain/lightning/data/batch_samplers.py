"""Mini-batches that a batch sampler of the user's makes, dealt out whole.

Lightning gives each worker other samples by putting a sampler of its own into the user's batch
sampler. Into one that takes none (it groups by length, say, or is no ``BatchSampler`` at all) it
cannot be put. The mini-batches that it makes can be dealt out as they are: as items of which each
is a whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from copy import copy
from dataclasses import dataclass
from typing import Any

from pytorch_lightning.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, Sampler

from hybridtrain.errors import UserError
from hybridtrain.lightning.hooks.loader_hooks import (
    gets_our_sampler,
    noting_indices,
    rebuilt,
    takes_a_sampler,
)


def makes_its_own(dataloader: Any, trainer: Any) -> bool:
    """Whether a loader's batch sampler would have to take a sampler, and takes none."""
    if not isinstance(dataloader, DataLoader):
        return False
    if dataloader.batch_sampler is None or type(dataloader.batch_sampler) is BatchSampler:
        return False
    return gets_our_sampler(trainer, dataloader) and not takes_a_sampler(dataloader)


@dataclass(frozen=True)
class Batches:
    """A loader whose items are these mini-batches, as far as samplers want to know.

    Raises:
        UserError: if nobody can say how many there are.
    """

    dataset: Any
    sampler: Any
    batch_sampler: None = None

    @classmethod
    def of(cls, dataloader: DataLoader[Any]) -> Batches:
        """The user's."""
        batches: Any = dataloader.batch_sampler
        if not isinstance(batches, Sized):
            raise UserError(
                f"the DataLoader has a batch sampler ({type(batches).__name__}) without a length, "
                "so its mini-batches cannot be dealt out to workers; give it a method __len__, or "
                "use Trainer(use_distributed_sampler=False) and let it make other mini-batches in "
                "each worker"
            )
        return cls(dataloader.dataset, batches)


class Handed(Sampler[list[int]]):
    """In the place of the user's batch sampler: what ``sampler`` hands out is whole mini-batches.

    Args:
        sampler: Lightning tells it the epoch.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.sampler)


def handed(dataloader: DataLoader[Any], sampler: Any, mode: RunningStage) -> DataLoader[Any]:
    """The user's loader, with the mini-batches of ``sampler``."""
    plain = copy(dataloader)  # as Lightning knows how to make one anew
    vars(plain)["batch_sampler"] = BatchSampler(dataloader.sampler, 1, False)
    predicts = mode == RunningStage.PREDICTING
    return rebuilt(dataloader, plain, noting_indices(sampler) if predicts else Handed(sampler))
