"""A run that goes on ends its first epoch as every other: validation, schedules, stopping early."""

from __future__ import annotations

import os
import signal
import time
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ExponentialLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from hybridtrain.lightning.checkpointing.epoch_ends import EpochEnds
from hybridtrain.lightning.checkpointing.epoch_position import EpochPosition
from hybridtrain.lightning.checkpointing.epoch_state import EpochEvent
from hybridtrain.lightning.checkpointing.mid_epoch import ResumedEpoch
from hybridtrain.lightning.checkpointing.saved_schedules import SavedSchedules
from tests.lightning.checkpointing.test_resume import same
from tests.lightning.failover.counting import N, Scheduled
from tests.lightning.failover.test_broken_off import (
    BATCHES,
    HEAD_START_S,
    Noisy,
    assert_same,
    by_the_step,
    interrupted,
    run,
)
from tests.lightning.failover.test_coming_back import Killed
from tests.lightning.toys import make_trainer, regression_data
from tests.picking import but_slow, by_default, rotated


def plateau(monitor: str) -> Any:
    """With a first metric that no other improves upon: every later one divides the rate by ten."""
    make = partial(ReduceLROnPlateau, patience=0, threshold=1e6, threshold_mode="abs")
    return lambda optimizer: {"scheduler": make(optimizer), "monitor": monitor}


def rate(checkpoint: dict[str, Any]) -> float:
    """The learning rate that it says."""
    (schedule,) = checkpoint["lr_schedulers"]
    return float(schedule["_last_lr"][0])


def waits(checkpoint: dict[str, Any]) -> list[int]:
    """Validations without improvement so far."""
    found = (state.get("wait_count") for state in checkpoint["callbacks"].values())
    return [count for count in found if count is not None]


@pytest.mark.slow
@pytest.mark.parametrize("at", by_default([3, 6, 11], 11))
def test_a_run_resumed_in_an_epoch_that_was_broken_off_ends_as_an_undisturbed_run(
    at: int, tmp_path: Path
) -> None:
    make = partial(Noisy, schedule=plateau("val/loss"))
    whole = run(tmp_path / "whole", make)
    assert rate(whole) == pytest.approx(0.001), "the last of three epochs counts after it is saved"
    with pytest.raises(LookupError, match="broken off"):
        run(tmp_path / "broken", partial(make, at))
    path = tmp_path / "broken" / "interrupted/interrupted.ckpt"
    assert_same(run(tmp_path / "resumed", make, path), whole)


SAVING: dict[str, dict[str, Any]] = {
    "at the end of epochs": {"save_on_train_epoch_end": True, "every_n_epochs": 1},
    "after validations": {"save_on_train_epoch_end": False, "every_n_epochs": 1},
    "after steps": {"every_n_train_steps": 3},
}
TRAINED_ON: dict[str, dict[str, Any]] = {
    "validated": {},
    "validated within": {"val_check_interval": 3},
    "limited": {"limit_train_batches": 5, "val_check_interval": 2},
    "without validation": {"validation": 0},
}


CASES = [(saving, options) for saving in SAVING for options in TRAINED_ON]
CASES.remove(("after validations", "without validation"))
ONE_OF_EACH = [("at the end of epochs", "limited")]


@pytest.mark.parametrize(
    ("saving", "options"), but_slow(CASES, lambda case, _: case not in ONE_OF_EACH)
)
def test_a_run_resumed_from_any_of_its_checkpoints_ends_as_an_undisturbed_run(
    saving: str, options: str, tmp_path: Path
) -> None:
    """Also from those that callbacks write at the end of a mini-batch, a validation, an epoch."""
    validated = options != "without validation"
    make = partial(Noisy, schedule=plateau("val/loss" if validated else "train/loss"))

    def train(name: str, ckpt_path: Path | None = None) -> dict[str, Any]:
        stop = [EarlyStopping("val/loss", min_delta=1e6, patience=99)] if validated else []
        every = partial(ModelCheckpoint, save_top_k=-1, monitor="train/loss")
        keep = every(tmp_path / name, "{step}", **SAVING[saving])
        ends = every(tmp_path / name, "{epoch}", mode="max", save_on_train_epoch_end=True)
        callbacks = [*stop, keep, ends]
        run(tmp_path / name, make, ckpt_path, callbacks=callbacks, **TRAINED_ON[options])
        return torch.load(tmp_path / name / "epoch=2.ckpt", weights_only=True)

    whole = train("whole")
    steps = (TRAINED_ON[options].get("limit_train_batches") or BATCHES) * 3
    assert rate(whole) == pytest.approx(0.001)
    found = {int(path.stem[5:]): path for path in (tmp_path / "whole").glob("step=*.ckpt")}
    assert len(found) >= 2
    for step, path in sorted(found.items()):
        if step == steps and saving == "at the end of epochs":
            continue  # nothing is left to do
        resumed = train(f"from-{step}", path)
        assert waits(resumed) == waits(whole), step
        assert_same(resumed, deepcopy(whole))


