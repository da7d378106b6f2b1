"""Sparse momentum, lazy and deferred, and Adam with step counts of rows, against torch's own."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain.engine.memory import Layout, Store, pack
from hybridtrain.engine.protocol.messages import Push, Row
from hybridtrain.engine.updates import Optimizers, build_update
from hybridtrain.engine.updates.sparse.row_optimizers import RowAdam, SparseMomentum
from hybridtrain.engine.updates.thread_pool import Pool
from hybridtrain.errors import UserError
from tests.lightning.toys import make_trainer

N, DIM = 50, 3


def gradient(step: int, n: int = 4, below: int = N) -> torch.Tensor:
    """Of a few rows, some of them twice; small numbers more often."""
    generator = torch.Generator().manual_seed(step)
    where = (torch.rand(1, n, generator=generator) ** 2 * below).long()
    values = torch.randn(n, DIM, generator=generator, dtype=torch.float64)
    return torch.sparse_coo_tensor(where, values, (N, DIM), check_invariants=True)


def table() -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(99)
    return torch.nn.Parameter(torch.randn(N, DIM, generator=generator, dtype=torch.float64))


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max().detach())


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.98])
@pytest.mark.parametrize("scheduled", [False, True])
def test_deferred_momentum_is_dense_momentum_once_it_has_caught_up(
    momentum: float, scheduled: bool
) -> None:
    ours, theirs = table(), table()
    sparse = SparseMomentum([ours], lr=0.1, momentum=momentum)
    dense = torch.optim.SGD([theirs], lr=0.1, momentum=momentum)
    for step in range(240):
        if scheduled:
            for group in (sparse.param_groups[0], dense.param_groups[0]):
                group["lr"] = 0.1 * (1 + step % 7) / (1 + step / 100)
                group["momentum"] = momentum * (0.9 if step % 50 < 10 else 1.0)
        brought = gradient(step) if step % 120 < 60 else gradient(step, 1, 2)
        ours.grad, theirs.grad = brought, brought.to_dense()
        sparse.step()
        dense.step()
        if step in (3, 170):
            sparse.catch_up()
            assert distance(ours, theirs) < 1e-12
            sparse.catch_up()
    sparse.catch_up()
    assert distance(ours, theirs) < 1e-12
    if momentum:
        kept = sparse.state[ours]["momentum_buffer"], dense.state[theirs]["momentum_buffer"]
        assert distance(*kept) < 1e-12


MAKES: dict[str, Any] = {
    "lazy": partial(SparseMomentum, lr=0.1, idle="lazy"),
    "deferred": partial(SparseMomentum, lr=0.1),
    "adam": partial(RowAdam, lr=0.1),
}


@pytest.mark.parametrize("name", MAKES)
def test_a_step_moves_the_touched_rows_and_no_others(name: str) -> None:
    parameter = table()
    optimizer = MAKES[name]([parameter])
    for step in range(60):
        before = parameter.detach().clone()
        kept = {k: v.clone() for k, v in optimizer.state[parameter].items() if k != "step"}
        parameter.grad = gradient(step)
        optimizer.step()
        touched = parameter.grad._indices()[0].unique().tolist()
        assert (parameter != before).any(dim=1).nonzero().flatten().tolist() == touched
        for key, value in kept.items():
            changed = (optimizer.state[parameter][key] != value).view(N, -1).any(dim=1)
            assert set(changed.nonzero().flatten().tolist()) <= set(touched), key


def test_lazy_momentum_is_that_of_a_row_whose_every_step_has_a_gradient() -> None:
    """Each row by itself, on the gradients that it has had, as MXNet's lazy update."""
    parameter, rows = table(), [torch.nn.Parameter(row.detach().clone()) for row in table()]
    lazy = SparseMomentum([parameter], lr=0.1, momentum=0.8, idle="lazy")
    alone = [torch.optim.SGD([row], lr=0.1, momentum=0.8) for row in rows]
    for step in range(100):
        parameter.grad = gradient(step)
        lazy.step()
        coalesced = parameter.grad.coalesce()
        for number, value in zip(coalesced.indices()[0].tolist(), coalesced.values(), strict=True):
            rows[number].grad = value.clone()
            alone[number].step()
    assert distance(parameter, torch.stack(list(rows))) < 1e-14


def test_a_row_under_adam_moves_as_if_it_were_alone() -> None:
    parameter, rows = table(), [torch.nn.Parameter(row.detach().clone()) for row in table()]
    ours = RowAdam([parameter], lr=0.1, eps=1e-2)
    alone = [torch.optim.Adam([row], lr=0.1, eps=1e-2) for row in rows]
    for step in range(100):
        parameter.grad = gradient(step)
        ours.step()
        coalesced = parameter.grad.coalesce()
        for number, value in zip(coalesced.indices()[0].tolist(), coalesced.values(), strict=True):
            rows[number].grad = value.clone()
            alone[number].step()
    assert distance(parameter, torch.stack(list(rows))) < 1e-13


