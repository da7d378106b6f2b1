"""Sparse gradients stay sparse: values packed in the row, indices beside it, one merged tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hybridtrain.engine.memory import Layout, Store, pack, unpack
from hybridtrain.engine.policies import OnArrival
from hybridtrain.engine.protocol.events import Received
from hybridtrain.engine.protocol.messages import Average, Averaged, Clip, Push, Row
from hybridtrain.engine.updates import build_update
from hybridtrain.engine.updates.base import Contribution, StepInput
from hybridtrain.engine.updates.factory import for_sparse
from hybridtrain.engine.updates.groups import takes_sparse
from hybridtrain.engine.updates.mean import merge_mixed
from hybridtrain.engine.updates.thread_pool import Pool
from hybridtrain.engine.worker.finite import FiniteCheck
from hybridtrain.engine.worker.replica import HostReplica
from tests.support.served import Served, released, sgd

OPTIM = torch.optim


def sparse(rows: Sequence[int], values: Sequence[float], n: int = 6, dim: int = 2) -> Any:
    """An (n, dim) gradient as an embedding makes it: rows may occur twice."""
    filled = torch.tensor(values).unsqueeze(1).expand(-1, dim).clone()
    indices = torch.tensor([list(rows)])
    return torch.sparse_coo_tensor(indices, filled, (n, dim), check_invariants=True)


@pytest.mark.parametrize(
    "gradient",
    [
        sparse([4, 1, 4], [1.0, 2.0, 3.0]),
        sparse([], []),
        sparse(range(6), [1.0] * 6),
        torch.eye(5, dtype=torch.float64).to_sparse(),
        torch.eye(4, dtype=torch.complex64).to_sparse(),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_packed_comes_out_the_same(gradient: torch.Tensor, transposed: bool) -> None:
    place = torch.full(gradient.shape, torch.nan, dtype=gradient.dtype)
    if transposed:
        place = place.t().contiguous().t()
    packed = pack(3, gradient.coalesce(), place)
    out = unpack(packed, place)
    assert packed.number == 3 and out.is_coalesced()
    assert torch.equal(out.to_dense(), gradient.to_dense())
    untouched = place.numel() - gradient.coalesce().values().numel()
    assert int(torch.isnan(place).sum()) == untouched, "nothing is filled with zeros"


@pytest.mark.parametrize("rows", [1, 40, 3000])
def test_what_is_packed_as_it_is_has_the_bits_of_what_torch_coalesces(rows: int) -> None:
    """Of few rows some occur many times, of many some twice, and of 3,000 most once."""
    draw = torch.Generator().manual_seed(rows)
    for trial in range(20):
        indices = torch.randint(rows, (1, 60), generator=draw)
        values = torch.randn(60, 3, generator=draw)
        gradient = torch.sparse_coo_tensor(indices, values, (rows, 3), check_invariants=True)
        place = torch.full(gradient.shape, torch.nan)
        out, expected = unpack(pack(0, gradient, place), place), gradient.coalesce()
        assert torch.equal(out.indices(), expected.indices()), trial
        assert torch.equal(out.values(), expected.values()), trial


def test_merging_sparse_gradients_gives_one_coalesced_and_mixed_ones_a_dense() -> None:
    one, other = sparse([4, 1], [1.0, 2.0]).coalesce(), sparse([1, 0], [4.0, 8.0]).coalesce()
    merged = merge_mixed([one, other], [0.25, 0.75], lambda: torch.empty(6, 2))
    assert merged.is_sparse and merged.is_coalesced()
    expected = 0.25 * one.to_dense() + 0.75 * other.to_dense()
    assert torch.equal(merged.to_dense(), expected)
    dense = merge_mixed([one, other.to_dense()], [0.25, 0.75], lambda: torch.empty(6, 2))
    assert not dense.is_sparse and torch.equal(dense, expected)
    assert merge_mixed([one], [1.0], lambda: torch.empty(6, 2)) is one


@pytest.mark.parametrize(
    ("kind", "options", "refusal"),
    [
        (OPTIM.SGD, {}, None),
        (OPTIM.SGD, {"momentum": 0.9}, None),
        (OPTIM.SGD, {"weight_decay": 0.1}, "sparse"),
        (OPTIM.SGD, {"fused": True}, "not support sparse"),
        (OPTIM.Adagrad, {}, None),
        (OPTIM.Adagrad, {"weight_decay": 0.1}, "not compatible with sparse"),
        (OPTIM.SparseAdam, {}, None),
        (OPTIM.Adam, {}, "not support sparse"),
        (OPTIM.RMSprop, {}, "not support sparse"),
    ],
)
def test_who_takes_sparse_gradients_is_what_torch_says(
    kind: Any, options: dict[str, Any], refusal: str | None
) -> None:
    parameter = torch.nn.Parameter(torch.ones(6, 2))
    optimizer = kind([parameter], **options)
    assert takes_sparse(optimizer) == (refusal is None)
    for _ in range(2):
        parameter.grad = sparse([4, 1], [1.0, 2.0])
        if refusal is None:
            optimizer.step()
    if refusal is not None:
        with pytest.raises(RuntimeError, match=refusal):
            optimizer.step()


# ---- a worker -----------------------------------------------------------------------------------


def worker(eager: bool = True, number: int = 1) -> tuple[torch.nn.Embedding, Store, HostReplica]:
    embedding = torch.nn.Embedding(6, 2, sparse=True)
    store = Store(Layout.of(embedding.named_parameters()), 2, False)
    store.master(store.layout.slots[0]).copy_(embedding.weight.detach())
    return embedding, store, HostReplica(list(embedding.parameters()), store, number, eager)


@pytest.mark.parametrize("eager", [False, True])
def test_only_touched_rows_leave_the_worker(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, store, exchange = worker(eager)
    exchange.keep_sparse([0])
    store.gradients[1][torch.float32].fill_(-7.0)
    monkeypatch.setattr(torch.Tensor, "to_dense", lambda *_: pytest.fail("made dense"))
    embedding(torch.tensor([4, 1, 4])).sum().backward()
    assert exchange.collect([0]) == ()
    (packed,) = exchange.packed
    assert store.gradients[1][torch.float32][:12].tolist() == [1.0, 1.0, 2.0, 2.0] + [-7.0] * 8
    place = store.gradient(1, store.layout.slots[0])
    assert unpack(packed, place).indices().tolist() == [[1, 4]]
    embedding.zero_grad()
    assert exchange.collect([0]) == (0,) and exchange.packed == ()


def test_an_optimizer_of_dense_gradients_gets_sparse_ones_made_dense() -> None:
    embedding, store, exchange = worker()
    store.gradients[1][torch.float32].fill_(-7.0)
    embedding(torch.tensor([4, 1, 4])).sum().backward()
    exchange.collect([0])
    assert exchange.packed == ()
    assert embedding.weight.grad is not None
    place = store.gradient(1, store.layout.slots[0])
    assert torch.equal(place, embedding.weight.grad.to_dense())


def test_a_sparse_gradient_made_dense_is_warned_of_once_with_what_to_do() -> None:
    embedding, _, exchange = worker(number=0)
    embedding(torch.tensor([4, 1, 4])).sum().backward()
    with pytest.warns(UserWarning, match=r"shape \(6, 2\).*made dense.*SparseAdam") as said:
        for _ in range(3):
            exchange.collect([0])
    assert len(said) == 1


def test_what_lies_behind_the_values_is_not_looked_at() -> None:
    embedding, store, exchange = worker()
    exchange.keep_sparse([0])
    store.gradients[1][torch.float32].fill_(torch.nan)
    embedding(torch.tensor([4, 1, 4])).sum().backward()
    exchange.collect([0])
    check = FiniteCheck(store, 1)
    assert check.offender((0,), (), exchange.packed) is None
    assert check.offender((0,), ()) == 0
    store.gradients[1][torch.float32][3] = torch.inf
    assert check.offender((0,), (), exchange.packed) == 0


# ---- the server ---------------------------------------------------------------------------------


def row(served: Served, worker: int, gradient: torch.Tensor) -> Any:
    """What a push says of a sparse gradient."""
    place = served.store.gradient(worker, served.layout.slots[0])
    return (pack(0, gradient.coalesce(), place),)


def two() -> Served:
    return Served(2, parameters=[torch.zeros(6, 2)])


def test_sparse_gradients_are_merged_by_samples_and_only_touched_rows_move() -> None:
    served = two()
    first = row(served, 0, sparse([4, 1], [1.0, 2.0]))
    second = row(served, 1, sparse([1], [4.0]))
    assert served.server.on(Received(0, Push(0, 1.0, Row(packed=first)))) == []
    assert served.server.on(Received(1, Push(0, 3.0, Row(packed=second)))) == released(1, 0, 1)
    master = served.store.master(served.layout.slots[0])
    assert master[:, 0].tolist() == [0.0, -3.5, 0.0, 0.0, -0.25, 0.0]


def test_the_mean_of_a_sparse_and_a_dense_gradient_is_dense() -> None:
    served = two()
    packed = row(served, 0, sparse([4], [1.0]))
    served.server.on(Received(0, Push(0, 1.0, Row(packed=packed))))
    served.push(1, 2.0)
    master = served.store.master(served.layout.slots[0])
    assert master[:, 0].tolist() == [-1.0, -1.0, -1.0, -1.0, -1.5, -1.0]


def test_a_worker_without_a_gradient_counts_as_zeros_in_a_sparse_mean() -> None:
    served = two()
    packed = row(served, 0, sparse([4], [1.0]))
    served.server.on(Received(0, Push(0, 1.0, Row(packed=packed))))
    served.server.on(Received(1, Push(0, 1.0, Row((0,)))))
    assert served.store.master(served.layout.slots[0])[:, 0].tolist() == [0, 0, 0, 0, -0.5, 0]


def test_free_running_workers_apply_their_sparse_gradients_one_by_one() -> None:
    served = Served(2, OnArrival(), parameters=[torch.zeros(6, 2)])
    for worker_, touched in ((0, 4), (1, 1)):
        packed = row(served, worker_, sparse([touched], [1.0]))
        served.server.on(Received(worker_, Push(0, 1.0, Row(packed=packed))))
    assert served.store.parameter(1, served.layout.slots[0])[:, 0].tolist() == [0, -1, 0, 0, -1, 0]


@pytest.mark.parametrize("kind", ["sparse", "mixed", "lone"])
def test_the_mean_that_hooks_see_is_sparse_where_all_gradients_are(kind: str) -> None:
    served = two()
    store = Store(served.layout, 2, False, averaging=True)
    served.server._rounds.store = store
    first = row(served, 0, sparse([4, 1], [1.0, 2.0]))
    second = row(served, 1, sparse([1], [4.0])) if kind == "sparse" else ()
    if kind == "mixed":
        store.gradient(1, served.layout.slots[0]).fill_(4.0)
    served.server.on(Received(0, Average(1.0, Row(packed=first))))
    weight = 0.0 if kind == "lone" else 3.0
    replies = served.server.on(Received(1, Average(weight, Row(packed=second))))
    mean = store.mean(served.layout.slots[0])
    for _, reply in replies:
        assert isinstance(reply, Averaged)
        if kind == "mixed":
            assert reply.packed == ()
        else:
            mean = unpack(reply.packed[0], store.mean(served.layout.slots[0])).to_dense()
    expected = {
        "sparse": [0, 3.5, 0, 0, 0.25, 0],
        "mixed": [3, 3.5, 3, 3, 3.25, 3],
        "lone": [0, 2, 0, 0, 1, 0],
    }
    assert mean[:, 0].tolist() == expected[kind]


@pytest.mark.parametrize("clip", [Clip("norm", 1.0), Clip("value", 0.5)])
def test_clipping_counts_rows_without_a_gradient_as_zero(clip: Clip) -> None:
    gradient = sparse([4, 1], [3.0, -4.0])
    results = []
    for given in (gradient.coalesce(), gradient.to_dense()):
        parameter = torch.nn.Parameter(torch.zeros(6, 2))
        store = Store(Layout.of([("p", parameter)]), 1, False)
        master = torch.nn.Parameter(store.master(store.layout.slots[0]))
        update = build_update(sgd([master]), [0], store, Pool(1))
        place = store.gradient(0, store.layout.slots[0])
        packed = {0: pack(0, given, place)} if given.is_sparse else {}
        if not packed:
            place.copy_(given)
        contributions = [Contribution(0, 1.0, packed=packed)]
        with torch.no_grad():
            made = for_sparse(update, contributions, store, Pool(1))
            made.step(StepInput(contributions, clip))
        results.append(master.detach().clone())
    torch.testing.assert_close(results[0], results[1])
    assert results[0].abs().max() > 0.4
