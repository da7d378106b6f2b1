"""Mini-batches of other sizes for unequal devices: ``strategy.batch_size_per_worker``."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from hybridtrain import HybridStrategy
from hybridtrain.engine.samplers import EpochPlan, Seeded, ShareSampler, UnfinishedPass, shares_of
from hybridtrain.engine.worker.worker_group import WorkerGroup
from hybridtrain.errors import UserError
from tests.lightning.toys import Recorder, Regression, distance, make_trainer, regression_data
from tests.picking import by_default


def shares(
    n: int, sizes: tuple[int, ...], drop_last: bool, begun: UnfinishedPass | None = None
) -> list[list[tuple[list[int], float]]]:
    """Every worker's mini-batches, as a BatchSampler makes them, with their weights.

    Who has nothing in a step gets a filler, so that they can be compared step by step.
    """
    result = []
    for worker in range(len(sizes)):
        client: Any = SimpleNamespace(worker=worker, group=WorkerGroup(worker, len(sizes)))
        plan = EpochPlan(
            Seeded(n, 3), n, sizes, drop_last, fills=lambda: True, last=lambda worker: math.inf
        )
        sampler = ShareSampler(plan, 0, client, begun=begun)
        batches = list(BatchSampler(sampler, sizes[worker], drop_last))
        steps = -(-len(sampler) // sizes[worker])
        assert len(batches) == steps - (begun.batches if begun else 0)
        portions = [sampler.next_portion() for _ in batches]
        assert sampler.next_portion() is None
        result.append([(b, cast(float, p.weight)) for b, p in zip(batches, portions, strict=True)])
    return result


SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@settings(max_examples=300, deadline=None)
@given(n=st.integers(0, 60), sizes=SIZES, drop_last=st.booleans())
def test_every_sample_is_dealt_out_exactly_once(
    n: int, sizes: tuple[int, ...], drop_last: bool
) -> None:
    order, whole = Seeded(n, 3)(0), sum(sizes)
    usable = n // whole * whole if drop_last else n
    every = shares(n, sizes, drop_last)
    assert len({len(batches) for batches in every}) == 1, "all take the same number of steps"
    for step, parts in enumerate(zip(*every, strict=True)):
        union = [index for batch, weight in parts for index in batch if weight]
        assert sorted(union) == sorted(order[:usable][step * whole : (step + 1) * whole])
        for (batch, weight), size in zip(parts, sizes, strict=True):
            assert weight == len(batch) or (weight == 0 and batch)
            assert len(batch) <= size
    assert sum(weight for batches in every for _, weight in batches) == usable


@settings(max_examples=100, deadline=None)
@given(n=st.integers(0, 60), start=st.integers(0, 60), sizes=SIZES, drop_last=st.booleans())
def test_what_is_left_of_an_epoch_is_dealt_out_exactly_once(
    n: int, start: int, sizes: tuple[int, ...], drop_last: bool
) -> None:
    start = min(start, n)
    begun = UnfinishedPass(0, Seeded(n, 3), ((start, n),), batches=5)
    every = shares(n, sizes, drop_last, begun)
    seen = sorted(i for batches in every for batch, weight in batches if weight for i in batch)
    left = Seeded(n, 3)(0)[start:]
    assert seen == sorted(left[: len(left) // sum(sizes) * sum(sizes)] if drop_last else left)


def test_a_worker_without_a_mini_batch_in_the_last_step_is_asked_for_none() -> None:
    for n, sizes, without in ((13, (2, 2, 2), (1, 2)), (11, (4, 4, 1), (2,)), (1, (1, 9), (1,))):
        for worker in range(len(sizes)):
            client: Any = SimpleNamespace(worker=worker, group=WorkerGroup(worker, len(sizes)))
            sampler = ShareSampler(EpochPlan(Seeded(n, 3), n, sizes, False), 0, client)
            batches = list(BatchSampler(sampler, sizes[worker], False))
            steps = -(-n // sum(sizes))
            assert -(-len(sampler) // sizes[worker]) == steps, "all count the same steps"
            assert len(batches) == steps - (worker in without)
            for _ in batches:
                assert not sampler.has_nothing_next and sampler.next_portion() is not None
            assert sampler.has_nothing_next is (worker in without)


def test_equal_sizes_are_every_wth_sample_and_a_remainder_is_shared_in_proportion() -> None:
    assert shares_of((2, 2, 2)) == [[0, 3], [1, 4], [2, 5]]
    assert shares_of((6, 2)) == [[0, 1, 3, 4, 5, 7], [2, 6]]
    for sizes in ((6, 2), (32, 8), (1, 5, 3)):
        owners = shares_of(sizes)
        for rest in range(sum(sizes)):
            for places, size in zip(owners, sizes, strict=True):
                share = sum(place < rest for place in places)
                assert abs(share - rest * size / sum(sizes)) < 1.5


SGD = partial(torch.optim.SGD, lr=0.02)
ADAM = partial(torch.optim.Adam, lr=0.01)


def trained(
    strategy: HybridStrategy, workers: int, batch_size: int, make: Any, data: Any, **options: Any
) -> pl.LightningModule:
    pl.seed_everything(7, verbose=False)
    trainer = make_trainer(strategy, workers, **({"max_epochs": 3} | options))
    module = Regression(make)
    trainer.fit(module, DataLoader(data, batch_size=batch_size, shuffle=True))
    return module


@pytest.mark.parametrize("make", by_default([SGD, ADAM], ADAM))
@pytest.mark.parametrize("n", by_default([48, 45, 41, 7], 45, 7))
def test_unequal_mini_batches_equal_one_worker_with_their_union(make: Any, n: int) -> None:
    data = regression_data(n, torch.float64)
    whole = trained(HybridStrategy(), 1, 8, make, data, precision="64-true")
    strategy = HybridStrategy(batch_size_per_worker=[6, 2])
    shared = trained(strategy, 2, 99, make, data, precision="64-true")
    assert distance(shared, whole) < 1e-12
    assert strategy.run_stats()["samples"] == 3 * n
    if n == 48:
        assert strategy.run_stats()["samples_per_worker"] == [108, 36]


class Sizes(Regression):
    """The mini-batches that a worker gets are of its own size."""

    allowed: tuple[tuple[int, ...], ...]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert len(batch[0]) in self.allowed[self.global_rank]
        loader = self.trainer.train_dataloader
        assert loader.batch_size == loader.batch_sampler.batch_size == (4, 1)[self.global_rank]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("workers_of_the_loader", [0, 1])
@pytest.mark.parametrize("policy", by_default(["hybrid", "async"], "hybrid"))
def test_every_worker_gets_mini_batches_of_its_own_size(
    policy: str, workers_of_the_loader: int
) -> None:
    module = Sizes()
    module.allowed = ((4,), (1,))
    data = Recorder(regression_data(40))
    strategy = HybridStrategy(policy, batch_size_per_worker=(4, 1))
    trainer = make_trainer(strategy, 2, max_epochs=2)
    loader = DataLoader(
        data, batch_size=10, shuffle=True, num_workers=workers_of_the_loader, drop_last=True
    )
    trainer.fit(module, loader)
    assert int(data.counts.max()) <= 2
    if policy == "hybrid":
        assert data.counts.tolist() == [2] * 40
        assert trainer.global_step == 16


@pytest.mark.few(1)
@pytest.mark.parametrize("n", [40, 23, 3])
def test_free_running_workers_of_unequal_sizes_use_every_sample_once(n: int) -> None:
    data = Recorder(regression_data(n))
    strategy = HybridStrategy("async", batch_size_per_worker=[8, 2, 1])
    trained(strategy, 3, 99, SGD, data, max_epochs=2)
    assert strategy.run_stats()["samples"] == 2 * n
    assert int(data.counts.min()) >= 2, "mini-batches that do not count look at samples, too"


def test_a_stream_is_cut_into_mini_batches_of_the_workers_size() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from zip(*regression_data(8).tensors, strict=True)

    module = Sizes()
    module.allowed = ((4,), (1,))
    strategy = HybridStrategy(batch_size_per_worker=[4, 1])
    trainer = make_trainer(strategy, 2, max_epochs=1)
    trainer.fit(module, DataLoader(Stream(), batch_size=2))
    assert strategy.run_stats()["samples_per_worker"] == [8, 8]


@pytest.mark.parametrize("sizes", [[], [0, 2], [2, -1], [2.0, 1], ["2", 1], 4, "44", [True, 2]])
def test_sizes_that_make_no_sense_are_refused_at_once(sizes: Any) -> None:
    with pytest.raises(UserError, match=r"batch_size_per_worker=.*whole number from 1 on"):
        HybridStrategy(batch_size_per_worker=sizes)


def test_the_number_of_sizes_must_be_that_of_the_workers() -> None:
    strategy = HybridStrategy(batch_size_per_worker=[2, 2, 2])
    with pytest.raises(UserError, match=r"batch_size_per_worker=\[2, 2, 2\].* for 2 workers"):
        trained(strategy, 2, 4, SGD, regression_data())


class Pairs(BatchSampler):
    """A batch sampler of the user's own."""


