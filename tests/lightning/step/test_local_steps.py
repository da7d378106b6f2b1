"""Workers that train on their own, in processes: equal to plain torch, to the last digit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import BaseFinetuning, EMAWeightAveraging
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from hybridtrain.engine.protocol.spans import shares_of
from hybridtrain.errors import UserError
from hybridtrain.lightning.hooks.loop_hooks import logged_step
from tests.lightning.toys import (
    Manual,
    Recorder,
    Regression,
    flat,
    make_trainer,
    regression_data,
)
from tests.picking import by_default

SIZE, N = 4, 44  # of a mini-batch; of three workers the last one has fewer samples at the end


def make() -> torch.nn.Module:
    torch.manual_seed(5)
    return Regression(lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)).double()


def loss_of(module: Any, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(module.net(batch[0]), batch[1])


def fitted(
    workers: int, folder: Path, every: int, samples: int = N, **rest: Any
) -> tuple[Any, Any]:
    strategy = HybridStrategy(
        "hybrid", keep_order=True, exchange={"name": "movement", "every": every}
    )
    trainer = make_trainer(strategy, workers, default_root_dir=folder, **{"max_epochs": 2, **rest})
    module: Any = make()
    loader = DataLoader(regression_data(samples, torch.float64), SIZE)
    trainer.fit(module, loader)
    return module, trainer


def averaged(workers: int, every: int, epochs: int = 2, n_samples: int = N) -> Any:
    """What plain torch makes of it: own optimizers, and the mean by samples now and then."""
    data = regression_data(n_samples, torch.float64)
    masters, own = make(), [make() for _ in range(workers)]
    optimizers: list[Any] = [module.configure_optimizers() for module in own]  # type: ignore
    samples = [0] * workers
    places, whole = shares_of((SIZE,) * workers), SIZE * workers

    def average() -> None:
        total = sum(samples)
        for master, *parameters in zip(*map(_parameters, [masters, *own]), strict=True):
            moved = [n / total * (master - p) for n, p in zip(samples, parameters, strict=True)]
            master.data.sub_(torch.stack(moved).sum(0).detach())
            for parameter in parameters:
                parameter.data.copy_(master.data)
        samples[:] = [0] * workers

    for _ in range(epochs):
        since = 0
        for begin in range(0, n_samples, whole):
            for worker, (module, optimizer) in enumerate(zip(own, optimizers, strict=True)):
                chosen = [begin + place for place in places[worker] if begin + place < n_samples]
                if chosen:
                    optimizer.zero_grad()
                    loss_of(module, data[chosen]).backward()
                    optimizer.step()
                samples[worker] += len(chosen)
            since += 1
            if since == every:
                average()
                since = 0
        if since:
            average()
    return masters


def _parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return list(module.parameters())


def check_equal(found: torch.nn.Module, wanted: torch.nn.Module) -> None:
    for one, other in zip(found.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("workers", "every", "samples"),
    [
        (3, 2, N),
        (3, 4, 38),  # worker 2 sits out the last step, which is due
        pytest.param(3, 3, 38, marks=pytest.mark.slow),  # ... which is not
        pytest.param(2, 3, N, marks=pytest.mark.slow),
        pytest.param(1, 4, N, marks=pytest.mark.slow),
    ],
)
def test_local_sgd_is_what_plain_torch_does(
    workers: int, every: int, samples: int, tmp_path: Path
) -> None:
    module, trainer = fitted(workers, tmp_path, every, samples)
    check_equal(module, averaged(workers, every, n_samples=samples))
    assert trainer.global_step == 2 * -(-samples // (SIZE * workers))  # a worker's own steps


@pytest.mark.parametrize("fetch", by_default([None, "overlapped"], "overlapped"))
def test_downpour_with_one_worker_and_plain_sgd_is_plain_sgd(
    fetch: str | None, tmp_path: Path
) -> None:
    """n_push = 1: what is fetched is what the worker has."""

    def plain() -> Any:
        module: Any = make()
        module.make_optimizer = lambda p: torch.optim.SGD(p, lr=0.01)
        return module

    data, module = regression_data(N, torch.float64), plain()
    exchange = {"name": "accumulated", "n_push": 1, "n_fetch": 3, "fetch": fetch}
    trainer = make_trainer(
        HybridStrategy("async", exchange=exchange), 1, max_epochs=2, default_root_dir=tmp_path
    )
    trainer.fit(module, DataLoader(data, SIZE))
    expected = plain()
    optimizer = expected.configure_optimizers()
    for _ in range(2):
        for batch in DataLoader(data, SIZE):
            optimizer.zero_grad()
            loss_of(expected, batch).backward()
            optimizer.step()
    check_equal(module, expected)


class Alike(Regression):
    """All workers begin an epoch with the same parameters."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            assert torch.equal(flat(self), self.trainer.strategy.broadcast(flat(self)))


