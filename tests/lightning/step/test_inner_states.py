"""What is each worker's own, in a checkpoint: a resumed run is the uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateFinder, ModelCheckpoint
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from hybridtrain.lightning.checkpointing.periodic import PeriodicCheckpoint
from hybridtrain.lightning.step.saved_states import tell_what_is_dropped
from tests.lightning.toys import Regression, flat, make_trainer, regression_data
from tests.picking import by_default

SCHEMES: dict[str, dict[str, Any]] = {
    "local_sgd": {"exchange": {"name": "movement", "every": 4}},  # six steps an epoch
    "compressed": {"exchange": {"name": "movement", "every": 4, "compress": "int4"}},
    "post_local": {"exchange": {"name": "movement", "every": {"then": 3, "at": 5}}},
    "diloco": {
        "exchange": {"name": "movement", "every": 2},
        "update": {"name": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True},
    },
    "streaming": {
        "exchange": {"name": "streaming", "every": 4, "fragments": 2, "overlap": 1, "mix": 0.5},
        "update": {"name": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True},
    },
    "elastic": {"exchange": {"name": "elastic", "every": 3}},
    "accumulated": {"exchange": {"name": "accumulated", "n_push": 4, "n_fetch": 3}},
    "overlapped": {
        "exchange": {"name": "accumulated", "n_push": 4, "n_fetch": 3, "fetch": "overlapped"}
    },
}
NAMES = by_default(SCHEMES, "local_sgd", "streaming", "elastic", "overlapped")


def make() -> Regression:
    torch.manual_seed(5)
    return Regression(lambda p: torch.optim.Adam(p, lr=0.01)).double()


def fitted(
    folder: Path, options: dict[str, Any], workers: int = 2, ckpt: Path | None = None, **rest: Any
) -> Any:
    module, loader = make(), DataLoader(regression_data(48, torch.float64), 4)
    strategy = HybridStrategy(rest.pop("policy", "hybrid"), **options)
    every_two = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    settings = {"max_epochs": 3, "callbacks": [every_two], "enable_checkpointing": True, **rest}
    trainer = make_trainer(strategy, workers, **settings)
    # Validated in the middle of epochs, which is no step of training.
    trainer.fit(module, loader, loader, ckpt_path=ckpt, weights_only=True)
    return module


@pytest.mark.wide
@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    whole = fitted(tmp_path / "whole", SCHEMES[name], val_check_interval=2)
    for step in (2, 4, 12):  # in the middle of the first epoch; after the second
        saved, folder = tmp_path / "whole" / f"step={step}.ckpt", tmp_path / f"from {step}"
        resumed = fitted(folder, SCHEMES[name], ckpt=saved, val_check_interval=2)
        assert all(map(torch.equal, whole.parameters(), resumed.parameters())), step
        last = tmp_path / "whole" / "step=16.ckpt", folder / "step=16.ckpt"
        one, other = (torch.load(path, weights_only=True)["optimizer_states"][0] for path in last)
        assert set(one["workers"]) == {0, 1}
        assert torch.equal(*(x["workers"][1]["state"][0]["exp_avg"] for x in (one, other)))
        assert not torch.equal(one["state"][0]["exp_avg"], one["workers"][1]["state"][0]["exp_avg"])
        make().configure_optimizers().load_state_dict(one)  # plain torch takes it, too


@pytest.mark.parametrize("name", by_default(SCHEMES, "overlapped"))
def test_an_evaluation_and_a_checkpoint_change_nothing(name: str, tmp_path: Path) -> None:
    often = fitted(tmp_path, SCHEMES[name], val_check_interval=1)
    never = fitted(tmp_path, SCHEMES[name], limit_val_batches=0, callbacks=[])
    assert all(map(torch.equal, often.parameters(), never.parameters()))


class Looks(pl.Callback):
    """Saves behind each mini-batch, and wherever something is saved or validated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        before = flat(pl_module)
        trainer.save_checkpoint(self.folder / "weights.ckpt", weights_only=True)
        trainer.save_checkpoint(self.folder / "all.ckpt")
        assert trainer.is_last_batch or torch.equal(flat(pl_module), before)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        seen = trainer.strategy.broadcast(flat(pl_module))
        between = trainer.global_step % 4 > 0 and pl_module.global_rank > 0
        assert torch.equal(flat(pl_module), seen) != between, "each has its own"

    def _look(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step:
            seen = flat(pl_module)
            assert torch.equal(seen, trainer.strategy.broadcast(seen)), "all see the masters"

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._look(trainer, pl_module)

    on_validation_end = on_validation_start

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        if "optimizer_states" in checkpoint:
            self._look(trainer, pl_module)
        saved = torch.cat([value.flatten() for value in checkpoint["state_dict"].values()])
        assert torch.equal(saved, flat(pl_module))


def test_all_see_the_masters_wherever_one_looks_and_train_on_from_their_own(
    tmp_path: Path,
) -> None:
    options = {"max_epochs": 1, "val_check_interval": 2, "callbacks": [Looks(tmp_path)]}
    module = fitted(tmp_path, SCHEMES["local_sgd"], **options)
    for name in ("weights.ckpt", "all.ckpt"):
        saved = torch.load(tmp_path / name, weights_only=True)["state_dict"]
        assert all(map(torch.equal, saved.values(), module.state_dict().values()))


def test_a_checkpoint_of_one_worker_alone_is_of_the_last_exchange(tmp_path: Path) -> None:
    """What all have saved together in between goes on from the step that it is of."""
    alone = PeriodicCheckpoint(str(tmp_path), every_updates=1, keep=99)
    together = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    weights = ModelCheckpoint(
        tmp_path / "weights", every_n_train_steps=1, save_top_k=-1, save_weights_only=True
    )
    callbacks = [alone, together, weights]
    options = {"max_epochs": 1, "callbacks": callbacks, "accumulate_grad_batches": 2}
    fitted(tmp_path, {"exchange": {"name": "movement", "every": 2}}, 1, **options)
    found = {}
    for path in sorted(tmp_path.glob("*.ckpt")):
        found[path.stem] = torch.load(path, weights_only=True)["hybridtrain"]["batches"]
    assert found == {
        **{f"periodic-{step}": step // 2 * 4 for step in range(1, 7)},
        **{f"step={step}": step * 2 for step in (2, 4, 6)},
    }


@pytest.mark.parametrize("name", by_default(["local_sgd", "elastic", "streaming"], "local_sgd"))
def test_a_checkpoint_that_one_worker_makes_alone_changes_nothing(
    name: str, tmp_path: Path
) -> None:
    alone = PeriodicCheckpoint(str(tmp_path), every_updates=1, keep=99)
    often = fitted(tmp_path, SCHEMES[name], callbacks=[alone])
    never = fitted(tmp_path, SCHEMES[name], callbacks=[])
    assert all(map(torch.equal, often.parameters(), never.parameters()))
    made = {torch.load(x, weights_only=True)["global_step"] for x in tmp_path.glob("periodic*")}
    # In lock-step, steps that the masters lack do not count: one state for each mean.
    assert len(made) == {"local_sgd": 6, "streaming": 10}.get(name, 18)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (3, 2, "of 3 workers and 2 train: those of workers from 2 on are dropped"),
        (2, 3, "of 2 workers and 3 train: the others begin with that of worker 0"),
    ],
)
def test_a_checkpoint_of_another_number_of_workers_says_which_workers_states_are_kept(
    before: int, now: int, said: str, tmp_path: Path
) -> None:
    fitted(tmp_path, SCHEMES["elastic"], before, max_epochs=1)
    fitted(tmp_path / "now", SCHEMES["elastic"], now, tmp_path / "step=4.ckpt", max_epochs=2)
    saved = torch.load(next((tmp_path / "now").glob("*.ckpt")), weights_only=True)
    assert set(saved["optimizer_states"][0]["workers"]) == set(range(now))
    with pytest.warns(UserWarning, match=said):
        tell_what_is_dropped(dict.fromkeys(range(before)), now)