@pytest.mark.parametrize("policy", ["hybrid", "async"])
def test_mini_batches_that_are_not_the_loaders_cannot_be_sized(policy: str) -> None:
    data = TensorDataset(*regression_data(24).tensors)
    own = DataLoader(data, batch_sampler=Pairs(SequentialSampler(data), 4, False))
    items = DataLoader(data, batch_size=None)
    for loader, what in ((own, "Pairs"), (items, "whole mini-batches")):
        strategy = HybridStrategy(policy, batch_size_per_worker=[2, 2])
        with pytest.raises(UserError, match=f"batch_size_per_worker.*{what}"):
            make_trainer(strategy, 2).fit(Regression(), loader)


@pytest.mark.parametrize("in_hook", [False, True])
@pytest.mark.parametrize("policy", ["hybrid", "async"])
def test_an_explicit_plain_batch_sampler_keeps_its_mini_batches(policy: str, in_hook: bool) -> None:
    """Lightning loses them when it puts another sampler in, under ddp as well."""
    data = Recorder(regression_data(24))

    class Fours(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            assert batch[0].shape == (4, 4)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert batch[0].shape == (4, 4)

    def made() -> DataLoader[Any]:
        return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, True))

    class Made(pl.LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return made()

        val_dataloader = train_dataloader

    trainer = make_trainer(policy, 2, max_epochs=1)
    if in_hook:
        trainer.fit(Fours(), datamodule=Made())
    else:
        trainer.fit(Fours(), made(), made())
    assert data.counts.tolist() == [2] * 24
    assert trainer.strategy.run_stats()["samples"] == 24
