"""Sparse gradients step touched rows alone, and the result is torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridtrain.engine.memory import Layout, Store, pack
from hybridtrain.engine.protocol.messages import Clip
from hybridtrain.engine.updates import build_update
from hybridtrain.engine.updates.base import Contribution, StepInput
from hybridtrain.engine.updates.factory import for_sparse
from hybridtrain.engine.updates.sparse.by_row import ByRow, Merger, Touched
from hybridtrain.engine.updates.thread_pool import Pool

OPTIM = torch.optim
N, DIM = 400, 6
KINDS: dict[str, Any] = {
    "SparseAdam": partial(OPTIM.SparseAdam, lr=0.05),
    "SparseAdam up": partial(OPTIM.SparseAdam, lr=0.05, betas=(0.5, 0.9), eps=1e-3, maximize=True),
    "SparseAdam lr tensor": partial(OPTIM.SparseAdam, lr=torch.tensor(0.05)),
    "SGD": partial(OPTIM.SGD, lr=0.3),
    "SGD up": partial(OPTIM.SGD, lr=0.3, maximize=True),
    "Adagrad": partial(OPTIM.Adagrad, lr=0.3),
    "Adagrad slowing": partial(
        OPTIM.Adagrad, lr=0.3, lr_decay=0.1, initial_accumulator_value=0.2, eps=1e-3, maximize=True
    ),
}
MOMENTUM: dict[str, Any] = {
    "momentum": partial(OPTIM.SGD, lr=0.1, momentum=0.8),
    "nesterov": partial(OPTIM.SGD, lr=0.1, momentum=0.7, nesterov=True),
    "damped": partial(OPTIM.SGD, lr=0.1, momentum=0.8, dampening=0.4, maximize=True),
}


def gradient(
    seed: int, n: int = 60, rows: int = N, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """An embedding's: rows may occur twice, small numbers more often."""
    generator = torch.Generator().manual_seed(seed)
    where = (torch.rand(1, n, generator=generator) ** 2 * rows).long()
    values = torch.randn(n, DIM, generator=generator, dtype=dtype)
    return torch.sparse_coo_tensor(where, values, (rows, DIM), check_invariants=True).coalesce()


