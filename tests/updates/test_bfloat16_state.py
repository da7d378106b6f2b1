"""Optimizer state that is kept as bfloat16, and rounded stochastically."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from hybridtrain.engine.memory import Layout, Store
from hybridtrain.engine.memory.layout import as_parameter
from hybridtrain.engine.protocol.messages import Clip
from hybridtrain.engine.updates import build_update
from hybridtrain.engine.updates.base import Contribution, StepInput
from hybridtrain.engine.updates.factory import check_state_dtype
from hybridtrain.engine.updates.flat import flat_update
from hybridtrain.engine.updates.flat.chunks import Chunk
from hybridtrain.engine.updates.flat.flat_update import FlatUpdate
from hybridtrain.engine.updates.flat.rounding import Round, fastest_rounding, round_by_numpy
from hybridtrain.engine.updates.flat.state_storage import BFloat16State
from hybridtrain.engine.updates.groups import plain
from hybridtrain.engine.updates.kernels import kernel_for
from hybridtrain.engine.updates.kernels.kernel import FusedAdam, FusedSgd, Kernel
from hybridtrain.engine.updates.optimizer_set import regroup
from hybridtrain.engine.updates.thread_pool import Pool
from hybridtrain.errors import UserError
from tests.support.rows import Pair, make_pair
from tests.updates.test_kernels import KINDS, RAGGED, WHOLE, grouped, holed

BF16 = torch.bfloat16


def rounded(value: torch.Tensor, update: int, start: int = 0, size: int = 0) -> torch.Tensor:
    """What a kernel's new state, (n,), is kept as; it lies at ``start`` of a buffer of ``size``."""
    kept = torch.zeros(len(value), dtype=BF16)
    chunk = Chunk(0, start, len(value), torch.empty(0), (kept,), (), None)
    scratch = [torch.empty(len(value)) for _ in range(2)]
    storage = BFloat16State(size or len(value))
    storage.begin(update, len(value))
    storage.step(lambda p, g, state, s: state[0].copy_(value), chunk, torch.empty(0), scratch)
    return kept


# ---- the rounding -------------------------------------------------------------------------------


def test_a_value_is_rounded_to_its_neighbours_and_is_right_on_average() -> None:
    values = torch.tensor([1.001, -3.1415927, 1e-12, 4096.7]).repeat_interleave(16)
    found = torch.stack([rounded(values, update).double() for update in range(2000)])
    ulp = 2.0 ** (values.abs().log2().floor() - 7)
    assert ((found - values).abs() < ulp).all(), "one of the two neighbours"
    assert all(len(column.unique()) == 2 for column in found.T), "now this one, now that one"
    error = (found.mean(0) - values).abs() / ulp
    assert error.max() < 0.05  # 4.5 standard deviations of the mean of 2,000


@pytest.mark.parametrize("make", [fastest_rounding, lambda: round_by_numpy], ids=["fast", "numpy"])
def test_rounding_with_and_without_numba_has_the_same_bits(make: Callable[[], Round]) -> None:
    generator = np.random.default_rng(0)
    bits, one, other = (generator.integers(0, 2**n, 999, dtype=np.uint32) for n in (32, 16, 16))
    expected = [(int(b) + (int(x) ^ int(y))) % 2**32 >> 16 for b, x, y in zip(bits, one, other)]  # noqa: B905
    found = np.zeros(999, dtype=np.uint16)
    make()(bits, one, other, np.zeros_like(bits), found)
    assert found.tolist() == expected


def test_without_numba_numpy_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    fastest_rounding.cache_clear()
    assert fastest_rounding() is round_by_numpy
    fastest_rounding.cache_clear()


def test_what_needs_no_rounding_stays_as_it_is() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -1.5, 3e38, torch.inf, -torch.inf]).bfloat16().float()
    for update in range(50):
        assert torch.equal(rounded(exact, update).float(), exact)
        assert rounded(torch.full((16,), torch.nan), update).isnan().all()


def test_the_numbers_of_an_update_are_the_same_again_and_those_of_another_differ() -> None:
    value = torch.full((4096,), 1.001)
    first = rounded(value, 7)
    assert torch.equal(first, rounded(value, 7))
    for other in (6, 8, 7 + 2**32):
        share = (first == rounded(value, other)).float().mean()
        assert 0.6 < share < 0.9, "as often as two independent draws: 0.256² + 0.744² is 0.62"


