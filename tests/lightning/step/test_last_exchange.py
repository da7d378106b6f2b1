"""What workers have trained on their own is in what is shown, saved and returned, however it ends.

The intervals are longer than the runs, so all exchanges are those of ends.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from hybridtrain.engine.exchanges.elastic import Elastic
from hybridtrain.lightning.checkpointing.periodic import PeriodicCheckpoint
from hybridtrain.lightning.preflight.strategy_checks import advise_on_interval
from tests.lightning.failover.counting import Counting
from tests.lightning.toys import Recorder, Regression, flat, make_trainer, regression_data
from tests.picking import by_default

SIZE, N = 4, 84
NESTEROV = {"name": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}
DELAYED = {"name": "delayed_nesterov", "lr": 0.5, "buffer": 4}
MOVEMENT = {"name": "movement", "every": 99}
# Each with how far one worker's movement moves the masters.
SCHEMES: dict[str, tuple[float, dict[str, Any]]] = {
    "local_sgd": (1.0, {"policy": "hybrid", "exchange": MOVEMENT}),
    "diloco": (0.7 * 1.9, {"policy": "hybrid", "exchange": MOVEMENT, "update": NESTEROV}),
    "streaming_diloco": (
        0.7 * 1.9,
        {"policy": "hybrid", "exchange": {"name": "streaming", "every": 99}, "update": NESTEROV},
    ),
    "async_diloco": (0.5 / 4, {"policy": "grace", "exchange": MOVEMENT, "update": DELAYED}),
    "easgd": (0.9, {"policy": "async", "exchange": {"name": "elastic", "every": 99}}),
    "easgd in lock-step": (0.9, {"policy": "hybrid", "exchange": {"name": "elastic", "every": 99}}),
    "downpour": (
        1.0,
        {"policy": "async", "exchange": {"name": "accumulated", "n_push": 99, "n_fetch": 99}},
    ),
}
FREE = ["async_diloco", "easgd", "downpour"]


class Toy(Regression):
    """Its metric tells whose weights are validated."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("norm", flat(self).norm(), sync_dist=True)


class Ends(pl.Callback):
    """Behind so many mini-batches of worker 0, or of all."""

    def __init__(self, how: str, batch: int) -> None:
        self.how, self.batch = how, batch

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if rest[-1] + 1 == self.batch and self.how == "stop":
            trainer.should_stop = True
        if self.how == "signal":
            time.sleep(0.02)  # until the parent's request has come
            if rest[-1] + 1 == self.batch and trainer.is_global_zero:
                os.kill(os.getppid(), signal.SIGINT)


def fitted(
    name: str, workers: int, how: str, folder: Path, ckpt: Path | None = None, data: Any = None
) -> tuple[torch.Tensor, Any]:
    """How far the weights have moved, of the module and in the last checkpoint; its trainer."""
    torch.manual_seed(5)
    module = Toy().double()
    before = flat(module)
    saves = ModelCheckpoint(folder, monitor="norm", save_top_k=-1)
    # Behind these the module has the masters, until the next mini-batch begins.
    alone = [PeriodicCheckpoint(str(folder), every_s=0.001)] if how == "signal" else []
    trainer = make_trainer(
        HybridStrategy(**SCHEMES[name][1]),
        workers,
        min_epochs=0,
        max_epochs=1,
        callbacks=[saves, Ends(how, 3), *alone],
        enable_checkpointing=True,
    )
    given = data or regression_data(N, torch.float64)
    loaders = DataLoader(given, SIZE), DataLoader(regression_data(N, torch.float64), SIZE)
    if how == "signal":
        handler = signal.getsignal(signal.SIGINT)
        with pytest.raises(SystemExit):
            trainer.fit(module, *loaders)
        signal.signal(signal.SIGINT, handler)  # Lightning ignores the signal from then on
        (path,) = folder.rglob("interrupted.ckpt")
        return weights_of(path) - before, trainer
    trainer.fit(module, *loaders, ckpt_path=ckpt, weights_only=True)
    after = flat(module)
    assert float(trainer.callback_metrics["norm"]) == pytest.approx(float(after.norm()), abs=1e-12)
    assert saves.best_model_score == trainer.callback_metrics["norm"]
    assert torch.equal(weights_of(Path(saves.best_model_path)), after)
    return after - before, trainer