def test_what_is_loaded_ahead_but_beyond_a_limit_is_not_left(tmp_path: Path) -> None:
    make = partial(Noisy, schedule=partial(StepLR, step_size=1))
    options = {"max_epochs": 2, "limit_train_batches": 5, "num_workers": 1, "validation": 0}
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=5, save_top_k=-1)
    whole = run(tmp_path / "whole", make, callbacks=[keep], **options)  # type: ignore[arg-type]
    resumed = run(tmp_path / "resumed", make, tmp_path / "step=5.ckpt", **options)  # type: ignore[arg-type]
    assert_same(resumed, whole)


def test_loaders_are_made_anew_in_the_epochs_of_an_uninterrupted_run(tmp_path: Path) -> None:
    """Each time a random number is drawn."""
    options = {"reload_dataloaders_every_n_epochs": 2, "validation": 0}
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=8, save_top_k=-1)
    whole = run(tmp_path / "whole", Noisy, callbacks=[keep], **options)  # type: ignore[arg-type]
    resumed = run(tmp_path / "resumed", Noisy, tmp_path / "step=8.ckpt", **options)  # type: ignore[arg-type]
    assert_same(resumed, whole)


class Validating(Noisy):
    """The worker fails in its mini-batch ``when`` of the first validation.

    Training draws no random numbers: which ones follow a validation that is repeated is not
    promised.
    """

    when: int | None = None
    how = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        del self.net[-1]  # Dropout

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.when and self.global_rank == self.who:
            time.sleep(HEAD_START_S)
            if self.how == "raise":
                raise LookupError("broken off")
            os.kill(*{"die": (os.getpid(), 9), "stop": (os.getppid(), signal.SIGINT)}[self.how])
            time.sleep(HEAD_START_S)
        super().validation_step(batch, batch_idx)


WITHIN: dict[str, dict[str, Any]] = {
    "at the end": {},
    "within": {"val_check_interval": 3, "max_epochs": 1},
    "of steps": {"val_check_interval": 2, "accumulate_grad_batches": 2},
}


BROKEN_OFF = [
    (*whom, how, options)
    for n, options in enumerate(WITHIN)
    for m, how in enumerate(["raise", "die", "stop"])
    for whom in rotated([(0, 0), (1, 0), (1, 1)], n + m)
]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("who", "when", "how", "options"), but_slow(BROKEN_OFF, lambda _, number: number % 14 > 0)
)
def test_a_run_resumed_in_a_validation_that_was_broken_off_ends_as_an_undisturbed_run(
    who: int, when: int, how: str, options: str, tmp_path: Path
) -> None:
    settings = {"validation": 16, **WITHIN[options]}

    def train(name: str, ckpt_path: Path | None = None, **failure: Any) -> dict[str, Any]:
        def make() -> Validating:
            module = Validating(schedule=plateau("val/loss"), who=who)
            vars(module).update(failure)
            return module

        stop = EarlyStopping("val/loss", min_delta=1e6, patience=99)
        return run(tmp_path / name, make, ckpt_path, callbacks=[stop], **settings)

    whole = train("whole")
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises((LookupError, SystemExit, RuntimeError)):
        train("broken", when=when, how=how)
    signal.signal(signal.SIGINT, handler)  # Lightning ignores the signal from then on
    assert interrupted(tmp_path / "broken")["global_step"] > 0
    resumed = train("resumed", tmp_path / "broken" / "interrupted/interrupted.ckpt")
    assert waits(resumed) == waits(whole)
    assert_same(resumed, whole)