def test_numbers_of_neighbours_and_of_distant_elements_are_uncorrelated() -> None:
    size, updates = 2**14, 100
    half_way = torch.full((size,), 1 + 2**-8)
    signs = torch.stack([(rounded(half_way, n).float() - half_way).sign() for n in range(updates)])
    assert signs.mean().abs() < 6 / (updates * size) ** 0.5
    for lag in (1, 2, 255, 256, 257, 510, 511, 512, 4096, 8192):
        likeness = (signs[:, lag:] * signs[:, :-lag]).mean()
        assert likeness.abs() < 6 / (updates * 255) ** 0.5, f"elements {lag} apart"
    assert (signs[1:] * signs[:-1]).mean().abs() < 6 / (updates * size) ** 0.5, (
        "from update to next"
    )


def test_a_part_of_the_buffer_is_rounded_as_it_is_within_the_whole() -> None:
    value = torch.full((2**12,), 1.001)
    whole = rounded(value, 5)
    for start, stop in ((0, 16), (16, 4096), (1040, 3000)):
        part = rounded(value[start:stop], 5, start, size=2**12)
        assert torch.equal(part, whole[start:stop])


# ---- the update ---------------------------------------------------------------------------------

NARROW = [name for name in KINDS if name not in ("SGD", "SGD decay maximize", "ASGD")]
EVERY = pytest.mark.parametrize("name", NARROW)


def pair_of(name: str, shapes: Any = WHOLE, lanes: int = 1) -> Pair:
    make = partial(grouped, kind=KINDS[name])
    pair = make_pair(make, shapes, (0.25, 0.75), lanes=lanes, state_dtype=BF16)
    assert isinstance(pair.update, FlatUpdate)
    assert {flat.dtype for flat in pair.update.flats.values()} == {BF16}
    return pair


def state_of(pair: Pair) -> list[torch.Tensor]:
    """All state tensors as a checkpoint has them."""
    states = pair.update.state().parameters
    return [v for state in states.values() for v in state.values() if v.ndim]


def stepped(pair: Pair, steps: int, generator: torch.Generator) -> None:
    for step in range(steps):
        pair.step(holed(pair, generator, step), Clip("value", 1.5) if step % 2 else None)


@EVERY
@pytest.mark.parametrize("shapes", [WHOLE, RAGGED], ids=["whole", "ragged"])
def test_a_step_is_torchs_with_rounded_state(name: str, shapes: Any) -> None:
    """The first steps differ from torch's by no more than the rounding of the state."""
    pair, generator = pair_of(name, shapes), torch.Generator().manual_seed(0)
    before = pair.masters()
    for _ in range(3):
        pair.step(pair.gradients(generator))
    for old, mine, theirs in zip(before, pair.masters(), pair.alone, strict=True):
        moved = (theirs.detach() - old).abs().max()
        assert (mine - theirs.detach()).abs().max() <= 0.1 * moved + 1e-6
    kept = state_of(pair)
    assert kept
    for each in kept:
        assert each.dtype == torch.float32
        assert torch.equal(each, each.bfloat16().float())