def in_order(gradients: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    """The mean, summed in the order of the workers; sparse, with all rows that anybody has."""
    total = torch.zeros(gradients[0].shape, dtype=gradients[0].dtype)
    for each, share in zip(gradients, shares, strict=True):
        total += each.to_dense() * share
    rows = torch.cat([each.indices() for each in gradients], dim=1).unique(dim=1)
    return torch.sparse_coo_tensor(
        rows, total[rows[0]], total.shape, check_invariants=True
    ).coalesce()


class Stepped:
    """A table under our update.

    Args:
        make: the optimizer.
        workers: W.
        threads: of the update.
        values: of the table, and of parameters that come after it.
    """

    def __init__(
        self, make: Any, workers: int = 1, threads: int = 1, values: Sequence[torch.Tensor] = ()
    ) -> None:
        self.values = list(values) or [table()]
        layout = Layout.of((f"p{n}", value) for n, value in enumerate(self.values))
        self.store = Store(layout, workers, False)
        self.masters = [self.store.master(slot) for slot in layout.slots]
        for master, value in zip(self.masters, self.values, strict=True):
            master.copy_(value)
        parameters = [torch.nn.Parameter(master) for master in self.masters]
        self.pool = Pool(threads)
        numbers = list(range(len(parameters)))
        self.update = build_update(make(parameters), numbers, self.store, self.pool)

    def step(
        self,
        gradients: Sequence[torch.Tensor | None],
        shares: Sequence[float] = (1.0,),
        clip: Clip | None = None,
        number: int = 0,
    ) -> None:
        """One step with these workers' gradients of one parameter; the others have none."""
        others = frozenset(range(len(self.values))) - {number}
        contributions = []
        for worker, (given, share) in enumerate(zip(gradients, shares, strict=True)):
            place = self.store.gradient(worker, self.store.layout.slots[number])
            place.fill_(torch.nan)
            absent, packed = others, {}
            if given is None:
                absent |= {number}
            elif given.is_sparse:
                packed = {number: pack(number, given, place)}
            else:
                place.copy_(given)
            contributions.append(Contribution(worker, share, absent, packed))
        with torch.no_grad():
            self.update = for_sparse(self.update, contributions, self.store, self.pool)
            self.update.step(StepInput(contributions, clip))


def table(dtype: torch.dtype = torch.float32, rows: int = N) -> torch.Tensor:
    return torch.randn(rows, DIM, generator=torch.Generator().manual_seed(99), dtype=dtype)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other and type(one) is type(other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_parameters_and_state_have_the_bits_of_torchs_own_optimizer(
    name: str, workers: int, dtype: torch.dtype
) -> None:
    ours = Stepped(KINDS[name], workers, values=[table(dtype)])
    parameter = torch.nn.Parameter(table(dtype))
    theirs = KINDS[name]([parameter])
    shares = [1.0] if workers == 1 else [0.5, 0.2, 0.3]
    for step in range(12):
        brought = [
            gradient(100 * step + w, 0 if step == 5 else 60, N, dtype) for w in range(workers)
        ]
        parameter.grad = in_order(brought, shares)
        theirs.step()
        ours.step(brought, shares)
        assert torch.equal(ours.masters[0], parameter.detach()), step
    kept, expected = ours.update.state().parameters, theirs.state_dict()["state"]
    assert kept.keys() == expected.keys()
    for key, value in expected.get(0, {}).items():
        assert same(kept[0][key], value), key


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [*KINDS, *MOMENTUM])
def test_the_bits_do_not_depend_on_the_number_of_threads(name: str) -> None:
    make, large = (KINDS | MOMENTUM)[name], table(rows=40_000)
    both = [Stepped(make, 2, threads, [large]) for threads in (1, 3)]
    for step in range(3):
        brought = [gradient(step, 30_000, 40_000), gradient(50 + step, 30_000, 40_000)]
        for each in both:
            each.step(brought, [0.5, 0.5])
    assert torch.equal(both[0].masters[0], both[1].masters[0])
    both[1].pool.close()


def test_rows_are_added_up_in_the_order_of_the_workers() -> None:
    parts = [gradient(seed) for seed in range(4)]
    shares = [0.1, 0.2, 0.3, 0.4]
    merger = Merger()
    for _ in range(2):  # in memory that is used again
        touched = [Touched(each.indices()[0].numpy(), each.values()) for each in parts]
        merged = merger.merge(touched, shares)
        expected = in_order(parts, shares)
        assert sorted(merged.rows.tolist()) == expected.indices()[0].tolist()
        assert torch.equal(merged.values[np.argsort(merged.rows)], expected.values())
    lone = Touched(np.arange(3), torch.ones(3, 2))
    assert merger.merge([lone], [1.0]) is lone


# ---- momentum -----------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MOMENTUM)
def test_rows_glide_as_under_dense_momentum_and_only_those_in_motion_are_moved(name: str) -> None:
    """300 steps: most rows come to rest several times, and are touched again."""
    ours = Stepped(MOMENTUM[name])
    parameter = torch.nn.Parameter(table())
    theirs = MOMENTUM[name]([parameter])
    moved = []
    for step in range(300):
        brought = gradient(step, 2, N)
        parameter.grad = brought.to_dense()
        theirs.step()
        ours.step([brought])
        moved.append(len(ours.update.moved[0]))
        torch.testing.assert_close(ours.masters[0], parameter.detach(), rtol=2e-6, atol=2e-6)
    assert max(moved) < N * 0.6, "others are at rest"
    assert ours.update.state().parameters[0].keys() == {"momentum_buffer"}
    kept = ours.update.state().parameters[0]["momentum_buffer"]
    expected = theirs.state_dict()["state"][0]["momentum_buffer"]
    torch.testing.assert_close(kept, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", MOMENTUM)
@pytest.mark.parametrize(
    "rate",
    [lambda n: 0.1 * (n % 3 > 0), lambda n: 0.1 if n % 50 > 30 else 1e-9, lambda n: 0.1 * 0.99**n],
)
def test_rows_glide_as_under_dense_momentum_whatever_the_rate_becomes(
    name: str, rate: Callable[[int], float]
) -> None:
    ours, parameter = Stepped(MOMENTUM[name]), torch.nn.Parameter(table())
    theirs = MOMENTUM[name]([parameter])
    for step in range(100):
        brought = gradient(step, 2 if step < 90 else 0, N)
        parameter.grad = brought.to_dense()
        theirs.param_groups[0]["lr"] = rate(step)
        ours.update.set_groups([{"lr": rate(step)}])
        theirs.step()
        ours.step([brought])
    torch.testing.assert_close(ours.masters[0], parameter.detach(), rtol=2e-6, atol=2e-6)


def test_momentum_goes_on_after_a_dense_gradient_and_from_what_torch_has_saved() -> None:
    make = MOMENTUM["momentum"]
    parameter = torch.nn.Parameter(table())
    theirs = make([parameter])
    for step in range(3):
        parameter.grad = gradient(step)  # torch's momentum is a sparse tensor now
        theirs.step()
    saved = theirs.state_dict()

    def resumed(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = make(parameters)
        optimizer.load_state_dict(saved)
        return optimizer

    ours = Stepped(resumed, values=[parameter.detach().clone()])
    buffer = theirs.state[parameter]
    buffer["momentum_buffer"] = buffer["momentum_buffer"].to_dense()
    for step in range(3, 40):
        brought = gradient(step, 5)
        parameter.grad = brought.to_dense()
        theirs.step()
        ours.step([brought.to_dense() if step % 10 == 0 else brought])
        torch.testing.assert_close(ours.masters[0], parameter.detach(), rtol=2e-6, atol=2e-6)


# ---- dense and sparse ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "momentum"])
def test_other_parameters_may_have_dense_gradients_or_none(name: str) -> None:
    make = (KINDS | MOMENTUM)[name]
    values = [table(), torch.randn(5, 3), torch.randn(7)]
    ours = Stepped(make, values=values)
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    theirs = make(parameters)
    for step, number in enumerate([0, 1, 0, 0, 1]):
        brought = gradient(step) if number == 0 else torch.randn(5, 3)
        for each in parameters:
            each.grad = None
        parameters[number].grad = brought.clone()
        theirs.step()
        ours.step([brought], number=number)
        for mine, other in zip(ours.masters, parameters, strict=True):
            torch.testing.assert_close(mine, other.detach())


@pytest.mark.parametrize("clip", [Clip("norm", 0.5), Clip("value", 0.1)])
def test_the_mean_is_clipped_before_it_is_stepped(clip: Clip) -> None:
    ours = Stepped(KINDS["SGD"], 2)
    brought = [gradient(1), gradient(2)]
    expected = (brought[0] * 0.5 + brought[1] * 0.5).to_dense()
    parameter = torch.nn.Parameter(table())
    parameter.grad = expected
    if clip.algorithm == "norm":
        torch.nn.utils.clip_grad_norm_([parameter], clip.limit)
    else:
        torch.nn.utils.clip_grad_value_([parameter], clip.limit)
    torch.optim.SGD([parameter], lr=0.3).step()
    ours.step(brought, [0.5, 0.5], clip)
    torch.testing.assert_close(ours.masters[0], parameter.detach())


def test_who_brings_none_counts_as_zeros_and_nobodys_rows_are_no_step() -> None:
    ours = Stepped(KINDS["SparseAdam"], 2)
    ours.step([None, None], [0.5, 0.5])
    assert torch.equal(ours.masters[0], table()) and ours.update.state().parameters == {}
    brought = gradient(1)
    ours.step([brought, None], [0.5, 0.5])
    touched = brought.indices()[0]
    assert (ours.masters[0] != table()).any(dim=1).nonzero()[:, 0].tolist() == touched.tolist()
    assert sorted(ours.update.moved[0].tolist()) == touched.tolist()


def test_dense_gradients_are_refused_in_torchs_words_where_torch_refuses_them() -> None:
    ours = Stepped(KINDS["SparseAdam"])
    with pytest.raises(RuntimeError, match="please consider Adam instead"):
        ours.step([torch.ones(N, DIM)])
    decaying = Stepped(partial(OPTIM.SGD, lr=0.1, weight_decay=0.1))
    with pytest.raises(RuntimeError):
        decaying.step([gradient(1)])


class NothingLarge(TorchDispatchMode):
    """No operation makes a tensor as large as the table, or works on all of it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        viewing = name in ("detach", "view", "slice", "as_strided", "select", "alias")
        if isinstance(out, torch.Tensor) and out.numel() >= N * DIM and not viewing:
            raise AssertionError(f"{name} of {tuple(out.shape)}")
        return out


@pytest.mark.parametrize("name", [*KINDS, *MOMENTUM])
def test_no_step_after_the_first_looks_at_the_whole_table(name: str) -> None:
    ours = Stepped((KINDS | MOMENTUM)[name], 2)
    ours.step([gradient(1, 9), gradient(2, 9)], [0.5, 0.5])
    place = ours.store.gradient(0, ours.store.layout.slots[0])
    packed = [
        {0: pack(0, gradient(w, 9), ours.store.gradient(w, ours.store.layout.slots[0]))}
        for w in (0, 1)
    ]
    assert place.numel() == N * DIM
    both = [Contribution(w, 0.5, frozenset(), packed[w]) for w in (0, 1)]
    with torch.no_grad(), NothingLarge():
        ours.update.step(StepInput(both, Clip("norm", 1.0)))


def test_torchs_subclasses_keep_their_own_step() -> None:
    class Mine(OPTIM.SparseAdam):
        pass

    assert not isinstance(Stepped(partial(Mine, lr=0.1)).update, ByRow)
    assert isinstance(Stepped(KINDS["SparseAdam"]).update, ByRow)
