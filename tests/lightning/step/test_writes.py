"""User code writes to parameters: each worker's writes are its own until the next step, as if every
process had parameters of its own, and no write happens once per worker."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from hybridtrain.engine.options.schemes import parts_of
from hybridtrain.engine.policies.registry import STRATEGIES as NAMES
from tests.lightning.toys import Regression, fit, flat, make_trainer, regression_data
from tests.picking import but_slow, by_default


class Clamped(Regression):
    """Wasserstein style."""

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class Decayed(Regression):
    """Not idempotent: twice would be too often."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.net[0].parameters():
                parameter.mul_(0.9)


class DecayedBeforeTheStep(Regression):
    """Between backward and step."""

    def on_after_backward(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.95)


class Teacher(Regression):
    """A frozen copy follows slowly, by hand, and takes part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = deepcopy(self.net).requires_grad_(False)
        self.make_optimizer = lambda _: torch.optim.SGD(self.net.parameters(), lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        distillation = torch.nn.functional.mse_loss(self.net(batch[0]), self.teacher(batch[0]))
        return super().training_step(batch, batch_idx) + distillation


class Swapping(pl.Callback):
    """Validates with averaged weights, and puts the trained ones back."""

    def __init__(self) -> None:
        self.average: list[torch.Tensor] = []
        self.trained: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        values = [p.detach().clone() for p in module.parameters()]
        self.average = self.average or values
        for mean, value in zip(self.average, values, strict=True):
            mean.lerp_(value, 0.1)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.trained = [p.detach().clone() for p in module.parameters()]
        self.write(module, self.average)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.write(module, self.trained)

    @staticmethod
    def write(module: Any, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(module.parameters(), values, strict=False):
            parameter.data.copy_(value)


def train(
    strategy: str,
    workers: int,
    batch: int,
    module: Callable[[], Regression],
    samples: int = 48,
    **options: Any,
) -> tuple[Any, pl.Trainer]:
    """The union of the workers' mini-batches is the same for every number of workers."""
    pl.seed_everything(7, verbose=False)
    made, trainer = module(), make_trainer(strategy, workers, **options)
    shuffle = options.get("use_distributed_sampler", True)  # one worker alone would keep the order
    loader = DataLoader(regression_data(samples), batch // workers, shuffle=shuffle)
    trainer.fit(made, loader, DataLoader(regression_data(12), 6))
    return made, trainer


WRITING = [Clamped, Decayed, DecayedBeforeTheStep, Teacher]


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", by_default([2, 3], 3))
@pytest.mark.parametrize("module", by_default(WRITING, DecayedBeforeTheStep, Teacher))
def test_writes_to_parameters_happen_once_whatever_the_number_of_workers(
    module: Callable[[], Regression], workers: int
) -> None:
    one, _ = train("hybrid", 1, 12, module)
    many, _ = train("hybrid", workers, 12, module)
    torch.testing.assert_close(flat(many), flat(one), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("workers", by_default([2, 3], 3))
@pytest.mark.parametrize("module", by_default(WRITING, Clamped))
def test_workers_without_data_in_the_last_step_have_its_writes(
    module: Callable[[], Regression], workers: int
) -> None:
    """They validate, and begin the next epoch, with the parameters of all."""
    one, trainer = train("hybrid", 1, 12, module, samples=25, max_epochs=2)
    many, other = train("hybrid", workers, 12, module, samples=25, max_epochs=2)
    torch.testing.assert_close(flat(many), flat(one), rtol=1e-6, atol=1e-7)
    loss, other_loss = (t.callback_metrics["val/loss"] for t in (trainer, other))
    torch.testing.assert_close(other_loss, loss, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("strategy", by_default(["hybrid", "async"], "async"))
@pytest.mark.parametrize("module", by_default(WRITING, Decayed, Teacher))
def test_a_lone_worker_with_writes_equals_plain_training(module: Any, strategy: str) -> None:
    in_order = {"use_distributed_sampler": False}  # what a plain trainer does
    plain, _ = train("auto", 1, 12, module, **in_order)
    ours, _ = train(strategy, 1, 12, module, **in_order)
    torch.testing.assert_close(flat(ours), flat(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [2, 3])
def test_weights_swapped_in_for_a_validation_stay_out_of_training(workers: int) -> None:
    """All workers swap, none at the same moment: were the memory one, the average would stay in."""
    one, trainer = train("hybrid", 1, 12, Regression, callbacks=[Swapping()])
    many, other = train("hybrid", workers, 12, Regression, callbacks=[Swapping()])
    torch.testing.assert_close(flat(many), flat(one))
    loss, other_loss = (t.callback_metrics["val/loss"] for t in (trainer, other))
    torch.testing.assert_close(other_loss, loss)


def test_writes_end_up_in_checkpoints_and_come_home(tmp_path: Path) -> None:
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    module, _ = fit(
        "hybrid", 2, 6, Clamped, enable_checkpointing=True, callbacks=[checkpoint], max_epochs=1
    )
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert flat(module).abs().max() < 0.2 + 1e-7
    for name, value in module.state_dict().items():
        assert torch.equal(saved[name], value)


def test_free_running_workers_writes_count_once_each(tmp_path: Path) -> None:
    """Each worker shrinks the weights by a tenth before each of its own steps, as one would."""
    shrunk = partial(Decayed, lambda p: torch.optim.SGD(p, lr=0.0))
    module, trainer = fit("async", 2, 4, shrunk, max_epochs=2)
    start, _ = fit("async", 2, 4, partial(Regression, lambda p: torch.optim.SGD(p, lr=0.0)))
    ratio = float((module.net[0].weight / start.net[0].weight).detach().mean())
    assert trainer.global_step == 24
    # Movements overlap: each is a tenth of what its worker had read, some updates ago.
    assert 0.9**24 * 0.2 < ratio < 0.9**24 * 5


HOOKS = (
    *("on_train_epoch_start", "on_train_epoch_end", "on_train_end"),
    *("on_validation_start", "on_validation_epoch_end", "on_validation_end"),
)


class Doubling(pl.LightningModule):
    """Each hook, once an epoch, doubles a parameter of its own; no step moves one."""

    def __init__(self) -> None:
        super().__init__()
        self.of_hooks = torch.nn.ParameterDict({hook: torch.ones(3) for hook in HOOKS})
        for hook in HOOKS:
            setattr(self, hook, partial(self.double, hook))

    def double(self, hook: str) -> None:
        self.of_hooks[hook].data.mul_(2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.stack([each.sum() for each in self.of_hooks.values()]).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


# Theirs is the centre's, or the outer optimizer's, way to where workers have gone.
BY_MOVEMENT = {"easgd", "diloco", "async_diloco", "streaming_diloco"}
# A line search moves the masters; workers on the masters themselves write one after the other.
OTHERS = sorted(set(NAMES) - BY_MOVEMENT - {"sandblaster", "hogwild"})


@pytest.mark.parametrize("strategy", but_slow([(n,) for n in OTHERS], lambda n, _: n != "async"))
@pytest.mark.parametrize("workers", by_default([1, 2, 3], 2))
def test_what_all_workers_write_in_a_hook_of_an_epoch_counts_once(
    strategy: str, workers: int
) -> None:
    module, trainer = Doubling(), make_trainer(strategy, workers, max_epochs=2)
    trainer.fit(module, DataLoader(regression_data(), 2), DataLoader(regression_data(8), 2))
    for hook in HOOKS:
        expected = 2.0 if hook == "on_train_end" else 4.0
        assert module.of_hooks[hook].tolist() == [expected] * 3, hook


@pytest.mark.parametrize("strategy", sorted(BY_MOVEMENT))
def test_where_movements_are_merged_what_is_written_at_the_end_comes_home(strategy: str) -> None:
    module, trainer = Doubling(), make_trainer(strategy, 2, max_epochs=1)
    trainer.fit(module, DataLoader(regression_data(), 2))
    assert module.of_hooks["on_train_end"].tolist() == [2.0] * 3


@pytest.mark.parametrize("every", by_default([1, 2, 4], 2))
@pytest.mark.parametrize("workers", by_default([1, 2, 3], 1, 3))
@pytest.mark.parametrize("strategy", by_default(["local_sgd", "diloco"], "local_sgd"))
def test_what_is_written_behind_the_last_exchange_comes_home(
    strategy: str, workers: int, every: int
) -> None:
    """Each epoch ends with an exchange after its last step, and then clamps."""
    exchange = {"exchange": {"name": "movement", "every": every}}
    ours = HybridStrategy(**{**parts_of(strategy), **exchange})
    module, trainer = Clamped(), make_trainer(ours, workers, max_epochs=2)
    trainer.fit(module, DataLoader(regression_data(48), 12 // workers))
    assert flat(module).abs().max() < 0.2 + 1e-7


@pytest.mark.parametrize("workers", by_default([2, 3], 3))
def test_workers_in_turn_with_clamped_weights_are_one_device_to_the_bit(workers: int) -> None:
    one, _ = train("auto", 1, 4, Clamped, use_distributed_sampler=False)
    strategy = HybridStrategy("synchronous", keep_order=True)
    pl.seed_everything(7, verbose=False)
    many, trainer = Clamped(), make_trainer(strategy, workers, max_epochs=3)
    trainer.fit(many, DataLoader(regression_data(), 4), DataLoader(regression_data(12), 6))
    assert trainer.global_step == 3 * len(regression_data()) // 4
    assert torch.equal(flat(many), flat(one))


def test_without_a_map_of_pages_the_result_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = fit("hybrid", 2, 6, Decayed)
    monkeypatch.setattr(
        "hybridtrain.engine.memory.worker_view.copy_on_write_is_seen", lambda: False
    )
    other, _ = fit("hybrid", 2, 6, Decayed)
    assert torch.equal(flat(one), flat(other))