@pytest.mark.parametrize("how", by_default(["raise", "die", "stop"], "raise"))
def test_a_run_resumed_in_a_validation_of_averaged_weights_goes_on_with_its_trained_weights(
    how: str, tmp_path: Path
) -> None:
    """Training goes on with the weights that it trains, which are not the ones being validated."""

    def train(name: str, ckpt_path: Path | None = None, **failure: Any) -> dict[str, Any]:
        def make() -> Validating:
            module = Validating()
            vars(module).update(failure)
            return module

        average = EMAWeightAveraging(decay=0.8)
        return run(tmp_path / name, make, ckpt_path, callbacks=[average], validation=16)

    whole = train("whole")
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises((LookupError, SystemExit, RuntimeError)):
        train("broken", when=0, how=how)
    signal.signal(signal.SIGINT, handler)  # Lightning ignores the signal from then on
    resumed = train("resumed", tmp_path / "broken" / "interrupted/interrupted.ckpt")
    assert same(resumed["current_model_state"], whole["current_model_state"])
    assert_same(resumed, whole)


@pytest.mark.slow
def test_a_step_that_was_under_way_as_a_validation_began_is_made_anew(tmp_path: Path) -> None:
    """What BatchNorm had seen of it is not seen twice."""
    settings = {"val_check_interval": 3, "accumulate_grad_batches": 2, "validation": 16}

    def make(when: int | None = None) -> Validating:
        module = Validating(schedule=plateau("val/loss"))
        module.when, module.how = when, "raise"
        return module

    whole = run(tmp_path / "whole", make, **settings)
    with pytest.raises(LookupError, match="broken off"):
        run(tmp_path / "broken", partial(make, 0), **settings)
    path = tmp_path / "broken" / "interrupted/interrupted.ckpt"
    assert_same(run(tmp_path / "resumed", make, path, **settings), whole)


class Late(EarlyStopping):
    """Once the first validation is over and this has heard of it: Ctrl-C, if it ``interrupts``."""

    interrupts = False

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        super().on_validation_end(trainer, module)
        if self.interrupts:
            if trainer.global_rank == 1:
                os.kill(os.getppid(), signal.SIGINT)
            time.sleep(HEAD_START_S)


def test_a_resumed_run_ends_an_epoch_whose_end_no_callback_had_seen(tmp_path: Path) -> None:
    """Callbacks that look at the end of the epoch do it when the run goes on."""

    def train(name: str, ckpt_path: Path | None = None, interrupts: bool = False) -> dict[str, Any]:
        make, stop = partial(Noisy, schedule=plateau("val/loss")), Late("val/loss", 1e6, 99)
        stop.interrupts = interrupts
        return run(tmp_path / name, make, ckpt_path, callbacks=[stop])

    whole = train("whole")
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        train("broken", interrupts=True)
    signal.signal(signal.SIGINT, handler)  # Lightning ignores the signal from then on
    broken = interrupted(tmp_path / "broken")
    assert broken["hybridtrain"]["over"] and waits(broken) == [0]
    resumed = train("resumed", tmp_path / "broken" / "interrupted/interrupted.ckpt")
    assert waits(resumed) == waits(whole) == [2]
    assert_same(resumed, whole)


class Behind(Noisy):
    """Worker 1 begins when worker 0 waits where epochs end, and fails in one mini-batch."""

    fails_at: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.fails_at is not None and self.global_rank == 1:
            if batch_idx == 0:
                time.sleep(HEAD_START_S)
            if batch_idx == self.fails_at:
                raise LookupError("broken off")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        schedules = [by_the_step(partial(ExponentialLR, gamma=0.9)), partial(StepLR, step_size=1)]
        return [optimizer], [schedule(optimizer) for schedule in schedules]


ENDED = [  # the resumed run's policy; where worker 1 fails; accumulated mini-batches
    ("async", None, "async", 0, 1),
    ("async", 5, "async", 2, 1),
    ("async", 5, "async", 4, 1),
    ("async", 5, "hybrid", 0, 1),
    ("async", 6, "async", 0, 2),
    *[(policy, limit, policy, 0, 1) for policy in ("hogwild", "downpour") for limit in (None, 5)],
]


