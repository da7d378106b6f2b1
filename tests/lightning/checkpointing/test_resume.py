"""Going on in the middle of an epoch: each sample exactly once over both halves.

``Census`` writes down in its weights which samples are behind them: each adds 1 / (the size of its
global mini-batch) to a weight of its own, exactly, so a weight of 1/8 has been trained on once.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, RandomSampler, Sampler, TensorDataset

from hybridtrain import HybridStrategy
from hybridtrain.engine.samplers import EpochPlan, Seeded
from hybridtrain.engine.worlds.worker_exit import WorkerDied
from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.mid_epoch import read
from hybridtrain.lightning.checkpointing.saved_counters import count_from_zero
from tests.lightning.toys import Regression, flat, make_trainer, regression_data
from tests.picking import by_default

N = 48


class Census(pl.LightningModule):
    """One weight for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.nn.Parameter(torch.zeros(N))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return -self.seen[batch[0]].mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("epoch", float(self.trainer.current_epoch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class SaveAt(Callback):
    """Worker 0 writes a checkpoint when its mini-batch ``at`` of ``epoch`` ends.

    The others, who may run freely, leave it some mini-batches until then.
    """

    def __init__(self, path: Path, at: int, epoch: int = 0) -> None:
        self.path, self.at, self.epoch = path, at, epoch

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (trainer.current_epoch, batch_idx + 1) == (self.epoch, self.at):
            trainer.save_checkpoint(self.path)
            until_s = time.monotonic() + 5
            while not self.path.exists() and time.monotonic() < until_s:
                time.sleep(0.001)


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(N))


def fitted(
    strategy: Any,
    workers: int,
    batch_size: int,
    module: pl.LightningModule,
    loader: Any = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> pl.Trainer:
    pl.seed_everything(7, verbose=False)
    trainer = make_trainer(strategy, workers, **({"max_epochs": 1} | options))
    if loader is None:
        loader = DataLoader(numbers(), batch_size=batch_size, shuffle=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader, DataLoader(numbers(), batch_size=8), ckpt_path=ckpt_path)
    return trainer


def weights_in(path: Path) -> torch.Tensor:
    return torch.load(path, weights_only=True)["state_dict"]["seen"]


def left_in(path: Path) -> set[int]:
    """Positions that the checkpoint says are to be done."""
    (loader,) = torch.load(path, weights_only=True)["hybridtrain"]["loaders"]
    return {p for start, stop in loader["spans"] for p in range(start, stop)}


@pytest.mark.parametrize("policy", ["hybrid", "async"])
@pytest.mark.parametrize(
    ("workers", "batch_size"),
    by_default([(3, 4), (2, 6), (1, 4), (4, 2), (5, 1)], (3, 4)),
)
def test_each_sample_is_seen_once_over_both_halves_whoever_goes_on(
    policy: str, workers: int, batch_size: int, tmp_path: Path
) -> None:
    path = tmp_path / "half.ckpt"
    fitted(policy, 3, 4, Census(), callbacks=[SaveAt(path, 1)])
    first = weights_in(path) > 0
    assert 0 < int(first.sum()) < N
    assert len(left_in(path)) == N - int(first.sum())
    module = Census()
    trainer = fitted(policy, workers, batch_size, module, ckpt_path=path)
    size = workers * batch_size if policy == "hybrid" else batch_size
    second = (module.seen.detach() - weights_in(path))[~first]
    assert torch.equal(module.seen.detach()[first], weights_in(path)[first]), "none twice"
    assert float(second.min()) > 0, "none left out"
    whole = torch.isclose(second, torch.tensor(1 / size))
    assert int((~whole).sum()) < size, "all but the last in mini-batches of their size"
    assert float(trainer.callback_metrics["epoch"]) == 0.0, "validated at the end of the epoch"
    assert trainer.current_epoch == 1


@pytest.mark.parametrize("other", ["hybrid", "async"])
def test_lock_step_may_go_on_freely_and_back(other: str, tmp_path: Path) -> None:
    one = "async" if other == "hybrid" else "hybrid"
    path = tmp_path / "half.ckpt"
    fitted(one, 2, 4, Census(), callbacks=[SaveAt(path, 1)])
    module = Census()
    fitted(other, 3, 4, module, ckpt_path=path, max_epochs=2)
    first = weights_in(path) > 0
    once = {1 / 8, 1 / 4, 1 / 12}
    assert int((module.seen == 0).sum()) == 0
    assert all(
        any(abs(total - a - b) < 1e-6 for a in once for b in (1 / 4, 1 / 12))
        for total in module.seen.tolist()
    ), "two epochs, each once"
    assert 0 < int(first.sum()) < N


ADAM = partial(torch.optim.Adam, lr=0.01)


def regression(
    strategy: Any, workers: int, path: Path | None = None, **options: Any
) -> tuple[torch.Tensor, dict[str, Any], pl.Trainer]:
    """Final weights and the final checkpoint."""
    sampler = options.pop("sampler", None)
    data = options.pop("data", None) or regression_data(44)
    shuffle = {"shuffle": True} if sampler is None else {"sampler": sampler}
    loader = DataLoader(data, batch_size=4, num_workers=options.pop("num_workers", 0), **shuffle)
    module, last = Regression(options.pop("make", ADAM)), options.pop("folder") / "last.ckpt"
    keep = ModelCheckpoint(last.parent, save_last=True, filename="any")
    callbacks = [*options.pop("callbacks", []), keep]
    validation = DataLoader(regression_data(8), batch_size=4)
    pl.seed_everything(7, verbose=False)
    options = {"max_epochs": 3, "callbacks": callbacks, "enable_checkpointing": True} | options
    trainer = make_trainer(strategy, workers, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader, validation, ckpt_path=path)
    return flat(module), torch.load(last, weights_only=True), trainer


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, of any nesting."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options",
    by_default(
        [
            {},
            {"num_workers": 1},
            {"accumulate_grad_batches": 2},
            {"accumulate_grad_batches": 4},
            {"val_check_interval": 2},
            {"max_epochs": -1, "max_steps": 15},
            {"limit_train_batches": 5},
            {"limit_train_batches": 0.8},
            {"reload_dataloaders_every_n_epochs": 1},
            {"gradient_clip_val": 0.1},
            {"overfit_batches": 5},
        ],
        {},
        {"num_workers": 1},
        {"accumulate_grad_batches": 4},
        {"limit_train_batches": 0.8},
    ),
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()) or "plain",
)
@pytest.mark.parametrize("epoch", by_default([0, 1], 1))
def test_interrupted_and_resumed_equals_uninterrupted_to_the_bit(
    epoch: int, options: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "half.ckpt"
    save = SaveAt(path, 3, epoch)
    whole, last, trainer = regression("hybrid", 2, folder=tmp_path, callbacks=[save], **options)
    resumed, again, goes_on = regression("hybrid", 2, path, folder=tmp_path / "b", **options)
    assert torch.equal(resumed, whole)
    assert goes_on.global_step == trainer.global_step == last["global_step"]
    assert same(again["optimizer_states"], last["optimizer_states"])
    assert goes_on.current_epoch == trainer.current_epoch
    for counts in (again["loops"]["fit_loop"], last["loops"]["fit_loop"]):
        # Where an accumulation was cut in two, its beginning cleared the gradients twice.
        del counts["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["zero_grad"]
    assert same(again["loops"]["fit_loop"], last["loops"]["fit_loop"])


def test_a_checkpoint_within_an_accumulation_goes_on_from_the_last_step(tmp_path: Path) -> None:
    """Half-accumulated gradients are not in the file, so their mini-batches are not seen."""
    path = tmp_path / "half.ckpt"
    options: dict[str, Any] = {"accumulate_grad_batches": 2}
    fitted("hybrid", 2, 4, Census(), callbacks=[SaveAt(path, 3)], **options)
    assert left_in(path) == set(range(16, N))
    assert torch.load(path, weights_only=True)["hybridtrain"]["batches"] == 2
    module = Census()
    trainer = fitted("hybrid", 2, 4, module, ckpt_path=path, **options)
    assert torch.equal(module.seen.detach(), torch.full((N,), 1 / 16))
    assert trainer.global_step == 3


class Shuffled(Sampler[int]):
    """A user's own random sampler."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(N).numpy())  # numbers of its own


@pytest.mark.parametrize("policy", by_default(["hybrid", "async"], "async"))
def test_the_rest_of_a_random_order_is_in_the_checkpoint(policy: str, tmp_path: Path) -> None:
    path, again = tmp_path / "half.ckpt", tmp_path / "again.ckpt"
    loader = DataLoader(numbers(), batch_size=4, sampler=Shuffled())
    fitted(policy, 2, 4, Census(), loader, callbacks=[SaveAt(path, 2)])
    (state,) = torch.load(path, weights_only=True)["hybridtrain"]["loaders"]
    assert sorted(state["indices"].tolist()) == torch.where(weights_in(path) == 0)[0].tolist()
    module = Census()
    # Twice interrupted, with another number of workers.
    fitted(policy, 1, 4, module, loader, ckpt_path=path, callbacks=[SaveAt(again, 4)])
    assert int((module.seen == 0).sum()) == 0
    fitted(policy, 3, 2, module := Census(), loader, ckpt_path=again)
    assert int((module.seen == 0).sum()) == 0
    seen = weights_in(again) > 0
    assert torch.equal(module.seen.detach()[seen], weights_in(again)[seen])


def test_other_sizes_of_mini_batches_may_go_on(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    fitted(
        HybridStrategy(batch_size_per_worker=[6, 2]), 2, 1, Census(), callbacks=[SaveAt(path, 3)]
    )
    assert left_in(path) == set(range(24, N))
    module = Census()
    trainer = fitted(HybridStrategy(batch_size_per_worker=[1, 5]), 2, 1, module, ckpt_path=path)
    values = sorted({round(1 / value) for value in module.seen.tolist()})
    assert values == [6, 8] and trainer.global_step == 3 + 4


def test_the_epochs_after_a_resumed_one_have_their_ordinary_length(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    fitted("hybrid", 1, 4, Census(), callbacks=[SaveAt(path, 6)])
    module = Census()
    steps: list[int] = []

    class Lengths(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            steps.append(trainer.global_step)
            assert trainer.num_training_batches == (9 if trainer.current_epoch == 0 else 6)

    trainer = fitted("hybrid", 2, 4, module, ckpt_path=path, max_epochs=3, callbacks=[Lengths()])
    assert trainer.global_step == 6 + 3 + 6 + 6
    totals = {round(value * 8) for value in module.seen.tolist()}
    assert totals == {3, 4}  # 1/4 or 1/8 in the first, 1/8 in each of the others


def test_an_early_count_of_batches_does_not_mislead_the_samplers(tmp_path: Path) -> None:
    """``estimated_stepping_batches`` makes loaders before the checkpoint's counters are read."""

    class Cycle(Census):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            total = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
            self.total = total
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    path = tmp_path / "half.ckpt"
    for num_workers in (0, 1):
        loader = DataLoader(numbers(), batch_size=4, shuffle=True, num_workers=num_workers)
        options: dict[str, Any] = {"max_epochs": 2}
        fitted("hybrid", 2, 4, Cycle(), loader, callbacks=[SaveAt(path, 2, 1)], **options)
        module = Cycle()
        trainer = fitted("hybrid", 2, 4, module, loader, ckpt_path=path, **options)
        assert trainer.global_step == 12
        assert torch.equal(module.seen.detach(), torch.full((N,), 2 / 8))


class Drops(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = torch.nn.Dropout(0.3)


@pytest.mark.parametrize("workers", [1, 2])
def test_after_a_sanity_check_dropout_goes_on_where_the_epoch_ended(
    workers: int, tmp_path: Path
) -> None:
    done = []
    for path in (None, tmp_path / "epoch=0.ckpt"):
        pl.seed_everything(7, verbose=False)
        saves = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1 if path is None else 0)
        options: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 2}
        trainer = make_trainer(
            "hybrid", workers, callbacks=[saves], enable_checkpointing=True, **options
        )
        module, data = Drops(), regression_data()
        loaders = DataLoader(data, 4, shuffle=True), DataLoader(data, 8)
        trainer.fit(module, *loaders, ckpt_path=path, weights_only=False)
        done.append(flat(module))
    assert torch.equal(*done)


def test_a_count_of_rows_below_zero_is_not_saved(tmp_path: Path) -> None:
    """It is -1 where no update has been made in a first mini-batch, as within an evaluation."""
    trainer = make_trainer("hybrid", 1, max_epochs=1)
    trainer.fit(Census(), DataLoader(numbers(), 4))
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    checkpoint = torch.load(tmp_path / "end.ckpt", weights_only=True)
    loops = checkpoint["loops"]["fit_loop"]
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = -1
    count_from_zero(checkpoint)
    assert loops["epoch_loop.state_dict"]["_batches_that_stepped"] == 0


class Halved(Census):
    """Worker 1 is slow; the learning rate is halved behind each epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.2 * (self.global_rank == 1))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def test_a_file_of_an_epoch_that_others_go_on_with_has_its_learning_rate(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=1)
    options: dict[str, Any] = {"callbacks": [saves], "enable_checkpointing": True, "max_epochs": 2}
    fitted("async", 2, 4, Halved(), DataLoader(numbers(), 4), **options)
    found = [torch.load(path, weights_only=True) for path in tmp_path.glob("*.ckpt")]
    left = [any(loader["spans"] for loader in x["hybridtrain"]["loaders"]) for x in found]
    for each, goes_on in zip(found, left, strict=True):
        (schedule,), (group,) = each["lr_schedulers"], each["optimizer_states"][0]["param_groups"]
        epoch = each["epoch"] + (not goes_on)
        assert (schedule["last_epoch"], group["lr"]) == (epoch, 0.5**epoch)
    assert True in left


def test_several_loaders_go_on_each_from_its_own_place(tmp_path: Path) -> None:
    class Pair(Census):
        def __init__(self) -> None:
            super().__init__()
            self.short = torch.nn.Parameter(torch.zeros(20))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return -self.seen[batch["long"][0]].mean() - self.short[batch["short"][0]].mean()

    def loaders() -> CombinedLoader:
        short = DataLoader(TensorDataset(torch.arange(20)), batch_size=2, shuffle=True)
        long = DataLoader(numbers(), batch_size=4, shuffle=True)
        return CombinedLoader({"long": long, "short": short}, "max_size_cycle")

    path = tmp_path / "half.ckpt"
    whole = Pair()
    fitted("hybrid", 1, 4, whole, loaders(), callbacks=[SaveAt(path, 11)])
    laps = [s["lap"] for s in torch.load(path, weights_only=True)["hybridtrain"]["loaders"]]
    assert laps == [0, 1]
    module = Pair()
    trainer = fitted("hybrid", 1, 4, module, loaders(), ckpt_path=path)
    assert trainer.global_step == 12
    assert torch.equal(flat(module), flat(whole))


# ---- other people's checkpoints, and ours elsewhere -------------------------------------------


def without_our_key(path: Path) -> Path:
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["hybridtrain"]
    torch.save(checkpoint, path)
    return path


def test_a_checkpoint_has_one_key_more_than_lightnings_own(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.ckpt", tmp_path / "theirs.ckpt"
    fitted("hybrid", 2, 4, Census(), callbacks=[SaveAt(ours, 2)])
    fitted("auto", 1, 8, Census(), callbacks=[SaveAt(theirs, 2)])
    keys = [set(torch.load(path, weights_only=True)) for path in (ours, theirs)]
    assert keys[0] - keys[1] == {"hybridtrain"} and not keys[1] - keys[0]
    fitted("auto", 1, 8, Census(), ckpt_path=ours)
    assert torch.load(ours, weights_only=True)["hybridtrain"]["format"] == 1


def test_a_checkpoint_without_the_hybridtrain_key_resumes_with_the_same_mini_batches_and_says_so(
    tmp_path: Path,
) -> None:
    path = tmp_path / "half.ckpt"
    fitted("hybrid", 2, 4, whole := Census(), callbacks=[SaveAt(path, 2)], max_epochs=2)
    without_our_key(path)
    module = Census()
    fitted("hybrid", 2, 4, module, ckpt_path=path, max_epochs=2)
    assert torch.equal(flat(module), flat(whole))
    with pytest.warns(UserWarning, match="epoch 0 by another strategy; its 2 mini-batches"):
        read(torch.load(path, weights_only=True))


def test_under_ddp_an_epoch_is_gone_on_with_as_well(tmp_path: Path) -> None:
    """Written by ddp in the middle of an epoch; the order is the same, and so is what is left."""
    path = tmp_path / "half.ckpt"
    fitted("ddp_fork", 2, 4, whole := Census(), callbacks=[SaveAt(path, 2)])
    fitted("hybrid", 2, 4, module := Census(), ckpt_path=path)
    assert torch.equal(flat(module), flat(whole))


def test_a_checkpoint_between_two_epochs_needs_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    fitted(
        "hybrid",
        2,
        4,
        Census(),
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        enable_checkpointing=True,
    )
    module = Census()
    path = folder / "last.ckpt"
    assert torch.load(path, weights_only=True)["hybridtrain"]["loaders"] == []
    fitted("hybrid", 3, 4, module, ckpt_path=path, max_epochs=2)
    assert torch.allclose(module.seen, torch.full((N,), 1 / 8 + 1 / 12))


def test_a_format_of_the_future_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    fitted("hybrid", 2, 4, Census(), callbacks=[SaveAt(path, 2)])
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["hybridtrain"]["format"] = 99
    torch.save(checkpoint, path)
    with pytest.raises(UserError, match=r"format 99.*reads up to 1"):
        fitted("hybrid", 2, 4, Census(), ckpt_path=path)


def test_a_data_set_of_another_length_begins_its_epoch_anew(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    fitted("hybrid", 2, 4, Census(), callbacks=[SaveAt(path, 2)])
    loader = DataLoader(TensorDataset(torch.arange(40)), batch_size=4, shuffle=True)
    module = Census()
    fitted("hybrid", 2, 4, module, loader, ckpt_path=path)
    assert bool((module.seen - weights_in(path))[:40].gt(0).all())
    resumed = read(torch.load(path, weights_only=True))
    assert resumed is not None
    with pytest.warns(UserWarning, match="over 48 samples, now there are 40"):
        begun = resumed.begun(0, EpochPlan(Seeded(40, 7), 40, (4, 4), False))
    assert begun is not None and (begun.spans, begun.batches) == (((0, 40),), 2)


def test_a_random_sampler_with_replacement_is_not_drawn_again(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    sampler = RandomSampler(numbers(), replacement=True, num_samples=32)
    loader = DataLoader(numbers(), batch_size=4, sampler=sampler)
    whole = Census()
    fitted("hybrid", 2, 4, whole, loader, callbacks=[SaveAt(path, 2)])
    module = Census()
    fitted("hybrid", 2, 4, module, loader, ckpt_path=path)
    assert torch.equal(flat(module), flat(whole))


class Interrupting(Callback):
    """Worker 1 presses Ctrl-C in the middle of an epoch, when all have made a step."""

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_rank == 1 and batch_idx == 3:
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(0.3)  # so that it arrives before the epoch ends


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["hybrid", "async"])
@pytest.mark.parametrize("accumulate", by_default([1, 2], 2))
def test_after_ctrl_c_each_sample_is_seen_once(
    policy: str, accumulate: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    keep = ModelCheckpoint(tmp_path)
    saving = {"callbacks": [Interrupting(), keep], "enable_checkpointing": True}
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        fitted(policy, 2, 2, Census(), **options, **saving)
    signal.signal(signal.SIGINT, handler)  # Lightning ignores the signal from then on
    path = tmp_path / "interrupted/interrupted.ckpt"
    seen = weights_in(path) > 0
    assert int(seen.sum()) > 0
    assert len(left_in(path)) == N - int(seen.sum())
    module = Census()
    fitted(policy, 2, 2, module, ckpt_path=path, **options)
    once = 1 / (2 * (2 if policy == "hybrid" else 1)) / accumulate
    values = {round(value / once, 4) for value in module.seen.tolist()}
    assert values <= {1.0, float(accumulate)}, "an epoch's last accumulation may be a short one"
    assert torch.equal(module.seen.detach()[seen], weights_in(path)[seen])


class DyingLast(Census):
    """Worker 1 is killed in its second mini-batch, when the others have no more to do."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def test_an_epoch_is_not_over_while_others_are_in_it(tmp_path: Path) -> None:
    saving = {"callbacks": [ModelCheckpoint(tmp_path)], "enable_checkpointing": True}
    with pytest.raises(WorkerDied):
        fitted("async", 3, 4, DyingLast(), limit_val_batches=0, **saving)
    path = tmp_path / "interrupted/interrupted.ckpt"
    assert 0 < len(left_in(path)) == N - int((weights_in(path) > 0).sum())
    module = Census()
    fitted("async", 3, 4, module, ckpt_path=path, limit_val_batches=0)
    assert torch.equal(module.seen.detach(), torch.full((N,), 1 / 4))


def test_fetching_ahead_loses_nothing_when_an_iteration_begins_anew() -> None:
    """Lightning makes the iterator of a second ``fit`` twice, and throws the first away."""
    trainer = make_trainer("async", 2, max_epochs=1)
    loader = DataLoader(numbers(), batch_size=4, shuffle=True)
    trainer.fit(module := Census(), loader)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader)
    assert torch.equal(module.seen.detach(), torch.full((N,), 3 / 4))
