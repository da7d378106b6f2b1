"""A run that goes on draws the random numbers that would have come next."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, SubsetRandomSampler

from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.checkpoint_content import check_content
from tests.lightning.checkpointing.test_resume import (
    Census,
    Interrupting,
    N,
    SaveAt,
    fitted,
    same,
)
from tests.lightning.toys import Regression, flat, make_trainer, regression_data
from tests.picking import by_default


class Noisy(Regression):
    """Dropout."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.Adam(parameters, lr=0.01))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        out = torch.nn.functional.dropout(self.net(x), 0.3)
        return (out - y).square().mean()


class Noisier(Noisy):
    """And numbers from everywhere."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (1 + random.random() + float(np.random.rand()))


class Unequal(Noisier):
    """Each worker draws another number of them, as it does for recordings of other lengths."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for _ in range(self.global_rank + 1):
            loss = super().training_step(batch, batch_idx)
        return loss


class UnequalTorch(Noisy):
    """The same, with torch's numbers alone."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        torch.rand(self.global_rank + 1)
        return super().training_step(batch, batch_idx)


class Apart(Noisy):
    """Seeds its workers differently."""

    def on_train_start(self) -> None:
        torch.manual_seed(self.global_rank)


def noisy(
    folder: Path,
    *callbacks: Any,
    ckpt: Path | None = None,
    kind: Any = Noisy,
    n: int = 48,
    policy: str = "hybrid",
    **options: Any,
) -> tuple[torch.Tensor, dict[str, Any]]:
    pl.seed_everything(7, verbose=False)
    keep = ModelCheckpoint(folder, save_last=True, filename="any")
    options = {"max_epochs": 3, "enable_checkpointing": True} | options
    trainer = make_trainer(policy, 2, callbacks=[*callbacks, keep], **options)
    module = kind()
    loader = DataLoader(regression_data(n), batch_size=4, shuffle=True)
    validation = DataLoader(regression_data(8), batch_size=4)
    trainer.fit(module, loader, validation, ckpt_path=ckpt, weights_only=ckpt and True)
    return flat(module), torch.load(folder / "last.ckpt", weights_only=True)


@pytest.mark.parametrize(
    ("at", "epoch", "accumulate"), by_default([(2, 1, 1), (6, 0, 1), (3, 1, 2)], (3, 1, 2))
)
def test_dropout_goes_on_to_the_same_bits(
    at: int, epoch: int, accumulate: int, tmp_path: Path
) -> None:
    path = tmp_path / "half.ckpt"
    kind = Noisy if accumulate > 1 else Noisier  # in the middle of a step
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "kind": kind}
    whole, last = noisy(tmp_path / "a", SaveAt(path, at, epoch), **options)
    torch.manual_seed(99)
    resumed, end = noisy(tmp_path / "b", ckpt=path, **options)
    assert same(end["optimizer_states"], last["optimizer_states"])
    assert torch.equal(resumed, whole)


def test_dropout_resumed_between_two_epochs_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    noisy(tmp_path / "a", max_epochs=2, kind=Noisier)
    resumed, _ = noisy(tmp_path / "b", ckpt=tmp_path / "a" / "last.ckpt", kind=Noisier)
    whole, _ = noisy(tmp_path / "c", kind=Noisier)
    assert torch.equal(resumed, whole)


class Reloading(pl.LightningDataModule):
    """Its loaders draw where they are made and iterated; ``drawn``: by a sampler of its own."""

    def __init__(self, drawn: bool, processes: int) -> None:
        super().__init__()
        self.drawn, self.processes = drawn, processes

    def train_dataloader(self) -> Any:
        data = regression_data(48)
        sampler = SubsetRandomSampler(range(40)) if self.drawn else None
        return DataLoader(data, 4, sampler=sampler, num_workers=self.processes)


@pytest.mark.parametrize(
    ("drawn", "processes", "every"), [(False, 0, 1), (True, 0, 2), (True, 1, 0), (True, 1, 1)]
)
def test_between_two_epochs_loaders_draw_what_would_have_come_next(
    drawn: bool, processes: int, every: int, tmp_path: Path
) -> None:
    path = tmp_path / "third.ckpt"

    def trained(ckpt: Path | None, *callbacks: Any) -> torch.Tensor:
        pl.seed_everything(7, verbose=False)
        options = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": every}
        trainer = make_trainer("hybrid", 2, callbacks=[*callbacks], **options)
        module = Noisier()
        data = Reloading(drawn, processes)
        trainer.fit(module, datamodule=data, ckpt_path=ckpt, weights_only=ckpt and True)
        return flat(module)

    whole = trained(None, Ended(path))
    assert torch.equal(trained(path), whole)


class Ended(pl.Callback):
    """All workers write a checkpoint where the second epoch ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


# In the middle of a round of `synchronous` a checkpoint has one worker's (docs/limits.md).
WHERE = [(x, at) for x in ("hybrid", "local_sgd", "diloco", "sign_sgd") for at in (None, 3, 5)]


@pytest.mark.parametrize("n", by_default([48, 47, 41], 41))
@pytest.mark.parametrize(
    ("strategy", "at"),
    by_default([*WHERE, ("synchronous", None)], ("hybrid", None), ("hybrid", 3)),
)
def test_each_worker_goes_on_with_its_own_numbers(
    strategy: str, at: int | None, n: int, tmp_path: Path
) -> None:
    """From the end of an epoch, and from within one; some workers have no data in a last step."""
    path = tmp_path / "some.ckpt"
    options: dict[str, Any] = {"kind": Unequal, "policy": strategy, "n": n}
    if at is None:
        noisy(tmp_path / "a", max_epochs=2, **options)
        path = tmp_path / "a" / "last.ckpt"
    else:
        noisy(tmp_path / "a", SaveAt(path, at, 1), **options)
    assert sorted(torch.load(path, weights_only=True)["hybridtrain"]["dice_of"]) == [1]
    torch.manual_seed(99)
    resumed, _ = noisy(tmp_path / "b", ckpt=path, **options)
    whole, _ = noisy(tmp_path / "c", **options)
    assert torch.equal(resumed, whole)


