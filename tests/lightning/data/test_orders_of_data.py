"""Streams are dealt out, or warned of; the user's order is kept where that is promised."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from hybridtrain import HybridStrategy
from hybridtrain.errors import UserError
from hybridtrain.lightning.data.user_loaders import shares_nothing, warn_of_repetition
from tests.lightning.toys import Recorder, Regression, make_trainer, regression_data


class Stream(IterableDataset[Any]):
    """Samples, one after the other."""

    def __init__(self, n: int) -> None:
        self.data = regression_data(n)

    def __iter__(self) -> Iterator[Any]:
        return iter([self.data[i] for i in range(len(self.data))])


def seen(loader: Any, workers: int, **options: Any) -> int:
    """Samples trained on in one epoch."""
    trainer_options = {k: options.pop(k) for k in ("use_distributed_sampler",) if k in options}
    trainer = make_trainer(HybridStrategy(**options), workers, max_epochs=1, **trainer_options)
    trainer.fit(Regression(), loader)
    return int(trainer.strategy.run_stats()["samples"])


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["hybrid", "async"])
@pytest.mark.parametrize(("n", "workers"), [(40, 2), (41, 3)])
def test_a_stream_is_dealt_each_sample_once(policy: str, n: int, workers: int) -> None:
    assert seen(DataLoader(Stream(n), 4), workers, policy=policy, iterable="deal") == n


def test_a_dealt_stream_alone_ends_its_epochs_where_lost_workers_are_made_up_for() -> None:
    options = {"iterable": "deal", "on_failure": "continue"}
    assert seen(DataLoader(Stream(40), 4), 2, policy="async", **options) == 40


@pytest.mark.filterwarnings("error:strategy.iterable=deal")
@pytest.mark.parametrize(("policy", "drops"), [("backup", True), ("async", False)])
def test_a_dealt_stream_under_a_policy_that_drops_is_warned_of(policy: str, drops: bool) -> None:
    with pytest.raises(UserWarning, match="no update has them") if drops else nullcontext():
        seen(DataLoader(Stream(12), 4), 3, policy=policy, iterable="deal")


def test_a_stream_that_is_not_dealt_is_warned_of() -> None:
    stream, kept = DataLoader(Stream(8), 4), DataLoader(regression_data(8), 4)
    assert shares_nothing(stream) and shares_nothing(kept) and shares_nothing([1, 2])
    own = DistributedSampler(kept.dataset, 2, 0)  # type: ignore[arg-type]
    assert not shares_nothing(DataLoader(kept.dataset, 4, sampler=own))
    with pytest.warns(UserWarning, match="Stream is a stream.*give strategy.iterable=deal"):
        warn_of_repetition(stream, "train", 2)
    with pytest.warns(UserWarning, match="use_distributed_sampler=False was given"):
        warn_of_repetition(kept, "train", 2)
    with pytest.warns(UserWarning, match="range is no DataLoader.*strategy.iterable=deal"):
        warn_of_repetition(range(3), "train", 2)


@pytest.mark.filterwarnings("error:several training loaders")
@pytest.mark.parametrize(
    ("policy", "second", "warns"), [("async", 2, True), ("async", 4, False), ("hybrid", 2, False)]
)
def test_unlike_loaders_are_warned_of_where_workers_run_freely(
    policy: str, second: int, warns: bool
) -> None:
    class First(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[0], batch_idx)

    trainer, data = make_trainer(policy, 2, max_epochs=1), regression_data(16)
    both = CombinedLoader([DataLoader(data, 4), DataLoader(data, second)], "min_size")
    with pytest.raises(UserWarning, match="StackDataset") if warns else nullcontext():
        trainer.fit(First(), both)


def test_a_loader_with_use_distributed_sampler_false_is_dealt_each_sample_once() -> None:
    options = {"iterable": "deal", "use_distributed_sampler": False}
    assert seen(DataLoader(regression_data(40), 4), 2, **options) == 40


def test_what_iterable_and_keep_order_may_be_is_said() -> None:
    with pytest.raises(UserError, match=re.escape("iterable='share' was given; it must be deal")):
        HybridStrategy(iterable="share")
    with pytest.raises(UserError, match="keep_order=1 was given"):
        HybridStrategy(keep_order=1)  # type: ignore[arg-type]


def test_workers_that_draw_can_go_from_shard_to_shard() -> None:
    """Each sample once; and who does not draw is refused."""
    loader = DataLoader(regression_data(41), 4)
    assert seen(loader, 2, policy="async", data_shards={"number": 3, "visit": 2}) == 41
    with pytest.raises(UserError, match=r"data_shards was given, but .* workers take turns"):
        seen(loader, 2, policy="synchronous", data_shards={"number": 3, "visit": 2})
    with pytest.raises(UserError, match=r"data_shards=3 was given"):
        HybridStrategy(data_shards=3)  # type: ignore[arg-type]


class Firsts(Regression):
    """Keeps the first element of all it has seen, in the first worker."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += batch[0][:, 0].tolist()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("workers", "keep_order", "kept"), [(1, False, True), (2, True, True), (2, False, False)]
)
def test_data_that_are_not_shuffled_keep_their_order(
    workers: int, keep_order: bool, kept: bool
) -> None:
    data, module = Recorder(regression_data(12)), Firsts()
    trainer = make_trainer(HybridStrategy(keep_order=keep_order), workers, max_epochs=1)
    trainer.fit(module, DataLoader(data, 3))
    order = data.data.tensors[0][::workers, 0].tolist()
    assert (module.seen == order) is kept
