"""What Lightning's own tests ask of a strategy, asked of ours. See docs/lightning_tests.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import BasePredictionWriter, EarlyStopping, ModelPruning
from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset
from pytorch_lightning.trainer.states import TrainerStatus
from torch.utils.data import DataLoader, RandomSampler

from tests.lightning.toys import Regression, fit, flat, make_trainer, regression_data


class Unused(BoringModel):
    """A layer that takes part in no gradient: DDP raises."""

    def __init__(self) -> None:
        super().__init__()
        self.intermediate = torch.nn.Linear(32, 32)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            batch = self.intermediate(batch)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_unused_parameters_need_no_option_and_stay_as_they_are(strategy: str) -> None:
    module = Unused()
    before = module.intermediate.weight.detach().clone()
    trainer = make_trainer(strategy, 2, max_steps=2, max_epochs=-1)
    trainer.fit(module)
    assert torch.equal(module.intermediate.weight, before)
    assert trainer.state.status == TrainerStatus.FINISHED


class Tied(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)
        self.tied = torch.nn.Linear(32, 32)
        self.tied.weight = self.layer.weight
        self.register_buffer("kept", torch.ones(3))

    def on_train_start(self) -> None:
        assert self.tied.weight is self.layer.weight
        if self.global_rank == 1:
            self.kept.fill_(7.0)


def test_only_parameters_are_shared_with_workers_and_what_was_tied_stays_tied() -> None:
    module = Tied()
    trainer = make_trainer("hybrid", 2, max_steps=2, max_epochs=-1)
    trainer.fit(module)
    assert not any(t.is_shared() for t in (*module.parameters(), *module.buffers()))
    assert module.tied.weight.data_ptr() == module.layer.weight.data_ptr()
    assert module.kept.tolist() == [1.0, 1.0, 1.0]


class Partial(Regression):
    """A state_dict that leaves something out, and asks not to be strict."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        full = super().state_dict(*args, **kwargs)
        return {name: value for name, value in full.items() if "frozen" not in name}


def test_a_module_that_saves_a_part_of_itself_comes_home(tmp_path: Path) -> None:
    module = Partial()
    frozen = module.frozen.weight.clone()
    fit("hybrid", 2, 6, module, default_root_dir=tmp_path, enable_checkpointing=True)
    (path,) = tmp_path.rglob("*.ckpt")
    assert not any("frozen" in name for name in torch.load(path, weights_only=True)["state_dict"])
    assert torch.equal(module.frozen.weight, frozen)
    fit("hybrid", 2, 6, Partial, ckpt_path=str(path), max_epochs=4)


class Gathering(Regression):
    """All that ``all_gather`` takes, and its gradient."""

    def on_train_start(self) -> None:
        rank = self.global_rank
        nested = {"a": torch.full((2, 3), float(rank)), "b": [torch.tensor(rank)], "c": "text"}
        found: Any = self.all_gather(nested)
        assert found["a"].shape == (2, 2, 3) and found["a"][1].eq(1.0).all()
        assert found["b"][0].tolist() == [0, 1] and found["c"] == "text"
        number: Any = self.all_gather(float(rank))
        assert number.tolist() == [0.0, 1.0]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        mine = self.net(batch[0]).mean()
        everybody: Any = self.all_gather(mine, sync_grads=True)
        mine.retain_grad()
        everybody.sum().backward(retain_graph=True)
        assert mine.grad is not None and float(mine.grad) == 2.0  # from both
        self.zero_grad()
        return super().training_step(batch, batch_idx)


def test_all_gather_takes_collections_and_sums_gradients() -> None:
    fit("hybrid", 2, 6, Gathering, max_epochs=1)


class Plan(Regression):
    """Metrics by plan: one stops improving after the second epoch, the other after the fourth."""

    def on_train_epoch_end(self) -> None:
        self.log("abc", max(6.0 - self.current_epoch, 4.0), sync_dist=True)
        self.log("cba", max(6.0 - self.current_epoch, 2.0), sync_dist=True)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("stoppers", "stopped"),
    [
        ([("abc", 1), ("cba", 3)], 3),
        ([("cba", 3), ("abc", 1)], 3),
        ([("cba", 1)], 5),
    ],
)
def test_several_early_stoppings_the_first_one_ends_the_run(
    stoppers: list[tuple[str, int]], stopped: int
) -> None:
    callbacks = [EarlyStopping(name, patience=patience) for name, patience in stoppers]
    _, trainer = fit("hybrid", 2, 6, Plan, callbacks=callbacks, max_epochs=9)
    first = next(c for c in callbacks if c.stopped_epoch)
    assert first.stopped_epoch == stopped and trainer.current_epoch == stopped + 1


class Writer(BasePredictionWriter):
    """Every rank writes what it has predicted."""

    def __init__(self, folder: Path) -> None:
        super().__init__("epoch")
        self.folder = folder

    def write_on_epoch_end(
        self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any
    ) -> None:
        torch.save((predictions, batch_indices), self.folder / f"{trainer.global_rank}.pt")


class Predicting(Regression):
    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return batch[0].sum(1)