@pytest.mark.parametrize("samples", [40, 41])  # the last step is a push; has one worker's sample
def test_in_lock_step_all_go_on_from_the_masters_behind_an_epoch(
    samples: int, tmp_path: Path
) -> None:
    exchange = {"name": "accumulated", "n_push": 4, "n_fetch": 4}
    strategy = HybridStrategy("hybrid", exchange=exchange)
    trainer = make_trainer(strategy, 2, max_epochs=3, default_root_dir=tmp_path)
    trainer.fit(Alike(), DataLoader(regression_data(samples), SIZE))
    assert strategy.run_stats()["samples"] == 3 * samples


class Late(Regression):
    """Worker 1 begins where worker 0 has come to."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and self.trainer.global_step < 4:
            raise AssertionError(f"it begins behind {self.trainer.global_step} updates")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("updates", by_default([4, 1000], 4))  # later than the end of the epoch
def test_a_warm_start_leaves_the_first_updates_to_one_worker(updates: int, tmp_path: Path) -> None:
    data = Recorder(regression_data(48))
    policy = {"name": "async", "warm_start": updates}
    strategy = HybridStrategy(policy, exchange={"name": "accumulated", "n_push": 2})
    trainer = make_trainer(strategy, 2, max_epochs=2, default_root_dir=tmp_path)
    trainer.fit(Late(lambda p: torch.optim.SGD(p, lr=0.01)), DataLoader(data, SIZE))
    assert strategy.run_stats()["samples"] == 2 * 48
    assert data.counts.tolist() == [2] * 48
    first, other = strategy.run_stats()["samples_per_worker"]
    assert first >= min(updates, 5) * SIZE and other > 0


@pytest.mark.parametrize("name", ["local_sgd", "downpour"])
def test_local_sgd_and_downpour_by_name_learn_and_leave_the_masters_in_the_module(
    name: str, tmp_path: Path
) -> None:
    module: Any = make()
    data = DataLoader(regression_data(N, torch.float64), SIZE)
    before = sum(loss_of(module, batch).item() for batch in data)
    trainer = make_trainer(name, 2, max_epochs=3, default_root_dir=tmp_path)
    trainer.fit(module, data, data)
    after = sum(loss_of(module, batch).item() for batch in data)
    assert after < 0.9 * before
    validated = float(trainer.callback_metrics["val/loss"])
    assert validated == pytest.approx(after / len(data), rel=1e-9)  # of all, and of these


def test_a_checkpoint_is_an_ordinary_one_of_the_masters(tmp_path: Path) -> None:
    fitted(2, tmp_path, 2, max_epochs=1, enable_checkpointing=True)
    (path,) = tmp_path.rglob("*.ckpt")
    saved = torch.load(path, weights_only=True)
    check = make()
    check.load_state_dict(saved["state_dict"])
    check_equal(check, averaged(2, 2, epochs=1))
    assert saved["optimizer_states"][0]["state"]  # the worker's own momentum


def test_a_run_that_fails_leaves_the_masters_of_the_last_mean(tmp_path: Path) -> None:
    class Failing(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.global_rank == 0 and batch_idx == 4:
                raise ValueError("on purpose")
            return super().training_step(batch, batch_idx)

    torch.manual_seed(5)
    failing = Failing(lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)).double()
    strategy = HybridStrategy("hybrid", keep_order=True, exchange={"name": "movement", "every": 3})
    trainer = make_trainer(
        strategy, 2, max_epochs=1, default_root_dir=tmp_path, enable_checkpointing=True
    )
    with pytest.raises(ValueError, match="on purpose"):
        trainer.fit(failing, DataLoader(regression_data(N, torch.float64), SIZE))
    (path,) = tmp_path.rglob("interrupted.ckpt")
    left = make()
    left.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    check_equal(left, averaged(2, 3, epochs=1, n_samples=3 * 2 * SIZE))  # three steps of each


@pytest.mark.parametrize(
    ("batch", "who", "every"),
    by_default([(1, 0, 3), (2, 1, 3), (4, 0, 3), (5, 1, 3), (5, 1, 4)], (2, 1, 3), (5, 1, 4)),
)  # before the first mean; in it; after it; the other worker waits where the epoch ends
@pytest.mark.parametrize("num_workers", by_default([0, 1], 0))
def test_who_goes_on_from_a_run_that_failed_does_the_steps_since_the_last_mean_again(
    batch: int, who: int, every: int, num_workers: int, tmp_path: Path
) -> None:
    class Failing(Regression):
        def training_step(self, now: Any, batch_idx: int) -> torch.Tensor:
            if self.global_rank == who and batch_idx == batch and self.fails:
                time.sleep(0.5)
                raise ValueError("on purpose")
            return super().training_step(now, batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return [optimizer], [{"scheduler": by_step, "interval": "step"}, by_epoch]

    def run(fails: bool, ckpt: Path | None = None) -> tuple[Any, Any]:
        torch.manual_seed(5)
        module: Any = Failing(lambda p: torch.optim.SGD(p, lr=0.01)).double()
        module.fails = fails
        strategy = HybridStrategy("hybrid", exchange={"name": "movement", "every": every})
        trainer = make_trainer(
            strategy, 2, max_epochs=2, default_root_dir=tmp_path, enable_checkpointing=True
        )
        data = regression_data(N, torch.float64)
        loader = DataLoader(data, SIZE, shuffle=True, num_workers=num_workers)
        trainer.fit(module, loader, DataLoader(data, N), ckpt_path=ckpt, weights_only=True)
        return module, trainer

    with pytest.raises(ValueError, match="on purpose"):
        run(fails=True)
    (path,) = tmp_path.rglob("interrupted.ckpt")
    (module, resumed), (expected, whole) = run(fails=False, ckpt=path), run(fails=False)
    check_equal(module, expected)
    assert resumed.global_step == whole.global_step
    assert logged_step(resumed) == logged_step(whole)
    for mine, theirs in zip(resumed.lr_scheduler_configs, whole.lr_scheduler_configs, strict=True):
        assert mine.scheduler.state_dict() == theirs.scheduler.state_dict()


@pytest.mark.parametrize("batch", by_default([1, 2], 1))
def test_a_step_whose_exchange_was_broken_off_counts_once(batch: int, tmp_path: Path) -> None:
    """The other worker has begun its next mini-batch while the fragment travels."""

    class Failing(Regression):
        def training_step(self, now: Any, batch_idx: int) -> torch.Tensor:
            if self.global_rank == 1 and batch_idx == batch and self.fails:
                time.sleep(0.5)
                raise ValueError("on purpose")
            return super().training_step(now, batch_idx)

    def run(fails: bool, ckpt: Path | None = None) -> Any:
        module: Any = Failing(lambda p: torch.optim.SGD(p, lr=0.01))
        module.fails = fails
        streaming = {"name": "streaming", "every": 4, "fragments": 2, "overlap": 1}
        trainer = make_trainer(
            HybridStrategy("hybrid", exchange=streaming),
            2,
            max_epochs=2,
            default_root_dir=tmp_path,
            enable_checkpointing=True,
        )
        trainer.fit(module, DataLoader(regression_data(N), SIZE), ckpt_path=ckpt)
        return trainer

    with pytest.raises(ValueError, match="on purpose"):
        run(fails=True)
    (path,) = tmp_path.rglob("interrupted.ckpt")
    assert run(fails=False, ckpt=path).global_step == 12


def test_a_step_that_a_worker_without_data_makes_of_what_it_has_gathered_counts_once(
    tmp_path: Path,
) -> None:
    """The last mini-batch of the epoch is worker 0's alone, which fails behind it."""

    class Failing(Regression):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_rank == 0 and batch_idx == 3 and self.fails:
                time.sleep(0.5)
                raise ValueError("on purpose")

    def run(fails: bool, ckpt: Path | None = None) -> Any:
        module: Any = Failing(lambda p: torch.optim.SGD(p, lr=0.01)).double()
        module.fails = fails
        trainer = make_trainer(
            HybridStrategy("hybrid", exchange={"name": "movement", "every": 3}),
            2,
            max_epochs=1,
            accumulate_grad_batches=2,
            default_root_dir=tmp_path,
            enable_checkpointing=True,
        )
        loader = DataLoader(regression_data(6 * SIZE + 1, torch.float64), SIZE)
        trainer.fit(module, loader, ckpt_path=ckpt, weights_only=True)
        return trainer

    with pytest.raises(ValueError, match="on purpose"):
        run(fails=True)
    (path,) = tmp_path.rglob("interrupted.ckpt")
    assert run(fails=False, ckpt=path).global_step == 2