@EVERY
def test_neither_chunks_nor_threads_change_a_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pair_of(name)
    stepped(whole, 5, torch.Generator().manual_seed(0))
    for kind in (Kernel, FusedAdam, FusedSgd):
        monkeypatch.setattr(kind, "chunk", 32)
    monkeypatch.setattr(flat_update, "_ALONE", 0)
    cut = pair_of(name, lanes=2)
    stepped(cut, 5, torch.Generator().manual_seed(0))
    for one, other in zip(whole.masters(), cut.masters(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(state_of(whole), state_of(cut), strict=True):
        assert torch.equal(one, other)


@EVERY
def test_a_resumed_run_goes_on_to_the_same_bits(name: str) -> None:
    found = []
    for breaks in (False, True):
        pair, generator = pair_of(name), torch.Generator().manual_seed(0)
        stepped(pair, 4, generator)
        if breaks:
            slots = pair.store.layout.slots
            masters = [as_parameter(pair.store.master(slot)) for slot in slots]
            resumed = grouped([masters[:3], masters[3:]], KINDS[name])
            saved = {"state": pair.update.state().parameters}
            resumed.load_state_dict(pair.optimizer.state_dict() | saved)
            numbers = range(len(masters))
            pair.update = build_update(resumed, numbers, pair.store, Pool(1), state_dtype=BF16)
        stepped(pair, 4, generator)
        found.append(pair.masters() + state_of(pair))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@EVERY
def test_parameters_that_change_groups_keep_rounded_state(name: str) -> None:
    pair, generator = pair_of(name), torch.Generator().manual_seed(0)
    stepped(pair, 3, generator)
    before = state_of(pair)
    groups = plain(pair.optimizer)
    pair.update = regroup(pair.update, groups, ((0, 1), (3, 4, 2)), {}, pair.store, Pool(1))
    assert pair.update.state_dtype == BF16
    for old in before:
        assert any(torch.equal(old, new) for new in state_of(pair))


def test_a_slow_mean_follows_although_each_change_is_smaller_than_the_last_digit() -> None:
    """With rounding to nearest, a mean of squares with β₂ = 0.999 stays at about half of this."""
    make = partial(grouped, kind=partial(torch.optim.Adam, lr=0.0, betas=(0.9, 0.999)))
    pair = make_pair(make, [[(64, 64)]], (1.0,), state_dtype=BF16)
    one = [[torch.ones(64, 64)]]
    for _ in range(6000):
        pair.step(one)
    (state,) = pair.update.state().parameters.values()
    assert state["exp_avg_sq"].mean().item() == pytest.approx(1 - 0.999**6000, abs=0.01)


def test_an_update_that_is_undone_leaves_rounded_state_as_it_was() -> None:
    class Arrived:
        def wait(self, elements: int) -> None: ...

    pair, generator = pair_of("AdamW"), torch.Generator().manual_seed(0)
    stepped(pair, 2, generator)
    before = pair.masters() + state_of(pair)
    for row in pair.store.gradients:
        row[torch.float32].normal_(generator=generator)
    given = StepInput([Contribution(0, 0.25), Contribution(1, 0.75)], arrivals=Arrived(), version=2)
    after = []
    with torch.no_grad():
        for _ in range(2):
            pair.update.step(given)
            after.append(pair.masters() + state_of(pair))
            pair.update.undo()
            assert all(
                torch.equal(one, other)
                for one, other in zip(before, pair.masters() + state_of(pair), strict=True)
            )
    assert all(torch.equal(one, other) for one, other in zip(*after, strict=True))


def test_state_takes_half_the_memory() -> None:
    sizes = {}
    for dtype in (torch.float32, BF16):
        make = partial(grouped, kind=KINDS["Adam amsgrad"])
        update = make_pair(make, WHOLE, state_dtype=dtype).update
        assert isinstance(update, FlatUpdate)
        sizes[dtype] = sum(flat.nbytes for flat in update.flats.values())
    assert sizes[torch.float32] == 2 * sizes[BF16] > 0


# ---- what is refused ----------------------------------------------------------------------------


class Own(torch.optim.Adam):
    """A user's class."""


@pytest.mark.parametrize(
    ("make", "sparse", "said"),
    [
        (partial(torch.optim.SGD, lr=0.1), False, "optimizer SGD, but it keeps no state"),
        (partial(torch.optim.ASGD, lr=0.1), False, "optimizer ASGD, but its state is a mean"),
        (Own, False, "optimizer Own, but only those of torch.optim"),
        (partial(torch.optim.Adam, foreach=True), False, "optimizer Adam, but only those"),
        (torch.optim.LBFGS, False, "optimizer LBFGS, but only those"),
        (torch.optim.Adagrad, True, "optimizer Adagrad, but gradients are sparse"),
    ],
    ids=["no state", "mean of parameters", "subclass", "foreach", "closure", "sparse"],
)
def test_an_optimizer_whose_state_cannot_be_rounded_is_refused_by_name(
    make: Callable[..., torch.optim.Optimizer], sparse: bool, said: str
) -> None:
    with pytest.raises(UserError, match=f"state_dtype=bf16 was given with {said}.*leave state_dt"):
        check_state_dtype(make([torch.nn.Parameter(torch.zeros(3))]), sparse)


def test_every_kernel_says_whether_its_state_may_be_rounded() -> None:
    for name, make in KINDS.items():
        kernel = kernel_for(make([torch.nn.Parameter(torch.zeros(3))]))
        assert kernel is not None
        assert kernel.may_be_rounded == (name != "ASGD"), name


def test_float64_parameters_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(UserError, match="on float32 parameters"):
        check_state_dtype(torch.optim.Adam([parameter]))


def test_a_store_of_other_dtypes_beside_float32_rounds_only_float32() -> None:
    parameters = [torch.zeros(32), torch.zeros(5, dtype=torch.float64)]
    layout = Layout.of((f"p{n}", p) for n, p in enumerate(parameters))
    store = Store(layout, 1, private_parameters=False)
    master = as_parameter(store.master(layout.slots[0]))
    update = build_update(torch.optim.Adam([master]), [0], store, Pool(1), state_dtype=BF16)
    store.gradients[0][torch.float32].fill_(0.3)
    with torch.no_grad():
        update.step(StepInput([Contribution(0, 1.0)]))
    assert update.state().parameters[0]["exp_avg"].max() > 0
