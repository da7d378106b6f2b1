"""task=triplet: negatives are semi-hard, only words with a loss are touched, rare ones learnt."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridtrain  # noqa: F401  (registers the strategies)
from hybridtrain.engine.updates.sparse.row_optimizers import SparseMomentum
from hybridtrain.errors import UserError
from hybridtrain.tasks.triplet import TripletData, TripletModule, triplet_loss


def small_data(**options: Any) -> TripletData:
    return TripletData(**({"vocabulary": 300, "classes": 5, "samples": 2000} | options))


def by_hand(module: TripletModule, batch: Any) -> set[tuple[int, int, int]]:
    """One sample at a time."""
    anchors, positives, classes = batch
    found = set()
    vectors = module(torch.arange(module.table.num_embeddings)).detach()

    def distance(one: Any, other: Any) -> float:
        return float(2 - 2 * vectors[one] @ vectors[other])

    for n, (a, p) in enumerate(zip(anchors.tolist(), positives.tolist(), strict=True)):
        near = distance(a, p)
        others = [m for m in range(len(anchors)) if classes[m] != classes[n]]
        if not others:
            continue
        far = {m: distance(a, positives[m]) for m in others}
        beyond = [m for m in others if far[m] > near]
        which = min(beyond, key=far.__getitem__) if beyond else max(far, key=far.__getitem__)
        if near - far[which] + module.margin > 0:
            found.add((a, p, int(positives[which])))
    return found


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10_000))
def test_the_negative_is_the_nearest_one_beyond_the_positive(seed: int) -> None:
    torch.manual_seed(seed)
    module, data = TripletModule(300, 4, margin=0.3), small_data(seed=seed, samples=40)
    batch = data.train.tensors
    mined = set(zip(*(each.tolist() for each in module.mine(*batch)), strict=True))
    assert mined == by_hand(module, batch)


def test_only_words_of_triplets_that_have_a_loss_have_a_gradient() -> None:
    torch.manual_seed(0)
    module, data = TripletModule(300, 4, margin=0.3), small_data(samples=60)
    batch = data.train.tensors
    loss = module.training_step(batch, 0)
    loss.backward()
    gradient = module.table.weight.grad
    assert gradient is not None and gradient.is_sparse
    touched = set(gradient._indices()[0].tolist())
    assert touched == {word for triplet in by_hand(module, batch) for word in triplet}
    assert len(touched) < 300
    torch.testing.assert_close(
        loss, triplet_loss(module, module.mine(*batch), 0.3) / 60, rtol=1e-5, atol=1e-6
    )


def test_without_a_loss_no_row_is_touched() -> None:
    module = TripletModule(4, 2, margin=0.1)
    with torch.no_grad():
        module.table.weight.copy_(torch.tensor([[1.0, 0], [1, 0], [-1, 0], [-1, 0]]))
    one, other = torch.tensor([0, 2]), torch.tensor([1, 3])
    loss = module.training_step((one, other, torch.tensor([0, 1])), 0)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert module.table.weight.grad is not None and module.table.weight.grad._nnz() == 0


def test_the_words_are_long_tailed_and_pairs_are_of_one_class() -> None:
    data = small_data(samples=20_000)
    anchors, positives, classes = data.train.tensors
    assert torch.equal(data.classes[anchors], classes)
    assert torch.equal(data.classes[positives], classes)
    assert bool((anchors != positives).all())
    counts = torch.bincount(anchors, minlength=300)
    assert int(counts[:100].sum()) > 4 * int(counts[200:].sum())
    words, _, bands = data.val_dataloader().dataset.tensors
    assert bands[words == 0].tolist() == [0] and bands[words == 299].tolist() == [2]


def trained(strategy: str, workers: int, data: TripletData | None = None) -> dict[str, float]:
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=workers,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = data or small_data(batch_size=100)
        module = TripletModule(data.vocabulary, 8, optimizer=partial(SparseMomentum, lr=3.0))
        trainer.fit(module, datamodule=data)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("strategy", ["hogwild", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_rare_words_are_learnt_by_two_workers(strategy: str) -> None:
    found = trained(strategy, 2)
    assert found["val/rare"] > 0.5, "0.2 by chance"


def test_a_table_larger_than_memory_is_refused_in_one_line() -> None:
    with pytest.raises(
        UserError, match=r"^model.vocabulary=10000000000 .* give fewer words[^\n]*$"
    ):
        TripletModule(10**10, 128)


@pytest.mark.parametrize("bad", [300, -1])
def test_an_id_beyond_the_table_is_named(bad: int) -> None:
    module = TripletModule(300, 4)
    ids = torch.tensor([1, bad])
    with pytest.raises(UserError, match=rf"id {bad} is not in the table, whose 300 rows"):
        module.training_step((ids, ids, torch.tensor([0, 1])), 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"classes": 1}, "data.classes=1"),
        ({"vocabulary": 7}, "at least 2 words for each"),
        ({"samples": 0}, "data.samples=0"),
        ({"batch_size": 0}, "data.batch_size=0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(options: dict[str, int], text: str) -> None:
    with pytest.raises(UserError, match=text):
        small_data(**options)
    with pytest.raises(UserError, match=r"model.dim=0"):
        TripletModule(10, 0)


def test_each_class_has_a_centre_and_each_band_its_share_on_all_workers() -> None:
    data = small_data(vocabulary=12, classes=4, samples=60)
    found = trained("hybrid", 3, data)
    assert {"val/common", "val/middle", "val/rare"} <= found.keys()
    few = trained("hybrid", 3, small_data(vocabulary=4, classes=2, samples=60))
    assert few.keys() & {"val/common", "val/middle", "val/rare"}
