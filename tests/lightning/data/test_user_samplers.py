"""The samples of a user's own sampler are those that are trained on, in its order."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from hybridtrain.engine.worker.worker_group import WorkerGroup
from hybridtrain.errors import UserError
from hybridtrain.lightning.data.user_loaders import order_of, plan_of
from hybridtrain.lightning.replay.module_task import ModuleTask, VirtualTrainer
from tests.lightning.toys import Recorder, Regression, make_trainer, regression_data

DATA = regression_data(12)
SOME = [1, 3, 8]
ALONE: Any = SimpleNamespace(group=WorkerGroup(0, 1), gather=lambda what, mine: [mine])


class Listed(Sampler[Any]):
    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(SOME)


def in_batches(sampler: Any) -> DataLoader[Any]:
    return DataLoader(DATA, batch_sampler=BatchSampler(sampler, 2, False))


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        (in_batches(SubsetRandomSampler(SOME)), SOME),
        (in_batches(Listed(SOME)), SOME),
        (in_batches(SequentialSampler(DATA)), range(12)),
        (in_batches(DistributedSampler(DATA, 2, 0)), range(12)),  # replaced, as under DDP
        (DataLoader(DATA, 2, sampler=SequentialSampler(range(5))), range(5)),
        (DataLoader(DATA, 2, sampler=RandomSampler(range(5))), range(5)),
        (DataLoader(DATA, 2, sampler=Listed(np.array(SOME))), SOME),
        (DataLoader(DATA, 2, sampler=Listed(torch.tensor(SOME))), SOME),
    ],
)
def test_an_epoch_has_the_samples_of_the_users_sampler(loader: Any, samples: Any) -> None:
    order = order_of(loader, True, ALONE)
    drawn = order(0)
    assert sorted(drawn) == list(samples) and {type(index) for index in drawn} == {int}
    assert plan_of(loader, order, None, 2).length == len(samples)


class Sized(Regression):
    """Makes its loader in a hook; its buffer is the size of the last mini-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.zeros(1))

    def train_dataloader(self) -> Any:
        return in_batches(RandomSampler(DATA))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.size.fill_(len(batch[0]))
        return super().training_step(batch, batch_idx)


def test_a_batch_sampler_of_a_loader_that_a_hook_makes_keeps_its_size() -> None:
    module, trainer = Sized(), make_trainer("hybrid", 2, max_epochs=1)
    trainer.fit(module)
    assert trainer.global_step == len(DATA) // (2 * 2) and float(module.size) == 2


@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_a_sampler_within_a_batch_sampler_is_trained_and_validated_on(strategy: str) -> None:
    data = Recorder(regression_data(12))
    loader = DataLoader(data, batch_sampler=BatchSampler(SubsetRandomSampler(SOME), 1, False))
    trainer = make_trainer(strategy, 2, max_epochs=1)
    trainer.fit(Regression(), loader, loader)
    assert torch.where(data.counts > 0)[0].tolist() == SOME and data.counts.sum() == 2 * len(SOME)


def test_a_replay_has_the_mini_batches_of_the_users_sampler() -> None:
    loader = in_batches(SubsetRandomSampler(SOME))
    task = ModuleTask(Regression(), VirtualTrainer(2), loader, 3, None, 1, None)
    assert task.timetable.sizes == (2, 2) and task.timetable.length == len(SOME)


def test_a_sampler_without_a_length_is_refused_with_a_way_out() -> None:
    with pytest.raises(UserError, match=r"sampler \(Unsized\) without a length.*__len__"):
        make_trainer("hybrid", 2).fit(Regression(), DataLoader(DATA, 2, sampler=Unsized()))
