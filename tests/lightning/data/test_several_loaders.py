"""Several training loaders: which samples each worker gets of each."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from hybridtrain.engine.protocol.spans import shares_of
from tests.lightning.toys import make_trainer
from tests.picking import by_default

LONG, SIZE = 13, 2


class Notes(pl.LightningModule):
    """Writes down, in shared memory, the samples of each loader in each worker's steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        # worker, step, loader, sample
        self.seen = torch.full((3, 16, 2, SIZE), -1, dtype=torch.int64).share_memory_()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for loader, part in enumerate(batch):
            if part is not None:
                self.seen[self.global_rank, batch_idx, loader, : len(part[0])] = part[0]
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)

    def of(self, loader: int, worker: int) -> list[int]:
        """The worker's samples, in its order."""
        seen = self.seen[worker, :, loader].flatten()
        return seen[seen >= 0].tolist()


def trained(strategy: Any, workers: int, mode: str, *lengths: int, own: bool = False) -> Notes:
    def loader(n: int) -> DataLoader[Any]:
        data = TensorDataset(torch.arange(n))
        if own:  # its order is drawn by worker 0 for all
            ordered = torch.utils.data.WeightedRandomSampler([1.0] * n, n, replacement=False)
            return DataLoader(data, batch_sampler=BatchSampler(ordered, SIZE, False))
        return DataLoader(data, SIZE, shuffle=True)

    module = Notes()
    combined = CombinedLoader([loader(n) for n in lengths], mode)
    make_trainer(strategy, workers, max_epochs=1).fit(module, combined)
    return module


def once(samples: list[int], n: int) -> bool:
    return sorted(samples) == list(range(n))


STRATEGIES = by_default(["hybrid", "local_sgd", "async"], "hybrid")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("workers", by_default([1, 2, 3], 2))
@pytest.mark.parametrize("short", by_default([1, 5, 9, 12], 5, 9))
def test_max_size_uses_each_sample_once(strategy: str, workers: int, short: int) -> None:
    module = trained(strategy, workers, "max_size", LONG, short)
    for loader, n in enumerate((LONG, short)):
        assert once([i for w in range(workers) for i in module.of(loader, w)], n)


@pytest.mark.parametrize("own", by_default([False, True], False))
@pytest.mark.parametrize("strategy", by_default(["hybrid", "local_sgd"], "hybrid"))
@pytest.mark.parametrize("workers", by_default([1, 2, 3], 2))
@pytest.mark.parametrize("short", by_default([1, 5, 9, 12], 5))
@pytest.mark.parametrize("turned", by_default([False, True], False))
def test_max_size_cycle_uses_each_sample_once_in_the_first_pass(
    strategy: str, workers: int, short: int, own: bool, turned: bool
) -> None:
    lengths = (short, LONG) if turned else (LONG, short)
    module = trained(strategy, workers, "max_size_cycle", *lengths, own=own)
    whole = workers * SIZE
    for loader, n in enumerate(lengths):
        passed = []
        for worker, places in enumerate(shares_of((SIZE,) * workers)):
            share = sum(start + p < n for start in range(0, n, whole) for p in places)
            passed += module.of(loader, worker)[:share]
        assert once(passed, n)
    if -(-short // whole) < -(-LONG // whole):
        everything = [i for w in range(workers) for i in module.of(lengths.index(LONG), w)]
        assert once(everything, LONG), "the longest is not repeated"


def test_a_users_sampler_is_not_asked_where_one_worker_alone_begins_the_next_pass() -> None:
    """All its passes of an epoch have one order."""
    module = trained("async", 2, "max_size_cycle", 9, 1, own=True)
    everything = [i for worker in range(2) for i in module.of(0, worker)]
    assert once(everything, 9) and set(module.of(1, 0)) == set(module.of(1, 1)) == {0}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("workers", by_default([1, 2, 3], 2))
@pytest.mark.parametrize("short", by_default([1, 5, 9, 12, LONG], 9, LONG))
def test_min_size_repeats_nothing(strategy: str, workers: int, short: int) -> None:
    module = trained(strategy, workers, "min_size", LONG, short)
    for loader in range(2):
        everything = [i for w in range(workers) for i in module.of(loader, w)]
        assert len(everything) == len(set(everything))
    if strategy != "async":
        assert once(everything, short), "the shortest is used up"