@pytest.mark.parametrize(
    ("policy", "limit", "then", "fails_at", "every"), but_slow(ENDED, lambda _, number: number > 4)
)
def test_a_resumed_epoch_that_one_worker_had_already_ended_is_ended_once(
    policy: str, limit: int | None, then: str, fails_at: int, every: int, tmp_path: Path
) -> None:
    def train(name: str, by: str, ckpt: Path | None = None, fails_at: int | None = None) -> Any:
        module = Behind()
        module.fails_at = fails_at
        trainer = make_trainer(
            by,
            2,
            max_epochs=2,
            limit_train_batches=limit,
            accumulate_grad_batches=every,
            enable_checkpointing=True,
            default_root_dir=tmp_path / name,
        )
        held_out = DataLoader(regression_data(8), 4)
        trainer.fit(module, DataLoader(regression_data(60), 4), held_out, ckpt_path=ckpt)
        return trainer

    with pytest.raises(LookupError, match="broken off"):
        train("broken", policy, None, fails_at)
    (path,) = (tmp_path / "broken").rglob("interrupted.ckpt")
    resumed, whole = train("resumed", then, path), train("whole", policy)
    validated = [each.fit_loop.epoch_loop.val_loop.batch_progress for each in (resumed, whole)]
    assert validated[0].total.completed == validated[1].total.completed
    by_epoch = [each.lr_scheduler_configs[1].scheduler.last_epoch for each in (resumed, whole)]
    assert by_epoch == [2, 2]
    if then == "hybrid":  # three more mini-batches of each worker, and five
        assert resumed.strategy.run_stats()["samples"] == 8 * 2 * 4
    else:
        steps = 2 * 15 if limit is None else 2 * 2 * limit // every
        assert resumed.global_step == whole.global_step == steps
        rates = [each.optimizers[0].param_groups[0]["lr"] for each in (resumed, whole)]
        assert rates[0] == pytest.approx(rates[1], rel=1e-12)


def test_an_epoch_that_all_remaining_workers_have_ended_is_over(tmp_path: Path) -> None:
    """The share of a worker that is lost and does not come back is nobody's."""
    keep = ModelCheckpoint(tmp_path, "end", save_on_train_epoch_end=False)
    trainer = make_trainer(
        HybridStrategy("async", on_failure="continue"),
        2,
        max_epochs=1,
        limit_train_batches=5,
        callbacks=[Killed(tmp_path, 1, 2), keep],
        enable_checkpointing=True,
    )
    loaders = DataLoader(regression_data(60), 4), DataLoader(regression_data(8), 4)
    trainer.fit(Noisy(schedule=partial(StepLR, step_size=1)), *loaders)
    assert (tmp_path / "died").exists() and trainer.global_step < 10
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"]
    assert saved["lr_schedulers"][0]["last_epoch"] == 1


def chained(optimizer: Any) -> Any:
    return by_the_step(lambda o: ChainedScheduler([ExponentialLR(o, 0.9)]))(optimizer)


def test_saving_leaves_the_schedules_of_the_run_as_they_are(tmp_path: Path) -> None:
    """Also one that does not count its steps; the file of an epoch's end says that it is over."""

    class Chained(Noisy):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            return [optimizer], [chained(optimizer), StepLR(optimizer, 1, 0.5)]

    each = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    ends = ModelCheckpoint(tmp_path, "end", save_on_train_epoch_end=True)
    options: dict[str, Any] = {"limit_train_batches": 5, "enable_checkpointing": True}
    trainer = make_trainer("async", 2, max_epochs=1, callbacks=[each, ends], **options)
    trainer.fit(Chained(), DataLoader(regression_data(44), 4))
    assert len([*tmp_path.glob("step=*.ckpt")]) > 4
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    assert rate == pytest.approx(0.01 * 0.9**10 * 0.5, rel=1e-12)
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"]


def test_groups_that_an_optimizer_has_got_since_stay_in_its_state() -> None:
    state = {"param_groups": [{"lr": 2.0, "params": [0]}, {"lr": 3.0, "params": [1]}]}
    given = SavedSchedules([], [({"lr": 1.0},)]).give(
        {"lr_schedulers": [], "optimizer_states": [state]}
    )
    assert [group["lr"] for group in given["optimizer_states"][0]["param_groups"]] == [1.0, 3.0]


