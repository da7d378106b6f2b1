"""Parameter groups that change in mid-run: unfrozen layers, added, removed and reordered groups."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BackboneFinetuning, BaseFinetuning, ModelCheckpoint

from hybridtrain.errors import UserError
from tests.lightning.step.test_optimizers import compare
from tests.lightning.toys import Regression, distance, fit
from tests.picking import by_default

OPTIM = torch.optim
KINDS = {
    "flat": partial(OPTIM.Adam, lr=0.01),
    "whole": partial(OPTIM.SGD, lr=0.01, momentum=0.9),
    "becomes whole": partial(OPTIM.AdamW, lr=0.01),
}


class Growing(Regression):
    """The first layer is frozen until the second epoch, its bias until the third."""

    def __init__(self, make: Any, **options: Any) -> None:
        super().__init__(make)
        self.net[0].requires_grad_(False)
        self.options = options

    def on_train_epoch_start(self) -> None:
        optimizer = self.optimizers().optimizer
        if self.current_epoch == 1:
            self.net[0].weight.requires_grad_(True)
            optimizer.add_param_group({"params": [self.net[0].weight], "lr": 0.02, **self.options})
        elif self.current_epoch == 2:
            self.net[0].bias.requires_grad_(True)
            optimizer.add_param_group({"params": [self.net[0].bias]})
            optimizer.param_groups.reverse()

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_parameters_unfrozen_in_mid_run_are_stepped_from_then_on(name: str, tmp_path: Path) -> None:
    options = {"foreach": True} if name == "becomes whole" else {}
    compare(partial(Growing, KINDS[name], **options), tmp_path, max_epochs=4)


class Shrinking(Regression):
    """The first layer leaves the optimizer for the second epoch and comes back for the third."""

    def on_train_epoch_start(self) -> None:
        groups = self.optimizers().optimizer.param_groups
        if self.current_epoch == 1:
            self.gone = groups.pop(0)
        elif self.current_epoch == 2:
            groups.append(self.gone)

    def configure_optimizers(self) -> Any:
        layers = [self.net[0], self.net[2]]
        return self.make_optimizer([{"params": list(layer.parameters())} for layer in layers])


@pytest.mark.parametrize("name", by_default(["flat", "whole"], "whole"))
def test_what_leaves_an_optimizer_rests_and_comes_back_with_its_state(
    name: str, tmp_path: Path
) -> None:
    compare(partial(Shrinking, KINDS[name]), tmp_path, max_epochs=4)


class Backbone(Regression):
    """What ``BackboneFinetuning`` asks for."""

    def __init__(self, make: Any = KINDS["flat"]) -> None:
        super().__init__(make)
        self.backbone = self.net[0]

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


def finetuning() -> BaseFinetuning:
    return BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_ratio_lr=0.5, verbose=False)


@pytest.mark.parametrize("name", ["flat", "whole"])
def test_backbone_finetuning_equals_one_device(name: str) -> None:
    module = partial(Backbone, KINDS[name])
    alone, _ = fit("auto", 1, 48, module, max_epochs=6, callbacks=[finetuning()])
    shared, _ = fit("hybrid", 2, 24, module, max_epochs=6, callbacks=[finetuning()])
    assert distance(shared, alone) < 1e-6


def test_backbone_finetuning_equals_one_device_where_hooks_look_at_gradients() -> None:
    class Looking(Backbone):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.clamp_(-0.5, 0.5)

    alone, _ = fit("auto", 1, 48, Looking, max_epochs=6, callbacks=[finetuning()])
    shared, _ = fit("hybrid", 2, 24, Looking, max_epochs=6, callbacks=[finetuning()])
    assert distance(shared, alone) < 1e-6


def test_free_running_workers_unfreeze_each_in_its_own_time() -> None:
    trained, _ = fit("async", 2, 6, Backbone, max_epochs=4, callbacks=[finetuning()])
    pl.seed_everything(7, verbose=False)
    pairs = zip(trained.net.parameters(), Backbone().net.parameters(), strict=True)
    assert all(bool((ours != fresh).any()) for ours, fresh in pairs)


def test_a_run_that_has_grown_resumes_as_in_one_process(tmp_path: Path) -> None:
    """Which is not quite as if it had not been interrupted, for the callback's own reasons."""
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    options: dict[str, Any] = {"overfit_batches": 1.0}
    kept = {"callbacks": [finetuning(), checkpoint], "enable_checkpointing": True}
    fit("hybrid", 2, 6, Backbone, max_epochs=3, **kept, **options)
    path = tmp_path / "last.ckpt"
    (state,) = torch.load(path, weights_only=True)["optimizer_states"]
    assert [len(group["params"]) for group in state["param_groups"]] == [2, 2]
    assert [int(state["state"][n]["step"]) for n in range(4)] == [12, 12, 8, 8]
    options |= {"max_epochs": 5, "ckpt_path": str(path)}
    alone, _ = fit("auto", 1, 12, Backbone, callbacks=[finetuning()], **options)
    shared, _ = fit("hybrid", 3, 4, Backbone, callbacks=[finetuning()], **options)
    assert distance(shared, alone) < 1e-6


