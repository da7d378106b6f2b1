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
from hybridtrain.lightning.data.batch_size import Scales, keeps_all
from tests.lightning.toys import Regression, distance, make_trainer, regression_data
from tests.picking import by_default


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


def test_a_batch_without_a_visible_size_names_both_ways_to_tell_its_samples() -> None:
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


# ---- a collate_fn that leaves samples out --------------------------------------------------------

ONE, THREE = torch.zeros(3), torch.zeros(3, 5)
TIME_FIRST = torch.zeros(3, 8, 5)  # 3 steps of 8 sequences


@pytest.mark.parametrize(
    ("batch", "drawn", "samples"),
    [
        ((THREE, ONE), 8, 3),
        ({"x": THREE, "y": ONE, "text": ["a", "b", "c"]}, 8, 3),
        ([THREE, {"y": [ONE, ONE, ONE]}], 8, 3),
        ({"x": THREE.numpy(), "scale": torch.tensor(2.0)}, 8, 3),
        (Named(THREE, ["a", "b", "c"]), 8, 3),
        (Fields(THREE), 8, 3),  # type: ignore[arg-type]
        ((torch.zeros(0, 5), torch.zeros(0)), 8, 0),
        ((torch.zeros(2, 4), torch.zeros(2, 1)), 4, 2),  # as many features as were drawn
        # All are there.
        ((torch.zeros(8, 5), torch.zeros(8)), 8, 8),
        ((TIME_FIRST, torch.zeros(8)), 8, 8),
        ((TIME_FIRST, torch.zeros(3, 8)), 8, 8),
        ({"nodes": torch.zeros(5, 2), "edges": torch.zeros(2, 7), "of": torch.zeros(5)}, 8, 8),
        (torch.nn.utils.rnn.pack_sequence([torch.zeros(3, 2), torch.zeros(2, 2)]), 2, 2),
        ((["a"] * 8, THREE), 8, 8),
        ((torch.zeros(16, 5), torch.zeros(16)), 8, 8),  # made twice as many
        ({"loss": torch.tensor(1.0)}, 8, 8),
        (object(), 8, 8),
    ],
)
def test_the_samples_of_a_mini_batch_are_those_that_were_not_left_out(
    batch: Any, drawn: int, samples: int
) -> None:
    scales = Scales(object())
    assert scales.weigh(batch, float(drawn), all_kept=False) == samples
    assert scales.weigh(batch, float(drawn)) == drawn  # torch's own puts all together


def test_only_a_loader_of_torchs_is_known_to_keep_all() -> None:
    class Own(DataLoader[Any]):
        pass

    data = regression_data(8)
    assert keeps_all(DataLoader(data, 4)) and not keeps_all(Own(data, 4))
    assert not keeps_all(DataLoader(data, 4, collate_fn=torch.stack))  # type: ignore[arg-type]


FILTERED = regression_data(46, torch.float64)
LEFT = int((FILTERED.tensors[0][:, 0] > -0.5).sum())


def above(items: list[Any]) -> list[torch.Tensor]:
    """Of a list of samples those with x₀ > -0.5."""
    kept = [item for item in items if item[0][0] > -0.5]
    return [torch.stack(part) for part in zip(*kept, strict=True)]


def filtered(strategy: Any, workers: int, **options: Any) -> tuple[Regression, pl.Trainer]:
    pl.seed_everything(7, verbose=False)
    module = Regression().double()
    trainer = make_trainer(strategy, workers, max_epochs=3, **options)
    trainer.fit(module, DataLoader(FILTERED, 12 // workers, collate_fn=above))
    return module, trainer


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("strategy", ["hybrid", "local_sgd"])
def test_mini_batches_from_which_samples_were_left_out_weigh_less(
    strategy: str, workers: int
) -> None:
    """As if one worker had taken the samples of all in one mini-batch."""
    every: dict[str, Any] = {"exchange": {"name": "movement", "every": 1}}
    options = every if strategy == "local_sgd" else {}
    ours, trainer = filtered(HybridStrategy(keep_order=True, **options), workers)
    whole, _ = filtered("auto", 1)
    assert distance(ours, whole) < 1e-12
    assert trainer.strategy.run_stats()["samples"] == 3 * LEFT  # type: ignore[attr-defined]


@pytest.mark.parametrize("strategy", ["async", "hogwild", "synchronous", "downpour"])
def test_where_workers_run_freely_samples_that_were_left_out_are_not_counted(strategy: str) -> None:
    _, trainer = filtered(strategy, 2)
    assert trainer.strategy.run_stats()["samples"] == 3 * LEFT  # type: ignore[attr-defined]


def test_the_user_may_say_how_many_samples_are_left() -> None:
    class Says(Regression):
        def num_samples(self, batch: Any) -> int:
            return len(batch[0])

    pl.seed_everything(7, verbose=False)
    said, strategy = Says().double(), HybridStrategy(keep_order=True)
    make_trainer(strategy, 2, max_epochs=3).fit(said, DataLoader(FILTERED, 6, collate_fn=above))
    assert distance(said, filtered("auto", 1)[0]) < 1e-12


def marked(n: int) -> torch.utils.data.TensorDataset:
    """Of three global mini-batches of 6 one has no sample for the second worker, one for the first.

    The first worker of two has the samples 0, 2, 4 of each.
    """
    kept = torch.tensor([[1, 0] * 3, [0, 1] * 3, [1, 1] * 3]).flatten().repeat(n)[:n]
    return torch.utils.data.TensorDataset(*regression_data(n, torch.float64).tensors, kept)


def only_marked(items: list[Any]) -> Any:
    kept = [item for item in items if item[2]]
    return [torch.stack(part) for part in zip(*kept, strict=True)] if kept else None


@pytest.mark.parametrize("n", by_default([36, 39, 41], 41))
@pytest.mark.parametrize("strategy", by_default(["hybrid", "local_sgd"], "hybrid"))
def test_a_worker_whose_samples_are_all_left_out_abstains(strategy: str, n: int) -> None:
    """``collate_fn`` gives ``None``; as if one worker had taken the samples of all."""

    def fitted(strategy: Any, workers: int, size: int) -> tuple[Regression, pl.Trainer]:
        pl.seed_everything(7, verbose=False)
        module, trainer = Regression().double(), make_trainer(strategy, workers)
        trainer.fit(module, DataLoader(marked(n), size, collate_fn=only_marked))
        return module, trainer

    every: dict[str, Any] = {"exchange": {"name": "movement", "every": 1}}
    options = every if strategy == "local_sgd" else {}
    ours, trainer = fitted(HybridStrategy(keep_order=True, **options), 2, 3)
    whole, alone = fitted("auto", 1, 6)
    assert trainer.global_step == alone.global_step
    assert distance(ours, whole) < 1e-12