@pytest.mark.parametrize("over", [True, False])
def test_a_resumed_epoch_that_a_callback_had_cut_short_is_over(over: bool) -> None:
    """It is over though its last mini-batch was not the last that there was."""

    def nothing() -> None: ...

    progress = SimpleNamespace(is_last_batch=False)
    loop = SimpleNamespace(restarting=True, batch_progress=progress, advance=nothing)
    loop.update_lr_schedulers = nothing
    loop._should_check_val_fx = lambda fetcher: False
    fit_loop = SimpleNamespace(epoch_loop=loop, reset=nothing, _data_fetcher=None)
    connector = SimpleNamespace(on_epoch_end=nothing)
    trainer = SimpleNamespace(fit_loop=fit_loop, _logger_connector=connector)
    position = EpochPosition(trainer)
    EpochEnds(trainer, position, torch.device("cpu"))
    event = EpochEvent.RESUMES_AT_END if over else EpochEvent.RESUMES
    position.resume(ResumedEpoch(0, 3, [], event=event))
    if over:
        with pytest.raises(StopIteration):
            loop.advance()
    else:
        loop.advance()


class Reading(pl.Callback):
    """What is known of the validation before the next one."""

    def __init__(self) -> None:
        self.known: list[float] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.known += [float(trainer.callback_metrics.get("val/loss", -1))]

    def state_dict(self) -> dict[str, Any]:
        return {"known": self.known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.known = state["known"]


def test_what_a_validation_said_is_known_until_the_next_one(tmp_path: Path) -> None:
    def train(name: str, ckpt_path: Path | None = None) -> list[float]:
        reading = Reading()
        keep = ModelCheckpoint(tmp_path / name, "{epoch}", "train/loss", save_top_k=-1)
        run(tmp_path / name, Noisy, ckpt_path, callbacks=[reading, keep])
        return reading.known

    whole = train("whole")
    assert whole[0] == -1 and min(whole[1:]) >= 0
    assert train("resumed", tmp_path / "whole" / "epoch=0.ckpt") == whole


@pytest.mark.slow
@pytest.mark.parametrize("who", by_default([0, 1], 0))
def test_a_restarted_worker_ends_its_epoch_as_in_an_undisturbed_run(
    who: int, tmp_path: Path
) -> None:
    def train(*callbacks: pl.Callback) -> pl.Trainer:
        torch.manual_seed(7)
        module, strategy = Noisy(schedule=plateau("val/loss")), HybridStrategy(on_failure="restart")
        trainer = make_trainer(strategy, 2, max_epochs=4, callbacks=list(callbacks))
        loader = DataLoader(regression_data(44), batch_size=4, shuffle=True)
        trainer.fit(module, loader, DataLoader(regression_data(8), batch_size=4))
        return trainer

    whole, restarted = tmp_path / "whole.ckpt", tmp_path / "restarted.ckpt"
    train().save_checkpoint(whole)
    train(Killed(tmp_path, who, BATCHES + 2)).save_checkpoint(restarted)
    assert (tmp_path / "died").exists()
    one, other = (torch.load(path, weights_only=True) for path in (restarted, whole))
    assert rate(one) == rate(other) == pytest.approx(1e-5)
    assert_same(one, other)


class FailsAtItsBeginning(pl.Callback):
    """Worker 0, in the second epoch."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_rank == 0 and trainer.current_epoch == 1:
            time.sleep(0.5)
            raise LookupError("on purpose")


@pytest.mark.parametrize("policy", by_default(["hybrid", "async"], "hybrid", "async"))
def test_an_epoch_whose_beginning_failed_is_trained_by_the_resumed_run(
    policy: str, tmp_path: Path
) -> None:
    """Hooks of its beginning run before Lightning forgets the mini-batches of the one before."""

    def train(path: Path | None, *callbacks: pl.Callback) -> pl.LightningModule:
        module, saves = Scheduled(), ModelCheckpoint(tmp_path / "checkpoints")
        options = {"callbacks": [*callbacks, saves], "enable_checkpointing": True}
        trainer = make_trainer(policy, 2, max_epochs=3, **options)
        trainer.fit(module, DataLoader(torch.arange(N), 2), ckpt_path=path, weights_only=False)
        assert [x.scheduler.last_epoch for x in trainer.lr_scheduler_configs][1] == 3
        return module

    with pytest.raises(LookupError):
        train(None, FailsAtItsBeginning())
    module = train(tmp_path / "interrupted.ckpt")
    assert module.w.round().tolist() == [3] * N
