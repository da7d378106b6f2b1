"""How many samples a mini-batch has, where it cannot be seen: the user says so."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from hybridtrain.errors import UserError
from hybridtrain.lightning.data.batch_size import Scales
from tests.lightning.toys import Regression, distance, make_trainer, regression_data


@dataclass
class Fields:
    n: int


Named = namedtuple("Named", "n rest")


@pytest.mark.parametrize(
    ("key", "batch"),
    [
        ("n", {"n": 3}),
        ("n", {"n": torch.tensor(3)}),
        ("n", {"n": torch.zeros(3, 5)}),
        ("n", {"n": ["a", "b", "c"]}),
        ("n", Fields(3)),
        ("n", Named(3, "rest")),
        (1, ("rest", 3)),
        (-1, ["rest", torch.zeros(3)]),
        (7, {7: 3}),
    ],
)
def test_the_key_may_be_a_key_an_attribute_or_a_place(key: Any, batch: Any) -> None:
    assert Scales(object(), key).weigh(batch) == 3.0


@pytest.mark.parametrize(
    ("key", "batch", "has"),
    [
        ("n", {"x": 1, "y": 2}, "keys 'x', 'y'"),
        ("m", Fields(3), "attributes n"),
        ("m", Named(1, 2), "attributes n, rest"),
        (2, ("a", "b"), "2 entries"),
        ("n", ("a", "b"), "2 entries"),
        (0, 5, "no entries"),
    ],
)
def test_a_key_that_the_batch_has_not_is_named_and_so_is_what_it_has(
    key: Any, batch: Any, has: str
) -> None:
    with pytest.raises(UserError, match=f"num_samples_key={key!r}.*{has}.*num_samples"):
        Scales(object(), key).weigh(batch)


@pytest.mark.parametrize("value", [-1, 2.5, "three", None, True, torch.tensor(0.5)])
def test_a_number_of_samples_that_makes_no_sense_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"num_samples_key='n'.*whole number"):
        Scales(object(), "n").weigh({"n": value})


def test_where_nobody_can_tell_the_error_names_both_ways() -> None:
    with pytest.raises(UserError, match=r"num_samples_key=KEY.*num_samples\(batch\)"):
        Scales(object()).weigh({"text": ["a", "b"]})


def test_a_filler_weighs_nothing_whatever_the_user_says() -> None:
    assert Scales(object(), "n").weigh({"n": 3}, known=0.0) == 0.0


def test_a_method_of_the_same_name_that_is_no_hook_is_left_alone() -> None:
    class Other:
        def num_samples(self) -> int:
            raise AssertionError("not asked")

    assert Scales(Other()).weigh(torch.zeros(4)) == 4.0


@pytest.mark.parametrize("key", [True, 1.5, ["n"]])
def test_a_key_of_another_type_is_refused_at_once(key: Any) -> None:
    with pytest.raises(UserError, match="num_samples_key="):
        HybridStrategy(num_samples_key=key)


class Opaque(torch.utils.data.Dataset[Any]):
    """Items are whole mini-batches of 5, 3, 7 and 1 samples, as lists in a dictionary."""

    def __init__(self) -> None:
        x, y = regression_data(16).tensors
        sizes = [5, 3, 7, 1]
        self.items = [
            {"n": n, "x": a.tolist(), "y": b.tolist()}
            for n, a, b in zip(sizes, x.split(sizes), y.split(sizes), strict=True)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class FromLists(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = torch.tensor(batch["x"]), torch.tensor(batch["y"])
        return torch.nn.functional.mse_loss(self.net(x), y)


class Hooked(FromLists):
    def num_samples(self, batch: Any) -> int:
        return len(batch["x"])


def trained(module: type[Regression], strategy: Any, data: Any, batch_size: Any) -> pl.Trainer:
    pl.seed_everything(7, verbose=False)
    trainer = make_trainer(strategy, 2, max_epochs=1)
    trainer.fit(module(), DataLoader(data, batch_size=batch_size))
    return trainer


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("module", "key"), [(FromLists, "n"), (FromLists, "x"), (Hooked, None)], ids=str
)
@pytest.mark.parametrize("policy", ["hybrid", "async"])
def test_batches_that_show_no_size_are_weighted_as_the_user_says(
    module: Any, key: Any, policy: str
) -> None:
    trainer = trained(module, HybridStrategy(policy, num_samples_key=key), Opaque(), None)
    assert trainer.strategy.run_stats()["samples"] == 16


def test_the_weights_that_the_user_gives_make_the_mean() -> None:
    """Two batches of 5 and 3 samples in one step are as one batch of 8."""
    data = Opaque()
    data.items = data.items[:2]
    parts = trained(FromLists, HybridStrategy(num_samples_key="n"), data, None)
    pl.seed_everything(7, verbose=False)
    whole = Regression()
    single = make_trainer("auto", 1, max_epochs=1)
    first = torch.utils.data.Subset(regression_data(16), range(8))
    single.fit(whole, DataLoader(first, batch_size=8))
    assert distance(parts.lightning_module, whole) < 1e-6


def test_without_a_word_from_the_user_the_run_ends_with_the_error() -> None:
    with pytest.raises(UserError, match=r"num_samples_key=KEY.*num_samples\(batch\)"):
        data = Opaque()
        for item in data.items:
            item["n"] = "unknown"
            item["x"] = [[f"{value}" for value in row] for row in item["x"]]
        trained(FromLists, "hybrid", data, None)