NESTEROV = {"name": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (1, {"exchange": {"name": "movement", "every": 3}, "update": NESTEROV}),
        pytest.param(2, {"update": {"name": "adagrad", "lr": 0.05}}, marks=pytest.mark.slow),
    ],
    ids=["an outer optimizer", "another optimizer"],
)
def test_the_masters_own_optimizer_goes_on_where_it_was(
    workers: int, options: dict[str, Any], tmp_path: Path
) -> None:
    def run(epochs: int, ckpt: Path | None = None) -> tuple[Any, Any]:
        strategy = HybridStrategy("hybrid", **options)
        trainer = make_trainer(strategy, workers, max_epochs=epochs, default_root_dir=tmp_path)
        module: Any = make()
        module.make_optimizer = lambda p: torch.optim.Adam(p, lr=0.01)
        loader = DataLoader(regression_data(48, torch.float64), SIZE)
        trainer.fit(module, loader, ckpt_path=ckpt, weights_only=True)
        return module, trainer

    whole, _ = run(3)
    _, trainer = run(2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed, _ = run(3, tmp_path / "two.ckpt")
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
    saved = torch.load(tmp_path / "two.ckpt", weights_only=True)["optimizer_states"][0]
    make().configure_optimizers().load_state_dict(saved)  # Lightning's own goes on from it, too


class Unfreezing(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("options", "make_optimizer", "fragments"),
    [
        ({"exchange": "movement"}, torch.optim.LBFGS, ["LBFGS", "several times", "gradient"]),
        ({"exchange": "movement"}, None, ["other parameters in mid-training", "update=mean"]),
        ({"update": "adagrad"}, None, ["other parameters in mid-training", "update=adagrad"]),
    ],
)
def test_an_optimizer_that_cannot_be_served_is_refused(
    options: dict[str, Any], make_optimizer: Any, fragments: list[str], tmp_path: Path
) -> None:
    def trained(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.01)

    callbacks = [Unfreezing()] if make_optimizer is None else []
    trainer = make_trainer(
        HybridStrategy("hybrid", **options),
        2,
        max_epochs=1,
        default_root_dir=tmp_path,
        callbacks=callbacks,
    )
    with pytest.raises(UserError) as error:
        trainer.fit(Regression(make_optimizer or trained), DataLoader(regression_data(), SIZE))
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize(
    ("options", "change", "fragments"),
    [
        (
            {"on_failure": "restart"},
            None,
            ["on_failure=restart", "wait for the steps", "on_failure=stop"],
        ),
        ({"on_nonfinite": "drop"}, None, ["on_nonfinite=drop", "finite", "on_nonfinite=raise"]),
        ({"on_oom": "skip_step"}, None, ["on_oom=skip_step", "on_oom=raise"]),
        ({"transport_dtype": "bf16"}, None, ["transport_dtype=bf16", "rounded"]),
        ({"correction": "gap_aware"}, None, ["correction="]),
        (
            {"exchange": {"name": "streaming", "fragments": 9}},
            None,
            ["exchange.fragments=9", "only 4 parameters", "from 1 to 4"],
        ),
        ({}, "manual", ["automatic_optimization", "exchange=gradient"]),
        ({}, "averaged", ["EMAWeightAveraging", "each worker's own", "exchange=gradient"]),
    ],
)
def test_options_that_do_not_go_with_local_steps_are_refused_before_a_process_starts(
    options: dict[str, Any], change: str | None, fragments: list[str], tmp_path: Path
) -> None:
    class Own(Manual, Regression): ...

    kind: Callable[[], Any] = Own if change == "manual" else Regression
    strategy = HybridStrategy("hybrid", **{"exchange": "movement", **options})
    callbacks = [EMAWeightAveraging()] if change == "averaged" else []
    trainer = make_trainer(
        strategy, 2, max_epochs=1, default_root_dir=tmp_path, callbacks=callbacks
    )
    with pytest.raises(UserError) as error:
        trainer.fit(kind(), DataLoader(regression_data(), SIZE))
    for fragment in fragments:
        assert fragment in str(error.value)
