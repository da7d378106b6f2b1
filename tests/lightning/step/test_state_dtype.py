"""Optimizer state in host memory as bfloat16, in whole runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from hybridtrain import HybridStrategy
from hybridtrain.engine.recording import find_record, read_record
from hybridtrain.errors import UserError
from hybridtrain.lightning.replay.replay_fit import replay_fit
from tests.lightning.checkpointing.test_resume import SaveAt
from tests.lightning.toys import (
    Manual,
    Regression,
    distance,
    fit,
    flat,
    make_trainer,
    regression_data,
)
from tests.picking import by_default

ADAM = partial(torch.optim.AdamW, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.02, momentum=0.9)


def narrow(**options: Any) -> HybridStrategy:
    return HybridStrategy(state_dtype="bf16", **options)


@pytest.mark.parametrize("make", by_default([ADAM, SGD], ADAM))
def test_two_runs_have_the_same_bits_which_are_nearly_those_of_float32_state(make: Any) -> None:
    one, _ = fit(narrow(), 2, 6, partial(Regression, make))
    two, _ = fit(narrow(), 2, 6, partial(Regression, make))
    wide, _ = fit("hybrid", 2, 6, partial(Regression, make))
    assert torch.equal(flat(one), flat(two))
    assert 0 < distance(one, wide) < 0.01


@pytest.mark.parametrize("policy", by_default(["async", "backup", "ssp"], "async"))
def test_rounded_state_goes_with_every_way_of_waiting(policy: Any) -> None:
    """One worker of each has the updates of hybrid."""
    one, _ = fit(narrow(policy=policy), 1, 6, partial(Regression, ADAM))
    plain, _ = fit(narrow(), 1, 6, partial(Regression, ADAM))
    assert torch.equal(flat(one), flat(plain))


@pytest.mark.parametrize("make", by_default([ADAM, SGD], SGD))
@pytest.mark.parametrize("epoch", by_default([0, 1], 1))
def test_a_run_resumed_within_an_epoch_has_the_bits_of_an_undisturbed_one(
    make: Any, epoch: int, tmp_path: Path
) -> None:
    path, module = tmp_path / "half.ckpt", partial(Regression, make)
    whole, _ = fit(narrow(), 2, 4, module, callbacks=[SaveAt(path, 3, epoch)])
    resumed, _ = fit(narrow(), 2, 4, module, ckpt_path=str(path))
    assert torch.equal(flat(resumed), flat(whole))


def test_a_checkpoint_has_float32_moments_that_plain_torch_loads(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    module, _ = fit(narrow(), 2, 4, partial(Regression, ADAM), callbacks=[SaveAt(path, 3)])
    (saved,) = torch.load(path, weights_only=True)["optimizer_states"]
    optimizer = ADAM(module.parameters())
    optimizer.load_state_dict(saved)
    moments = [state["exp_avg_sq"] for state in optimizer.state.values()]
    assert moments
    for each in moments:
        assert each.dtype == torch.float32 and each.max() > 0
        assert torch.equal(each, each.bfloat16().float())
    continued, _ = fit("hybrid", 2, 4, partial(Regression, ADAM), ckpt_path=str(path))
    assert torch.isfinite(flat(continued)).all()


@pytest.mark.parametrize("policy", by_default(["hybrid", "async"], "async"))
def test_a_replay_has_the_bits_of_the_run_and_needs_the_same_option(
    policy: str, tmp_path: Path
) -> None:
    first, _ = fit(narrow(policy=policy, record=tmp_path), 2, 4, partial(Regression, ADAM))
    record = read_record(find_record(tmp_path))

    def again(strategy: HybridStrategy) -> Any:
        torch.manual_seed(7)
        second, trainer = Regression(ADAM), make_trainer(strategy, 2)
        data = torch.utils.data.DataLoader(regression_data(), batch_size=4, shuffle=True)
        report = replay_fit(record, trainer, second, train_dataloaders=data)
        return report, second

    with pytest.raises(UserError, match=r"the run's state_dtype was torch\.bfloat16"):
        again(HybridStrategy(policy))
    pl.seed_everything(7, verbose=False)
    report, second = again(narrow(policy=policy))
    assert report.equal
    assert torch.equal(flat(second), flat(first))


class Words(Regression):
    def __init__(self) -> None:
        super().__init__(partial(torch.optim.Adagrad, lr=0.01))
        self.net = torch.nn.Sequential(torch.nn.Embedding(10, 1, sparse=True))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0].abs().long().clamp(max=9)).square().mean()


@pytest.mark.parametrize(
    ("strategy", "module", "said"),
    [
        ({"policy": "hogwild"}, Regression, "with exchange=in_place, but workers step with state"),
        (
            {"exchange": {"name": "movement", "every": 4}},
            Regression,
            "with exchange={name: movement, every: 4}, but workers step with state",
        ),
        ({"update": "median"}, partial(Regression, ADAM), "with update=Median, but a merge"),
        ({}, Words, "with optimizer Adagrad, but gradients are sparse"),
        (
            {},
            partial(Regression, partial(torch.optim.SGD, lr=0.1)),
            "with optimizer SGD, but it keeps no state",
        ),
    ],
    ids=["in place", "own steps", "merge", "sparse", "no state"],
)
def test_state_that_cannot_be_rounded_is_refused_in_one_line(
    strategy: dict[str, Any], module: Any, said: str
) -> None:
    with pytest.raises(UserError, match=f"state_dtype=bf16 was given {said}.*leave state_dtype"):
        fit(narrow(**strategy), 2, 6, module)


def test_unknown_values_of_state_dtype_are_refused() -> None:
    with pytest.raises(UserError, match="state_dtype='fp8' was given; it must be bf16 or null"):
        HybridStrategy(state_dtype="fp8")  # type: ignore[arg-type]


class TwoOptimizers(Manual, Regression):
    """Both step in every mini-batch, so each second update is the other's."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = Regression.training_step(self, batch, batch_idx)
        optimizers = self.optimizers()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        first, *_, last = (p for p in self.net if list(p.parameters()))
        return [ADAM(first.parameters()), SGD(last.parameters())]


def test_two_optimizers_resumed_within_an_epoch_have_the_bits_of_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    path = tmp_path / "half.ckpt"
    whole, _ = fit(narrow(), 2, 4, TwoOptimizers, callbacks=[SaveAt(path, 3, 1)])
    resumed, _ = fit(narrow(), 2, 4, TwoOptimizers, ckpt_path=str(path))
    wide, _ = fit("hybrid", 2, 4, TwoOptimizers)
    assert torch.equal(flat(resumed), flat(whole))
    assert 0 < distance(whole, wide) < 0.01
