"""The flat pass, shown with Adam: the same bits as torch's on the mean gradient."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch

from hybridtrain.engine.memory import Layout, Store
from hybridtrain.engine.memory.counters import ChunkProgress
from hybridtrain.engine.protocol.messages import Clip
from hybridtrain.engine.updates import build_update
from hybridtrain.engine.updates.base import Contribution, StepInput
from hybridtrain.engine.updates.flat import flat_update
from hybridtrain.engine.updates.flat.chunks import cut
from hybridtrain.engine.updates.flat.flat_update import FlatUpdate
from hybridtrain.engine.updates.kernels.kernel import FusedAdam
from hybridtrain.engine.updates.per_tensor import PerTensorUpdate
from hybridtrain.engine.updates.thread_pool import Pool
from tests.support.rows import Gradients, Pair, make_pair

Groups = list[list[torch.nn.Parameter]]

# Torch rounds differently in the last numel % 16 elements (vector and scalar loops of its kernels).
WHOLE = [[(4, 8), (32,), (40, 32), (2, 4, 4)], [(64,), (2, 4, 8)]]
RAGGED = [[(5, 7), (3,), (40, 30), ()], [(17,), (2, 3, 4)]]
THIRDS = (2 / 7, 1 / 7, 4 / 7)  # sample-weighted: 2, 1 and 4 samples


def adam(groups: Groups, kind: Any = torch.optim.Adam, **options: Any) -> torch.optim.Optimizer:
    """Two groups with different hyper-parameters; ``fused`` is the engine to be equal to."""
    rates = [{"params": group, "lr": 0.1 / (n + 1)} for n, group in enumerate(groups)]
    return kind(rates, betas=(0.8, 0.95), fused=True, **options)


def pair_of(
    kind: Any = torch.optim.Adam,
    shares: tuple[float, ...] = (0.5, 0.5),
    lanes: int = 1,
    shapes: list[list[tuple[int, ...]]] = WHOLE,
    **options: Any,
) -> Pair:
    pair = make_pair(partial(adam, kind=kind, **options), shapes, shares, lanes=lanes)
    assert isinstance(pair.update, FlatUpdate)
    return pair


def run(pair: Pair, steps: int = 20, clip: Clip | None = None, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        pair.step(pair.gradients(generator), clip)


@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.5), THIRDS])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"maximize": True, "eps": 1e-3}),
    ],
)
def test_many_steps_equal_fused_adam_to_the_bit(
    kind: Any, options: dict[str, Any], shares: tuple[float, ...]
) -> None:
    pair = pair_of(kind, shares, **options)
    run(pair, steps=30)
    pair.assert_equal()


def test_odd_sizes_equal_fused_adam_to_rounding() -> None:
    pair = pair_of(shares=THIRDS, shapes=RAGGED, weight_decay=0.1)
    run(pair, steps=5)
    pair.assert_equal(rtol=2e-6)


def test_what_a_parameter_becomes_does_not_depend_on_its_neighbours() -> None:
    joined, apart = (pair_of(shares=(0.5, 0.5), shapes=RAGGED) for _ in range(2))
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    for _ in range(3):
        joined.step(joined.gradients(generators[0]))
        apart.step(without(apart.gradients(generators[1]), (0, 1), (1, 1), (0, 4), (1, 4)))
    for number in (0, 2, 3, 5):
        assert torch.equal(joined.masters()[number], apart.masters()[number]), number


@pytest.mark.parametrize("chunk", [32, 64, 1024])
@pytest.mark.parametrize("lanes", [1, 3])
def test_neither_chunks_nor_lanes_change_a_bit(
    monkeypatch: pytest.MonkeyPatch, chunk: int, lanes: int
) -> None:
    monkeypatch.setattr(FusedAdam, "chunk", chunk)
    monkeypatch.setattr(flat_update, "_ALONE", 0)
    pair = pair_of(shares=THIRDS, lanes=lanes)
    run(pair, steps=5)
    pair.assert_equal()
    state = pair.update.state().parameters
    assert {float(entry["step"]) for entry in state.values()} == {5.0}, "once per step, not chunk"


def test_a_new_learning_rate_takes_effect_at_once() -> None:
    pair = pair_of()
    for rate in (0.1, 0.01, 0.5):
        for group in pair.optimizer.param_groups:
            group["lr"] = rate
        options = [
            {k: v for k, v in group.items() if k != "params"}
            for group in pair.optimizer.param_groups
        ]
        pair.update.set_groups(copy.deepcopy(options))
        run(pair, steps=3, seed=int(rate * 100))
    pair.assert_equal()


def without(gradients: Gradients, *holes: tuple[int, int]) -> Gradients:
    for worker, number in holes:
        gradients[worker][number] = None
    return gradients


def test_a_parameter_without_any_gradient_does_not_move_and_its_step_is_not_counted() -> None:
    pair, generator = pair_of(weight_decay=0.1), torch.Generator().manual_seed(1)
    pair.step(pair.gradients(generator))
    before = pair.masters()[1]
    for _ in range(3):
        pair.step(without(pair.gradients(generator), (0, 1), (1, 1)))
    assert torch.equal(pair.masters()[1], before), "no decay, no momentum"
    assert float(pair.update.state().parameters[1]["step"]) == 1.0
    assert float(pair.update.state().parameters[0]["step"]) == 4.0
    pair.assert_equal()
    run(pair, steps=4)  # from now on its step count differs from its neighbours'
    pair.assert_equal()


def test_a_parameter_absent_in_some_workers_counts_as_zero_there() -> None:
    pair, generator = pair_of(shares=THIRDS), torch.Generator().manual_seed(2)
    for holes in ([(0, 0)], [(0, 2), (1, 2)], [(2, 5), (0, 0), (1, 1)], []):
        pair.step(without(pair.gradients(generator), *holes))
        pair.assert_equal()


def test_moments_and_counts_have_the_form_that_torch_would_save() -> None:
    pair = pair_of(amsgrad=True)
    run(pair, steps=4)
    theirs, mine = pair.optimizer.state_dict()["state"], pair.update.state().parameters
    assert mine.keys() == theirs.keys()
    for index, entry in theirs.items():
        assert mine[index].keys() == entry.keys()
        for name, value in entry.items():
            torch.testing.assert_close(mine[index][name], value, rtol=0, atol=0)
            assert mine[index][name].dtype == value.dtype
            assert mine[index][name].untyped_storage().nbytes() == value.numel() * 4


def test_parameters_that_never_moved_have_no_state() -> None:
    pair, generator = pair_of(), torch.Generator()
    pair.step(without(pair.gradients(generator), (0, 3), (1, 3)))
    assert 3 not in pair.update.state().parameters
    assert pair.update.state().parameters.keys() == pair.optimizer.state_dict()["state"].keys()


def test_a_resumed_run_goes_on_to_the_bit() -> None:
    pair = pair_of(amsgrad=True)
    generator = torch.Generator().manual_seed(3)
    pair.step(pair.gradients(generator))
    pair.step(without(pair.gradients(generator), (0, 1), (1, 1)))
    store = pair.store
    masters = [torch.nn.Parameter(store.master(slot)) for slot in store.layout.slots]
    resumed = adam([masters[:4], masters[4:]], amsgrad=True)
    resumed.load_state_dict(pair.optimizer.state_dict() | {"state": pair.update.state().parameters})
    pair.update = build_update(resumed, range(len(masters)), store, Pool(1))
    assert isinstance(pair.update, FlatUpdate)
    run(pair, steps=5)
    pair.assert_equal()


def test_state_is_a_copy_that_later_steps_leave_alone() -> None:
    pair = pair_of()
    run(pair, steps=1)
    state = pair.update.state().parameters
    frozen = copy.deepcopy(state)
    run(pair, steps=1)
    assert torch.equal(state[0]["exp_avg"], frozen[0]["exp_avg"])


def test_channels_last_parameters_keep_their_own_order_in_state() -> None:
    weight = torch.nn.Parameter(torch.randn(2, 4, 4, 4).to(memory_format=torch.channels_last))
    store = Store(Layout.of([("w", weight)]), 1, False)
    (slot,) = store.layout.slots
    store.master(slot).copy_(weight.detach())
    mirror = torch.nn.Parameter(store.master(slot))
    update = build_update(torch.optim.Adam([mirror], lr=0.1), [0], store, Pool(1))
    gradient = torch.randn(2, 4, 4, 4).to(memory_format=torch.channels_last)
    pair = Pair(store, update, [weight], torch.optim.Adam([weight], lr=0.1, fused=True), [1.0])
    pair.step([[gradient]])
    pair.assert_equal()
    torch.testing.assert_close(
        update.state().parameters[0]["exp_avg"],
        pair.optimizer.state[weight]["exp_avg"],
        rtol=0,
        atol=0,
    )


# ---- what a step costs --------------------------------------------------------------------------


def planned(pair: Pair) -> list[object]:
    """The views that a step works on."""
    assert isinstance(pair.update, FlatUpdate)
    plans = pair.update._plans.values()
    return [chunk.parameter for plan in plans for chunk in plan.chunks]


def test_a_step_makes_no_plan_anew_whoever_contributes() -> None:
    pair, generator = pair_of(shares=THIRDS), torch.Generator().manual_seed(0)
    pair.step(pair.gradients(generator))
    before = planned(pair)
    with torch.no_grad():
        for contributors in ((0,), (2, 1), (1, 2, 0)):
            shares = [Contribution(worker, 1 / len(contributors)) for worker in contributors]
            pair.update.step(StepInput(shares))
    assert len(before) == 2, "neighbours of one group are joined, across parameters"
    assert all(a is b for a, b in zip(before, planned(pair), strict=True))


def test_patterns_of_missing_gradients_that_come_again_are_planned_once() -> None:
    pair, generator = pair_of(), torch.Generator().manual_seed(0)
    for _ in range(2):  # the first time parameter 1 parts from its neighbours
        pair.step(without(pair.gradients(generator), (0, 1), (1, 1)))
        pair.step(pair.gradients(generator))
    before = planned(pair)
    for _ in range(3):
        pair.step(without(pair.gradients(generator), (0, 1), (1, 1)))
        pair.step(pair.gradients(generator))
    assert all(a is b for a, b in zip(before, planned(pair), strict=True))
    pair.assert_equal()


def test_plans_of_ever_new_patterns_are_forgotten() -> None:
    pair, generator = pair_of(), torch.Generator().manual_seed(0)
    for step in range(40):
        holes = [(worker, n) for n in range(6) for worker in range(2) if step >> n & 1]
        pair.step(without(pair.gradients(generator), *holes))
    assert isinstance(pair.update, FlatUpdate)
    assert len(pair.update._plans) <= 16
    pair.assert_equal()


@pytest.mark.parametrize(("size", "pieces"), [(16, 1), (64, 1), (80, 2), (128, 2), (192, 4)])
def test_chunks_are_even_in_number_and_nearly_in_size(size: int, pieces: int) -> None:
    found = cut(32, 32 + size, 64)
    assert len(found) == pieces
    assert [start for start, _ in found[1:]] == [stop for _, stop in found[:-1]]
    assert (found[0][0], found[-1][1]) == (32, 32 + size)
    assert all(0 < stop - start <= 64 and start % 16 == 0 for start, stop in found)


# ---- clipping: on the mean, by whoever owns it --------------------------------------------------


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_by_norm_is_that_of_the_mean_gradient(limit: float) -> None:
    pair = pair_of(shares=THIRDS)
    run(pair, steps=5, clip=Clip("norm", limit))
    pair.assert_equal()


def test_clipping_parameters_of_odd_sizes_by_norm_takes_each_as_torch_does() -> None:
    pair, generator = pair_of(shapes=RAGGED), torch.Generator().manual_seed(0)
    for holes in ([], [(0, 1), (1, 1)], [(0, 0), (1, 4)], []):
        gradients = without(pair.gradients(generator), *holes)
        pair.step(gradients, Clip("norm", 0.3))
        pair.assert_equal(rtol=2e-6)


def test_the_norm_of_a_parameter_larger_than_a_chunk_is_summed_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FusedAdam, "chunk", 64)
    pairs = [pair_of(shapes=RAGGED, lanes=lanes) for lanes in (1, 3)]
    for pair in pairs:
        monkeypatch.setattr(flat_update, "_ALONE", 0)
        run(pair, steps=3, clip=Clip("norm", 0.3))
        pair.assert_equal(rtol=2e-6)
    masters = [pair.masters() for pair in pairs]
    assert all(map(torch.equal, *masters)), "in the same order, in however many threads"


def test_clipping_by_value_equals_torch_to_the_bit() -> None:
    pair = pair_of()
    run(pair, steps=5, clip=Clip("value", 0.3))
    pair.assert_equal()


def test_clipping_spans_chunks_and_leaves_out_what_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FusedAdam, "chunk", 16)
    monkeypatch.setattr(flat_update, "_ALONE", 0)
    pair, generator = pair_of(lanes=2), torch.Generator()
    pair.step(without(pair.gradients(generator), (0, 2), (1, 2)), Clip("norm", 0.1))
    pair.assert_equal(rtol=2e-6)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_no_gradient_at_all_is_no_error(algorithm: str) -> None:
    pair = pair_of()
    before = pair.masters()
    with torch.no_grad():
        nothing = [Contribution(worker, 0.5, frozenset(range(6))) for worker in range(2)]
        pair.update.step(StepInput(nothing, Clip(algorithm, 1.0)))
    assert all(map(torch.equal, pair.masters(), before))


def test_a_frozen_parameter_between_two_groups_stays_what_it_is() -> None:
    tensors = [torch.randn(20), torch.randn(5), torch.randn(30)]
    store = Store(Layout.of((str(n), t) for n, t in enumerate(tensors)), 1, False)
    for slot, tensor in zip(store.layout.slots, tensors, strict=True):
        store.master(slot).copy_(tensor)
        store.gradient(0, slot).fill_(1.0)
    used = [torch.nn.Parameter(store.master(store.layout.slots[n])) for n in (0, 2)]
    update = build_update(torch.optim.Adam(used, lr=0.1), [0, 2], store, Pool(1))
    with torch.no_grad():
        update.step(StepInput([Contribution(0, 1.0)]))
    assert torch.equal(store.master(store.layout.slots[1]), tensors[1])
    assert not torch.equal(store.master(store.layout.slots[2]), tensors[2])
    assert not isinstance(update, PerTensorUpdate)


@pytest.mark.parametrize(("lanes", "elements"), [(1, 16), (2, 16), (8, 64), (16, 64), (64, 16)])
def test_many_threads_get_longer_chunks_as_long_as_there_are_two_for_each(
    lanes: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FusedAdam, "chunk", 16)
    pair = pair_of(lanes=lanes, shapes=[[(2048,)]])
    run(pair, steps=1)
    assert isinstance(pair.update, FlatUpdate)
    (plan,) = pair.update._plans.values()
    assert max(chunk.size for chunk in plan.chunks) == elements
    pair.assert_equal()


# ---- how far it has come -------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("clip", [None, Clip("norm", 0.1), Clip("value", 0.1)])
@pytest.mark.parametrize("lanes", [1, 3])
def test_telling_how_far_it_has_come_changes_no_bit(lanes: int, clip: Clip | None) -> None:
    def make(groups: Groups) -> torch.optim.Optimizer:
        (all_,) = groups
        kernels, biases = all_[::2], all_[1::2]  # groups lie between one another
        return torch.optim.AdamW([{"params": kernels}, {"params": biases, "lr": 0.1}], lr=0.01)

    shapes: list[list[tuple[int, ...]]] = [[(300_000,), (50,), (200_000,), (7,)]]
    told, quiet = (make_pair(make, shapes, (0.5, 0.5), lanes=lanes) for _ in range(2))
    told.store.progress.watch()
    run(told, 3, clip)
    run(quiet, 3, clip)
    assert torch.equal(told.store.masters[torch.float32], quiet.store.masters[torch.float32])
    last = told.store.layout.slots[-1]
    number, elements = told.store.progress.read()
    assert number == 3 and elements >= last.offset + last.numel
    assert quiet.store.progress.read() == (0, 0), "nobody watches"


def test_the_progress_of_chunks_tells_of_what_is_stepped_and_no_more() -> None:
    store = pair_of().store
    chunks, told = ChunkProgress(store.progress, [10, 20, 30]), store.progress
    ends = {1: (1, 0), 0: (1, 20), 2: (1, 30)}
    for chunk, expected in ends.items():
        chunks.ended(chunk)
        assert told.read() == expected
    ChunkProgress(store.progress, [10])
    assert told.read() == (2, 0)