class Restarting(Regression):
    """Puts new optimizers into the trainer for the second epoch, of another kind."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.strategy.optimizers = [OPTIM.NAdam(self.parameters(), lr=0.01)]


@pytest.mark.parametrize("name", by_default(["flat", "whole"], "whole"))
def test_optimizers_replaced_in_mid_run_step_from_then_on(name: str, tmp_path: Path) -> None:
    compare(partial(Restarting, KINDS[name]), tmp_path, max_epochs=3)
    _, trainer = fit("hybrid", 2, 6, partial(Restarting, KINDS[name]))
    assert trainer.strategy.run_stats()["updates"] == trainer.global_step == 12
    _, trainer = fit("async", 2, 6, partial(Restarting, KINDS[name]))
    assert trainer.strategy.run_stats()["updates"] == trainer.global_step == 24


class RestartingOne(Regression):
    """Two optimizers by hand; the first is made anew for the second epoch, and comes second."""

    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            first = OPTIM.NAdam(self.net[0].parameters(), lr=0.01)
            self.trainer.strategy.optimizers = [self.trainer.optimizers[1], first]

    def configure_optimizers(self) -> Any:
        return [self.make_optimizer(layer.parameters()) for layer in (self.net[0], self.net[2])]


@pytest.mark.parametrize("name", ["flat", "whole"])
def test_optimizers_that_are_not_replaced_keep_their_state(name: str, tmp_path: Path) -> None:
    compare(partial(RestartingOne, KINDS[name]), tmp_path, max_epochs=3)


class Apart(Growing):
    """Each rank unfreezes in an epoch of its own."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.global_rank:
            group = {"params": [self.net[0].weight]}
            self.optimizers().optimizer.add_param_group(group)


def test_groups_that_differ_between_workers_are_refused() -> None:
    with pytest.raises(UserError, match=r"groups of optimizer 0 differ between"):
        fit("hybrid", 2, 6, partial(Apart, KINDS["flat"]))


class Late(Growing):
    """Makes a parameter when training has begun."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.extra = torch.nn.Parameter(torch.zeros(5, 3))
            self.optimizers().optimizer.add_param_group({"params": [self.extra]})


@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_a_parameter_made_after_training_began_is_refused_with_what_to_do(strategy: str) -> None:
    with pytest.raises(UserError, match=r"shape \(5, 3\) .* create it in __init__"):
        fit(strategy, 2, 6, partial(Late, KINDS["flat"]))


def test_a_parameter_made_in_on_train_start_is_refused_as_well() -> None:
    class AtStart(Regression):
        def on_train_start(self) -> None:
            self.extra = torch.nn.Parameter(torch.zeros(5, 3))
            self.optimizers().optimizer.add_param_group({"params": [self.extra]})

    with pytest.raises(UserError, match=r"shape \(5, 3\) .* create it in __init__"):
        fit("hybrid", 2, 6, AtStart)