def test_a_prediction_writer_learns_which_samples_are_its_own(tmp_path: Path) -> None:
    data = regression_data(21)
    trainer = make_trainer("hybrid", 2, callbacks=[Writer(tmp_path)])
    assert trainer.predict(Predicting(), DataLoader(data, 4), return_predictions=False) is None
    found: dict[int, float] = {}
    for path in tmp_path.glob("*.pt"):
        predictions, indices = torch.load(path, weights_only=True)
        numbers = [n for loader in indices for batch in loader for n in batch]
        found |= dict(zip(numbers, torch.cat(predictions).tolist(), strict=True))
    expected = data.tensors[0].sum(1)
    assert sorted(found) == list(range(21))
    assert all(abs(found[i] - float(expected[i])) < 1e-6 for i in found)


def test_pruning_prunes_what_it_prunes_in_one_process() -> None:
    masks = []
    for workers, batch in ((2, 6), (1, 12)):
        module, _ = fit(
            "hybrid", workers, batch, callbacks=[ModelPruning("l1_unstructured", amount=0.5)]
        )
        masks.append(module.net[0].weight == 0)  # type: ignore[index, union-attr]
    assert 10 < int(masks[0].sum()) < 64
    assert torch.equal(*masks)


class Devices(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        assert pl_module.device == trainer.strategy.root_device == torch.device("cpu")
        assert trainer.model is pl_module and trainer.world_size == 3
        assert trainer.global_rank == trainer.local_rank == pl_module.global_rank
        assert trainer.is_global_zero == (trainer.global_rank == 0)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                assert {p.device.type for p in group["params"]} == {"cpu"}


def test_what_a_worker_says_of_itself() -> None:
    fit("hybrid", 3, 4, callbacks=[Devices()], max_epochs=1)


@pytest.mark.parametrize("when", ["fit", "validate"])
def test_a_state_of_interruption_is_the_callers_too(when: str) -> None:
    class Broken(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise LookupError("broken")

    trainer = make_trainer("hybrid", 2)
    loader = DataLoader(regression_data(), 6)
    with pytest.raises(LookupError):
        trainer.fit(Broken(), loader, loader) if when == "fit" else trainer.validate(
            Broken(), loader
        )
    assert trainer.state.status == TrainerStatus.INTERRUPTED


class Counted(RandomSampler):
    """Notes the epochs it is told."""

    epochs: list[int]

    def set_epoch(self, epoch: int) -> None:
        self.epochs = [*getattr(self, "epochs", []), epoch]


def test_a_sampler_of_the_users_own_is_told_the_epoch() -> None:
    class Looking(BoringModel):
        def on_fit_end(self) -> None:
            assert self.trainer.is_global_zero is False or sampler.epochs == [0, 1, 2]

    data = RandomDataset(32, 16)
    sampler = Counted(data, replacement=True, num_samples=16)  # or Lightning's order would do
    trainer = make_trainer("hybrid", 2, limit_val_batches=0)
    trainer.fit(Looking(), DataLoader(data, 4, sampler=sampler))


class Notes(Callback):
    """Writes down what it sees, in all kinds of places."""

    def __init__(self, losses: list[Any]) -> None:
        self.losses = losses
        self.by_epoch: dict[int, list[str]] = {}
        self.opaque = lambda: 0
        self.best: float | None = None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"])
        self.best = min(float(outputs["loss"]), self.best or 1e9)
        self.by_epoch.setdefault(trainer.current_epoch, []).append(f"{trainer.global_step}")
        module.seen += 1


class Noting(Regression):
    def __init__(self, losses: list[Any]) -> None:
        super().__init__()
        self.seen, self.own, self.given = 0, [], losses

    def configure_callbacks(self) -> Any:
        return [Notes(self.own)]

    def on_train_epoch_end(self) -> None:
        self.given.append(self.current_epoch)


@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_what_callbacks_and_the_module_have_written_down_comes_home(strategy: str) -> None:
    """Into the lists that the user holds; callbacks that the module makes come too."""
    losses: list[Any] = []
    epochs: list[int] = []
    notes = Early(losses)
    module, trainer = fit(strategy, 2, 6, Noting(epochs), callbacks=[notes], max_epochs=2)
    steps = 8 if strategy == "hybrid" else len(losses)
    assert len(losses) == steps > 1 and notes.losses is losses
    assert all(isinstance(loss, torch.Tensor) and not loss.requires_grad for loss in losses)
    assert notes.best == min(float(loss) for loss in losses)
    assert notes.by_epoch.keys() == {0, 1} and callable(notes.opaque)
    assert epochs == [0, 1] and module.given is epochs  # type: ignore[comparison-overlap]
    assert module.seen == 2 * steps
    (made,) = [c for c in trainer.callbacks if type(c) is Notes]  # type: ignore[attr-defined]
    assert len(made.losses) == steps


class Early(Notes):
    """A kind of its own, so that the module's does not replace it."""


class Fetching(Regression):
    """The flavour of ``training_step`` that fetches its mini-batches by itself."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])


def test_a_training_step_may_fetch_its_mini_batches_by_itself() -> None:
    fetching, trainer = fit("hybrid", 2, 6, Fetching, max_epochs=2)
    usual, _ = fit("hybrid", 2, 6, max_epochs=2)
    assert trainer.global_step == 8
    assert torch.equal(flat(fetching), flat(usual))