@pytest.mark.parametrize(
    "policy", ["async", pytest.param({"name": "grace", "window_s": 0.05}, marks=pytest.mark.slow)]
)
def test_where_workers_run_freely_the_end_of_an_epoch_has_all(policy: Any, tmp_path: Path) -> None:
    at_end = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    options = SCHEMES["elastic" if policy == "async" else "local_sgd"]
    fitted(tmp_path, options, policy=policy, callbacks=[at_end])
    saved = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)["optimizer_states"][0]
    assert set(saved["workers"]) == {0, 1}
    assert bool(saved["workers"][1]["parameters"]) == (policy == "async")
    fitted(tmp_path / "on", options, ckpt=tmp_path / "epoch=1.ckpt", policy=policy, callbacks=[])


def test_a_group_goes_on_with_more_workers_between_two_of_its_means(tmp_path: Path) -> None:
    """The new ones count the steps since the last mean as the others do, or all would wait."""
    inside = {"name": "local_sgd", "every": 3}
    options = {"exchange": {"name": "movement", "every": 4}, "inside": inside}
    fitted(tmp_path, options, max_epochs=1)
    more = fitted(tmp_path, options, workers=3, ckpt=tmp_path / "step=2.ckpt", max_epochs=1)
    assert bool(flat(more).isfinite().all())


class Searches(LearningRateFinder):
    """Leaves the rate as it was."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.lr_find(trainer, pl_module)
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.01


SEARCHED: dict[str, dict[str, Any]] = {
    **SCHEMES,
    "gradients": {"exchange": {"name": "gradient", "compress": "topk"}},
    "revision": {"update": {"name": "adaptive_revision", "lr": 0.05}},
}


@pytest.mark.parametrize("name", by_default(SEARCHED, "diloco", "gradients", "revision"))
def test_a_search_for_a_learning_rate_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    """No momentum of the masters, no place between two exchanges, no error of an encoding."""
    search = Searches(1e-3, 0.05, 5, early_stop_threshold=None, update_attr=False)
    found = [
        fitted(tmp_path, SEARCHED[name], callbacks=each, max_epochs=1, default_root_dir=tmp_path)
        for each in ([], [search])
    ]
    assert torch.equal(*map(flat, found))


@pytest.mark.parametrize(
    "inside", ["hybrid", pytest.param({"name": "local_sgd", "every": 3}, marks=pytest.mark.slow)]
)
def test_a_group_that_goes_on_counts_all_samples_of_its_movement(
    inside: Any, tmp_path: Path
) -> None:
    options = {"exchange": {"name": "movement", "every": 4}, "inside": inside}
    options["batch_size_per_worker"] = [2, 6]
    whole = fitted(tmp_path, options, max_epochs=1)
    resumed = fitted(tmp_path / "on", options, ckpt=tmp_path / "step=2.ckpt", max_epochs=1)
    for run in whole, resumed:
        assert run.trainer.strategy.run_stats()["samples_per_worker"] == [12, 36]


def test_workers_that_become_a_group_count_no_sample_of_an_earlier_epoch(tmp_path: Path) -> None:
    options: dict[str, Any] = {"exchange": {"name": "movement", "every": 4}}
    fitted(tmp_path, options, max_epochs=1)
    resumed = fitted(
        tmp_path / "on", options | {"inside": "hybrid"}, ckpt=tmp_path / "step=6.ckpt", max_epochs=2
    )
    assert resumed.trainer.strategy.run_stats()["samples"] == 48