def test_a_row_that_comes_late_moves_by_the_learning_rate_where_sparse_adam_overshoots() -> None:
    """By lr · (1 − β1) / √(1 − β2) · √(1 − β2^t) / (1 − β1^t)."""
    moved = []
    for kind in (RowAdam, torch.optim.SparseAdam):
        parameter = torch.nn.Parameter(torch.zeros(2, 1, dtype=torch.float64))
        optimizer = kind([parameter], lr=1.0)
        for step in range(301):
            row = 1 if step == 300 else 0
            parameter.grad = torch.sparse_coo_tensor(
                [[row]], torch.ones(1, 1, dtype=torch.float64), (2, 1), check_invariants=True
            )
            optimizer.step()
        moved.append(-float(parameter.detach()[1]))
    assert moved == pytest.approx([1.0, 1.61256], rel=1e-4)


@pytest.mark.parametrize("name", MAKES)
def test_a_dense_gradient_touches_every_row_and_a_saved_state_goes_on(name: str) -> None:
    whole, parts = table(), table()
    one, other = MAKES[name]([whole]), MAKES[name]([parts])
    for step in range(40):
        brought = gradient(step)
        whole.grad = brought.to_dense() if step % 10 == 9 else brought
        parts.grad = whole.grad
        one.step()
        other.step()
        if step == 20:
            saved = other.state_dict()
            other = MAKES[name]([parts])
            other.load_state_dict(saved)
    assert distance(whole, parts) < 1e-14


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (partial(SparseMomentum, lr=-1.0), "lr=-1.0 was given"),
        (partial(SparseMomentum, momentum=1.0), "momentum=1.0 was given; .* from 0"),
        (partial(SparseMomentum, idle="never"), "idle='never' was given; .* lazy or deferred"),
        (partial(RowAdam, betas=(0.9, 2.0)), "betas=.*2.0\\) was given"),
        (partial(RowAdam, eps=-1.0), "eps=-1.0 was given"),
    ],
)
def test_options_out_of_range_are_refused(make: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        make([table()])


def test_a_parameter_without_rows_is_refused() -> None:
    scalar = torch.nn.Parameter(torch.zeros(()))
    scalar.grad = torch.ones(())
    with pytest.raises(UserError, match=r"shape \(\) .* steps rows; give it embeddings"):
        RowAdam([scalar]).step()


# ---- where a strategy steps them ----------------------------------------------------------------


class Linear(pl.LightningModule):
    """Its gradient does not depend on its parameters: whoever steps, and whenever, sees the same.

    Args:
        make: the optimizer.
        seen: where each validation writes down the table, if it is to.
    """

    def __init__(self, make: Any, seen: Path) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(48, 2, sparse=True)
        self.make, self.seen = make, seen

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.table(batch[0]).sum()

    def on_validation_epoch_end(self) -> None:
        if self.global_rank == 0:
            path = self.seen.with_suffix(f".{self.current_epoch}")
            torch.save(self.table.weight.detach().clone(), path)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["hybrid", "async", "hogwild", "local_sgd"])
def test_a_validation_and_the_end_see_momentum_that_was_put_off(
    strategy: str, tmp_path: Path
) -> None:
    """One worker: the order of the steps is the same; then every row is as under dense momentum."""
    found = []
    for n, make in enumerate(
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(SparseMomentum, lr=0.1))
    ):
        pl.seed_everything(7, verbose=False)
        module = Linear(make, tmp_path / f"seen{n}")
        trainer = make_trainer(strategy if n else "auto", 1, max_epochs=2)
        data = TensorDataset(torch.arange(48))
        train, val = DataLoader(data, batch_size=4), DataLoader(data, batch_size=48)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, train, val)
        tables = [torch.load(tmp_path / f"seen{n}.{epoch}") for epoch in (0, 1)]
        found.append([*tables, module.table.weight.detach()])
    for theirs, ours in zip(*found, strict=True):
        assert distance(ours, theirs) < 1e-5


def test_workers_with_copies_are_brought_the_touched_rows_alone() -> None:
    values = torch.randn(N, DIM)
    store = Store(Layout.of([("p", values)]), 1, True)
    slot = store.layout.slots[0]
    store.master(slot).copy_(values)
    store.refresh(0)
    parameter = torch.nn.Parameter(store.master(slot))
    optimizers = Optimizers(
        [build_update(RowAdam([parameter]), [0], store, Pool(1))], store, Pool(1)
    )
    for step in range(3):
        packed = (pack(0, gradient(step).float(), store.gradient(0, slot)),)
        optimizers.step({0: Push(0, 1.0, Row(packed=packed))})
        moved = optimizers.updates[0].moved[0].tolist()
        assert moved == gradient(step)._indices()[0].unique().tolist()
        store.refresh(0)
        assert torch.equal(store.parameter(0, slot), store.master(slot))