def test_after_an_interrupt_each_worker_goes_on_with_its_own_numbers(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    options: dict[str, Any] = {"kind": UnequalTorch, "max_epochs": 4}
    with pytest.raises(SystemExit):
        noisy(tmp_path / "a", Interrupting(), **options)
    signal.signal(signal.SIGINT, handler)
    resumed, _ = noisy(
        tmp_path / "b", ckpt=tmp_path / "a" / "interrupted/interrupted.ckpt", **options
    )
    whole, _ = noisy(tmp_path / "c", **options)
    assert torch.equal(resumed, whole)


def test_workers_that_were_seeded_apart_stay_apart(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    noisy(tmp_path / "a", SaveAt(path, 2, 1), kind=Apart)
    seen: list[Any] = []

    class Telling(Apart):
        def on_train_batch_end(self, *_: Any) -> None:
            if not seen:
                seen.append(self.all_gather(torch.get_rng_state().to(torch.int64)))
                assert not torch.equal(seen[0][0], seen[0][1])

    noisy(tmp_path / "b", ckpt=path, kind=Telling)


def test_a_mini_batch_that_an_interrupt_cut_short_draws_its_numbers_again(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        noisy(tmp_path / "a", Interrupting(), max_epochs=4)
    signal.signal(signal.SIGINT, handler)
    resumed, _ = noisy(
        tmp_path / "b", ckpt=tmp_path / "a" / "interrupted/interrupted.ckpt", max_epochs=4
    )
    whole, _ = noisy(tmp_path / "c", max_epochs=4)
    assert torch.equal(resumed, whole)


def test_a_worker_that_has_nothing_left_in_the_epoch_goes_on_to_the_same_bits(
    tmp_path: Path,
) -> None:
    """One sample is left, so the second worker draws no number before the next epoch."""
    path = tmp_path / "half.ckpt"
    options: dict[str, Any] = {"kind": Noisier, "n": 9, "max_epochs": 2, "limit_val_batches": 0}
    whole, last = noisy(tmp_path / "a", SaveAt(path, 1), **options)
    resumed, end = noisy(tmp_path / "b", ckpt=path, **options)
    assert torch.equal(resumed, whole)
    assert same(end["optimizer_states"], last["optimizer_states"])


def test_workers_that_were_seeded_apart_begin_the_epoch_behind_a_finished_one(
    tmp_path: Path,
) -> None:
    """All have had their mini-batches, and only one worker still has numbers to go on with."""
    path, options = tmp_path / "end.ckpt", {"n": 8, "max_epochs": 2, "limit_val_batches": 0}
    noisy(tmp_path / "a", SaveAt(path, 1), kind=Apart, **options)
    _, end = noisy(tmp_path / "b", ckpt=path, kind=Apart, **options)
    assert end["global_step"] == 2


class Seeded(Census):
    """By the rank, if the workers are to be ``apart``."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart = apart

    def on_train_start(self) -> None:
        if self.apart:
            torch.manual_seed(self.global_rank)


@pytest.mark.slow
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("validates", [True, False])
@pytest.mark.parametrize("n_left", [0, 1, 4])
@pytest.mark.parametrize("policy", ["hybrid", "k_async", "async", "ssp", "hogwild"])
def test_however_little_is_left_of_the_epoch_all_workers_go_on_to_the_next(
    policy: str, n_left: int, validates: bool, apart: bool, tmp_path: Path
) -> None:
    """From a file in mid-epoch through two epochs; then from one at an epoch's end, once more."""
    path, module = tmp_path / "some.ckpt", Seeded(apart)
    options: dict[str, Any] = {} if validates else {"limit_val_batches": 0}
    fitted("hybrid", 1, 1, module, callbacks=[SaveAt(path, N - n_left)], **options)
    options["enable_checkpointing"] = True
    for n_epochs in (2, 3):
        keep = ModelCheckpoint(tmp_path, save_last=True, filename="any")
        module = Seeded(apart)
        trainer = fitted(
            policy, 2, 4, module, ckpt_path=path, max_epochs=n_epochs, callbacks=[keep], **options
        )
        assert trainer.current_epoch == n_epochs
        path = tmp_path / "last.ckpt"


@pytest.mark.parametrize("whose", ["dice", "dice_of"])
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("torch", 5),
        ("torch", torch.zeros(3, dtype=torch.uint8)),
        ("python", (3, torch.zeros(2, dtype=torch.int32), None)),
        ("numpy", ("MT19937", torch.zeros(10, dtype=torch.int32), 0, 0, 0.0)),
        ("numpy", ()),
    ],
)
def test_states_that_no_generator_takes_are_refused_in_one_line(
    whose: str, kind: str, value: Any, tmp_path: Path
) -> None:
    _, content = noisy(tmp_path, max_epochs=1)
    check_content(content, "ckpt=x", True)
    states = content["hybridtrain"][whose]
    (states[1] if whose == "dice_of" else states)[kind] = value
    before = torch.get_rng_state()
    with pytest.raises(UserError, match=rf"{whose}.*must be a mapping of states of random number"):
        check_content(content, "ckpt=x", True)
    assert torch.equal(torch.get_rng_state(), before)
