"""Any torch optimizer steps the masters as it would step in one process, on the mean gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from hybridtrain.engine.protocol.messages import Clip
from hybridtrain.engine.updates.base import Contribution, StepInput, clip_factor
from hybridtrain.engine.updates.mean import merge
from hybridtrain.engine.updates.per_tensor import PerTensorUpdate
from tests.support.rows import make_pair

Groups = list[list[torch.nn.Parameter]]
Kind = Callable[..., torch.optim.Optimizer]

SHAPES = [[(5, 7), (3,)], [(4, 6), ()]]
THIRDS = (2 / 7, 1 / 7, 4 / 7)
OPTIM = torch.optim

# With ``foreach``: without, these are elementwise and run on flat memory (test_kernels.py).
KINDS: dict[str, Kind] = {
    "SGD": partial(OPTIM.SGD, lr=0.1, foreach=True),
    "momentum": partial(OPTIM.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "nesterov": partial(OPTIM.SGD, lr=0.1, momentum=0.99, nesterov=True, foreach=True),
    "maximize": partial(
        OPTIM.SGD, lr=0.1, momentum=0.5, dampening=0.1, maximize=True, foreach=True
    ),
    "Adagrad": partial(OPTIM.Adagrad, lr=0.1, initial_accumulator_value=0.1, foreach=True),
    "RMSprop": partial(OPTIM.RMSprop, lr=0.1, momentum=0.9, centered=True, foreach=True),
    "NAdam": partial(OPTIM.NAdam, lr=0.1, foreach=True),
    "Adadelta": partial(OPTIM.Adadelta, foreach=True),
    "ASGD": partial(OPTIM.ASGD, lr=0.1, foreach=True),
    "Adafactor": partial(OPTIM.Adafactor, lr=0.1),
    "foreach Adam": partial(OPTIM.Adam, lr=0.1, foreach=True),
    "foreach AdamW": partial(OPTIM.AdamW, lr=0.1, foreach=True),
}


def grouped(groups: Groups, kind: Kind) -> OPTIM.Optimizer:
    return kind([{"params": group} for group in groups])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("shares", [(1.0,), THIRDS])
def test_every_optimizer_equals_its_single_process_self(
    name: str, shares: tuple[float, ...]
) -> None:
    pair = make_pair(partial(grouped, kind=KINDS[name]), SHAPES, shares)
    assert isinstance(pair.update, PerTensorUpdate)
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        pair.step(pair.gradients(generator))
    pair.assert_equal()
    state = pair.update.state().parameters
    for index, entry in pair.optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(state[index][key], value, rtol=0, atol=0)


@pytest.mark.skipif(not hasattr(OPTIM, "Muon"), reason="this torch has no Muon")
def test_muon_sees_whole_matrices() -> None:
    muon: Kind = partial(OPTIM.Muon, lr=0.1)
    pair = make_pair(partial(grouped, kind=muon), [[(8, 6), (6, 8)]])
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        pair.step(pair.gradients(generator))
    pair.assert_equal()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_keep_their_own(dtype: torch.dtype) -> None:
    pair = make_pair(partial(grouped, kind=KINDS["foreach Adam"]), SHAPES, (0.5, 0.5), dtype)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        pair.step(pair.gradients(generator))
    pair.assert_equal()


def test_absent_is_not_zero_momentum_and_decay_rest() -> None:
    pair = make_pair(partial(grouped, kind=KINDS["momentum"]), SHAPES)
    generator = torch.Generator().manual_seed(0)
    pair.step(pair.gradients(generator))
    before = pair.masters()[1]
    gradients = pair.gradients(generator)
    gradients[0][1] = gradients[1][1] = gradients[1][2] = None
    pair.step(gradients)
    assert torch.equal(pair.masters()[1], before)
    pair.assert_equal()


@pytest.mark.parametrize("clip", [Clip("norm", 0.3), Clip("norm", 1e6), Clip("value", 0.2)])
def test_clipping_is_torchs_on_the_mean(clip: Clip) -> None:
    pair = make_pair(partial(grouped, kind=KINDS["momentum"]), SHAPES, THIRDS)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        pair.step(pair.gradients(generator), clip)
    pair.assert_equal(rtol=1e-6)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_clipping_no_gradient_at_all_is_no_error(algorithm: str, name: str) -> None:
    pair = make_pair(partial(grouped, kind=KINDS[name]), SHAPES, (1.0,))
    before = pair.masters()
    nothing = Contribution(0, 1.0, frozenset(range(4)))
    with torch.no_grad():
        pair.update.step(StepInput([nothing], Clip(algorithm, 1.0)))
    assert all(map(torch.equal, pair.masters(), before))


def test_clipping_to_a_limit_follows_torchs_formula() -> None:
    gradient = torch.tensor([3.0, 4.0])
    assert clip_factor(torch.linalg.vector_norm(gradient), 10.0) == 1.0
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    factor = clip_factor(torch.linalg.vector_norm(gradient), 1.0)
    assert torch.equal(gradient * factor, parameter.grad)


def test_new_hyper_parameters_take_effect() -> None:
    pair = make_pair(partial(grouped, kind=KINDS["SGD"]), SHAPES, (1.0,))
    pair.update.set_groups([{"lr": 0.0}, {"lr": 0.5}])
    before = pair.masters()
    for group, rate in zip(pair.optimizer.param_groups, (0.0, 0.5), strict=True):
        group["lr"] = rate
    pair.step(pair.gradients(torch.Generator()))
    pair.assert_equal()
    assert torch.equal(pair.masters()[0], before[0])
    assert not torch.equal(pair.masters()[2], before[2])


# ---- merging ------------------------------------------------------------------------------------


def test_rows_are_summed_in_the_order_of_workers() -> None:
    rows = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    shares = [1.0, 1.0, 1.0]  # not a mean: the effect of the order is to be seen
    assert merge(rows, shares, torch.empty(1)).tolist() == [0.0]
    assert merge([rows[0], rows[2], rows[1]], shares, torch.empty(1)).tolist() == [1.0]


def test_a_lone_full_share_is_returned_as_it_lies() -> None:
    row = torch.randn(4)
    assert merge([row], [1.0], torch.empty(4)) is row


def test_merging_never_changes_a_row() -> None:
    rows = [torch.ones(3), torch.full((3,), 3.0)]
    assert merge(rows, [0.25, 0.75], torch.empty(3)).tolist() == [2.5] * 3
    assert rows[0].tolist() == [1.0] * 3
    assert rows[1].tolist() == [3.0] * 3


@pytest.mark.parametrize("name", ["Adadelta", "foreach AdamW"])
def test_no_optimizer_here_asks_for_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look for CUDA graphs initialises CUDA in the calling process, and nothing can be forked."""

    def asked(*_: object) -> None:
        raise AssertionError("asked")

    pair = make_pair(lambda groups: KINDS[name]([p for group in groups for p in group]), SHAPES)
    looks = ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check")
    for look in looks:
        monkeypatch.setattr(torch.optim.Optimizer, look, asked, raising=False)
    with torch.no_grad():
        pair.update.step(StepInput([Contribution(worker, 0.5) for worker in range(2)]))
