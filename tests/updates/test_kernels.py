"""Every elementwise optimizer of torch runs on flat memory, with the bits that torch gives it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from hybridtrain.engine.protocol.messages import Clip
from hybridtrain.engine.updates import build_update
from hybridtrain.engine.updates.flat import flat_update
from hybridtrain.engine.updates.flat.flat_update import FlatUpdate
from hybridtrain.engine.updates.groups import plain
from hybridtrain.engine.updates.kernels import kernel_for
from hybridtrain.engine.updates.kernels.choice import PublicClass
from hybridtrain.engine.updates.kernels.kernel import FusedAdam, FusedSgd, Kernel, PlainAdagrad
from hybridtrain.engine.updates.optimizer_set import regroup
from hybridtrain.engine.updates.thread_pool import Pool
from tests.support.rows import Gradients, Pair, make_pair

OPTIM = torch.optim
Groups = list[list[torch.nn.Parameter]]

# Torch may round otherwise in the last numel % 16 elements (vector and scalar loops).
WHOLE = [[(4, 8), (32,), (40, 32)], [(64,), (2, 4, 8)]]
RAGGED = [[(5, 7), (3,), (40, 30)], [(17,), ()]]
THIRDS = (2 / 7, 1 / 7, 4 / 7)  # sample-weighted: 2, 1 and 4 samples

KINDS: dict[str, Callable[..., OPTIM.Optimizer]] = {
    "SGD": partial(OPTIM.SGD, lr=0.1),
    "SGD decay maximize": partial(OPTIM.SGD, lr=0.1, weight_decay=0.1, maximize=True),
    "SGD momentum": partial(OPTIM.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD nesterov": partial(OPTIM.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "SGD dampening": partial(OPTIM.SGD, lr=0.1, momentum=0.5, dampening=0.1, maximize=True),
    "Adam fused": partial(OPTIM.Adam, lr=0.1, fused=True, weight_decay=0.1),
    "Adam": partial(OPTIM.Adam, lr=0.1, fused=False),
    "Adam amsgrad": partial(OPTIM.Adam, lr=0.1, fused=False, amsgrad=True, weight_decay=0.1),
    "AdamW": partial(OPTIM.AdamW, lr=0.1, fused=False, maximize=True),
    "Adagrad": partial(OPTIM.Adagrad, lr=0.1, initial_accumulator_value=0.1, lr_decay=0.01),
    "Adagrad decay": partial(OPTIM.Adagrad, lr=0.1, weight_decay=0.1, maximize=True),
    "Adagrad fused": partial(OPTIM.Adagrad, lr=0.1, lr_decay=0.01, fused=True),
    "RMSprop": partial(OPTIM.RMSprop, lr=0.1),
    "RMSprop momentum": partial(OPTIM.RMSprop, lr=0.1, momentum=0.9, weight_decay=0.1),
    "RMSprop centered": partial(OPTIM.RMSprop, lr=0.1, centered=True, maximize=True),
    "RMSprop both": partial(OPTIM.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "NAdam": partial(OPTIM.NAdam, lr=0.1, weight_decay=0.1),
    "NAdam decoupled": partial(
        OPTIM.NAdam, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True, maximize=True
    ),
    "RAdam": partial(OPTIM.RAdam, lr=0.1, betas=(0.9, 0.99)),
    "RAdam decoupled": partial(
        OPTIM.RAdam, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True, maximize=True
    ),
    "Adamax": partial(OPTIM.Adamax, lr=0.1, weight_decay=0.1, maximize=True),
    "Adadelta": partial(OPTIM.Adadelta, weight_decay=0.1, maximize=True),
    "ASGD": partial(OPTIM.ASGD, lr=0.1, weight_decay=0.1, t0=3),
    "Rprop": partial(OPTIM.Rprop, lr=0.1, maximize=True),
}
EVERY = pytest.mark.parametrize("name", KINDS)


def grouped(groups: Groups, kind: Callable[..., OPTIM.Optimizer]) -> OPTIM.Optimizer:
    made = kind([{"params": group} for group in groups])
    made.param_groups[-1]["lr"] = made.param_groups[-1]["lr"] / 2
    return made


def pair_of(name: str, shares: tuple[float, ...] = THIRDS, **options: Any) -> Pair:
    pair = make_pair(
        partial(grouped, kind=KINDS[name]), options.pop("shapes", WHOLE), shares, **options
    )
    assert isinstance(pair.update, FlatUpdate)
    return pair


def holed(pair: Pair, generator: torch.Generator, step: int) -> Gradients:
    """Gradients of which some are missing now and then, in one worker or in all."""
    gradients = pair.gradients(generator)
    if step % 3 == 1:
        gradients[0][0] = None
    if step % 4 == 0:
        for row in gradients:
            row[3] = None
    return gradients


def assert_same_state(pair: Pair) -> None:
    theirs, mine = pair.optimizer.state_dict()["state"], pair.update.state().parameters
    assert mine.keys() == theirs.keys()
    for index, entry in theirs.items():
        assert mine[index].keys() == entry.keys()
        for key, value in entry.items():
            torch.testing.assert_close(mine[index][key], value, rtol=0, atol=0)
            assert mine[index][key].untyped_storage().nbytes() == value.numel() * 4


@EVERY
@pytest.mark.parametrize("shares", [(1.0,), THIRDS])
def test_many_steps_equal_torch_to_the_bit(name: str, shares: tuple[float, ...]) -> None:
    pair, generator = pair_of(name, shares), torch.Generator().manual_seed(0)
    for step in range(9):
        pair.step(holed(pair, generator, step))
    pair.assert_equal()
    assert_same_state(pair)


@EVERY
def test_odd_sizes_equal_torch_to_rounding(name: str) -> None:
    pair, generator = pair_of(name, shapes=RAGGED), torch.Generator().manual_seed(0)
    for _ in range(4):
        pair.step(pair.gradients(generator))
    pair.assert_equal(rtol=2e-6)


@EVERY
def test_neither_chunks_nor_lanes_change_a_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Kernel, FusedAdam, FusedSgd):
        monkeypatch.setattr(kind, "chunk", 32)
    monkeypatch.setattr(flat_update, "_ALONE", 0)
    pair, generator = pair_of(name, lanes=2), torch.Generator().manual_seed(0)
    for step in range(4):
        pair.step(holed(pair, generator, step), Clip("value", 1.5) if step % 2 else None)
    pair.assert_equal()


@pytest.mark.parametrize("shares", [(1.0,), THIRDS])
def test_clipping_by_norm_is_torchs_to_the_bit(shares: tuple[float, ...]) -> None:
    pair, generator = pair_of("SGD momentum", shares), torch.Generator().manual_seed(0)
    for step in range(6):
        pair.step(holed(pair, generator, step), Clip("norm", 0.5))
    pair.assert_equal()


@EVERY
def test_a_run_that_is_resumed_half_way_goes_on_to_the_bit(name: str) -> None:
    pair, generator = pair_of(name), torch.Generator().manual_seed(0)
    for step in range(4):
        pair.step(holed(pair, generator, step))
    slots = pair.store.layout.slots
    masters = [torch.nn.Parameter(pair.store.master(slot)) for slot in slots]
    resumed = grouped([masters[:3], masters[3:]], KINDS[name])
    resumed.load_state_dict(pair.optimizer.state_dict() | {"state": pair.update.state().parameters})
    pair.update = build_update(resumed, range(len(masters)), pair.store, Pool(1))
    for step in range(4):
        pair.step(holed(pair, generator, step))
    pair.assert_equal()
    assert_same_state(pair)


@EVERY
def test_parameters_that_change_groups_take_their_state_along(name: str) -> None:
    pair, generator = pair_of(name), torch.Generator().manual_seed(0)
    for step in range(3):
        pair.step(holed(pair, generator, step))
    first, second = pair.optimizer.param_groups
    second["params"].append(first["params"].pop())
    members = ((0, 1), (3, 4, 2))
    groups = plain(pair.optimizer)
    pair.update = regroup(pair.update, groups, members, {}, pair.store, Pool(1))
    assert isinstance(pair.update, FlatUpdate)
    for step in range(3):
        pair.step(holed(pair, generator, step))
    pair.assert_equal()


@EVERY
def test_new_hyper_parameters_take_effect_at_once(name: str) -> None:
    pair, generator = pair_of(name), torch.Generator().manual_seed(0)
    for rate in (0.1, torch.tensor(0.01), 0.05):
        for group in pair.optimizer.param_groups:
            group["lr"] = rate
            group["weight_decay"] = 0.2
        pair.update.set_groups(copy.deepcopy(plain(pair.optimizer)))
        pair.step(pair.gradients(generator))
        pair.step(pair.gradients(generator))
    pair.assert_equal()


@pytest.mark.parametrize("name", ["AdamW", "NAdam decoupled", "ASGD", "RMSprop"])
def test_a_step_at_a_part_of_the_learning_rate_is_torchs_with_that_rate(name: str) -> None:
    """Weight decay that is decoupled goes with the rate, too."""
    pair, generator = pair_of(name), torch.Generator().manual_seed(0)
    for rate in (1.0, 0.5, 0.25, 1.0):
        pair.step(pair.gradients(generator), rate=rate)
    pair.assert_equal()


def test_momentum_may_begin_and_pause_in_mid_run() -> None:
    pair, generator = pair_of("SGD"), torch.Generator().manual_seed(0)
    for momentum in (0.0, 0.9, 0.0, 0.8):
        for group in pair.optimizer.param_groups:
            group["momentum"] = momentum
        pair.update.set_groups(copy.deepcopy(plain(pair.optimizer)))
        for step in range(3):
            pair.step(holed(pair, generator, step))
    pair.assert_equal()


def test_state_begins_with_the_learning_rate_of_a_parameters_first_step() -> None:
    for name in ("Rprop", "ASGD"):
        pair, generator = pair_of(name), torch.Generator().manual_seed(0)
        for rate in (0.1, 0.02, 0.05):
            for group in pair.optimizer.param_groups:
                group["lr"] = rate
            pair.update.set_groups(copy.deepcopy(plain(pair.optimizer)))
            gradients = pair.gradients(generator)
            for row in gradients if rate == 0.1 else []:
                row[1] = None
            pair.step(gradients)
        pair.assert_equal()
        assert_same_state(pair)


def engine_chosen(pair: Pair, name: str, fused: bool | None) -> Kernel | None:
    """Serve the pair with this engine, whatever the optimizer that it is compared with has."""
    slots = pair.store.layout.slots
    masters = [torch.nn.Parameter(pair.store.master(slot)) for slot in slots]
    served = grouped([masters[:3], masters[3:]], KINDS[name])
    for group in served.param_groups:
        group["fused"] = fused
    pair.update = build_update(served, range(len(masters)), pair.store, Pool(1))
    return kernel_for(served)


def test_fused_sgd_is_sgd_also_where_a_gradient_comes_late() -> None:
    """Torch's own raises then; here only the parameter's first step is one."""
    pair, generator = pair_of("SGD nesterov"), torch.Generator().manual_seed(0)
    assert isinstance(engine_chosen(pair, "SGD nesterov", fused=True), FusedSgd)
    for step in range(6):
        pair.step(holed(pair, generator, step))
    pair.assert_equal()
    assert_same_state(pair)


# ---- for whom the flat pass is right ------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "dtype", "kernel"),
    [
        ({}, torch.float32, FusedAdam),
        ({"fused": True}, torch.float32, FusedAdam),
        ({"fused": False}, torch.float32, PublicClass),
        ({"foreach": True}, torch.float32, type(None)),
        ({"capturable": True}, torch.float32, type(None)),
        ({"differentiable": True}, torch.float32, type(None)),
        ({}, torch.float64, type(None)),
        ({}, torch.bfloat16, type(None)),
    ],
)
def test_an_engine_or_precision_of_the_users_choice_is_kept(
    options: dict[str, Any], dtype: torch.dtype, kernel: type
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    assert type(kernel_for(OPTIM.Adam([parameter], **options))) is kernel


def test_adagrad_rounds_as_the_users_engine_does() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert type(kernel_for(OPTIM.Adagrad([parameter]))) is PlainAdagrad
    assert type(kernel_for(OPTIM.Adagrad([parameter], fused=True))) is PublicClass


def test_subclasses_and_what_needs_whole_parameters_are_served_as_they_are() -> None:
    class Own(OPTIM.Adam):
        pass

    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    assert kernel_for(Own([parameter])) is None
    assert kernel_for(OPTIM.Adafactor([parameter])) is None
    assert kernel_for(OPTIM.SparseAdam([parameter])) is None