def weights_of(path: Path) -> torch.Tensor:
    saved = torch.load(path, weights_only=True)["state_dict"]
    return torch.cat([value.flatten() for value in saved.values()])


def alone(steps: int) -> torch.Tensor:
    """How far plain torch moves in so many steps."""
    torch.manual_seed(5)
    module: Any = Toy().double()
    before, optimizer = flat(module), module.configure_optimizers()
    for _, batch in zip(
        range(steps), DataLoader(regression_data(N, torch.float64), SIZE), strict=False
    ):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module.net(batch[0]), batch[1]).backward()
        optimizer.step()
    return flat(module) - before


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", by_default(SCHEMES, "diloco", "streaming_diloco", "async_diloco", "downpour")
)
@pytest.mark.parametrize("how", by_default(["epoch", "stop"], "epoch"))
def test_one_workers_steps_are_in_the_result(name: str, how: str, tmp_path: Path) -> None:
    moved, _ = fitted(name, 1, how, tmp_path)
    wanted = SCHEMES[name][0] * alone(3 if how == "stop" else N // SIZE)
    torch.testing.assert_close(moved, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", by_default(["epoch", "stop"], "stop"))
@pytest.mark.parametrize("name", by_default(SCHEMES, "easgd", "downpour"))
def test_all_workers_steps_are_in_the_result(name: str, how: str, tmp_path: Path) -> None:
    data = Recorder(regression_data(N, torch.float64))
    moved, trainer = fitted(name, 3, how, tmp_path, data=data)
    samples = trainer.strategy.run_stats()["samples"]
    assert samples == N if how == "epoch" else 3 * SIZE <= samples <= data.counts.sum()
    assert float(moved.abs().max()) > 1e-3


@pytest.mark.parametrize("name", by_default(FREE, "easgd"))
def test_an_interrupted_run_neither_loses_nor_repeats_a_workers_own_steps(
    name: str, tmp_path: Path
) -> None:
    """Where workers run freely; in lock-step the steps since the last exchange are done again."""
    moved, first = fitted(name, 1, "signal", tmp_path)
    samples = first.strategy.run_stats()["samples"]
    assert 3 * SIZE <= samples < N
    wanted = SCHEMES[name][0] * alone(samples // SIZE)
    torch.testing.assert_close(moved, wanted, rtol=0, atol=1e-12)
    (path,) = tmp_path.rglob("interrupted.ckpt")
    _, second = fitted(name, 2, "epoch", tmp_path, path)
    assert second.strategy.run_stats()["samples"] == N - samples


@pytest.mark.parametrize("name", by_default(FREE, "downpour"))
def test_each_of_several_interrupted_workers_hands_over_its_steps(
    name: str, tmp_path: Path
) -> None:
    data = Recorder(regression_data(N, torch.float64))
    _, first = fitted(name, 3, "signal", tmp_path, data=data)
    each = first.strategy.run_stats()["samples_per_worker"]
    assert min(each) > 0 and data.counts.sum() - sum(each) <= 2 * 3 * SIZE  # drawn, not begun


@pytest.mark.parametrize("made", [9, 10])
def test_an_interval_that_is_longer_than_an_epoch_is_said_to_be(made: int) -> None:
    steps: Any = [SimpleNamespace(count=made, local=object())]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        advise_on_interval(Elastic(every=10), steps)
    words = ["9 steps", "every 10", "only at the end of an epoch"] if made == 9 else []
    assert len(said) == (made == 9) and all(word in str(said[0].message) for word in words)


class Late(Counting):
    """There are mini-batches for two workers of three; who comes last to an epoch has none."""

    def on_train_epoch_start(self) -> None:
        if self.global_rank == 1 + self.current_epoch % 2:
            time.sleep(0.5)


@pytest.mark.parametrize(
    "policy", by_default(["async", {"name": "grace", "window_s": 0.0}], "async")
)
def test_who_has_no_mini_batch_in_an_epoch_goes_on_from_the_masters(policy: Any) -> None:
    """Or what it hands over next would take back what the others have trained meanwhile."""
    module = Late(4)
    strategy = HybridStrategy(policy, exchange={"name": "movement", "every": 1}, update="sum")
    trainer = make_trainer(strategy, 3, max_epochs=3)
    trainer.fit(module, DataLoader(torch.arange(4), 2))
    assert strategy.run_stats()["samples"] == 3 * 4
    assert module.w.round().tolist() == [3] * 4
