"""``sandblaster``: an epoch is one evaluation of the whole loss, whoever processes its portions."""

from __future__ import annotations

import csv
import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import HybridStrategy, Server, Worker
from hybridtrain.engine.exchanges.summed import Summed
from hybridtrain.engine.policies import make_policy
from hybridtrain.engine.updates.searches import LBFGS, GradientDescent
from hybridtrain.errors import UserError
from hybridtrain.lightning.preflight.strategy_checks import warn_of_unused
from hybridtrain.lightning.replay.module_task import ModuleTask, VirtualTrainer
from hybridtrain.virtual.service_times import ServiceTimes
from hybridtrain.virtual.training_task import Scheduled, Timetable
from hybridtrain.virtual.virtual_world import VirtualWorld
from tests.lightning.toys import Recorder, Regression, flat, make_trainer, regression_data
from tests.picking import by_default
from tests.recording.test_replay import Run, check_equal

N = 48
KINDS = {"lbfgs": LBFGS, "gradient_descent": partial(GradientDescent, lr=64.0)}
OPTIONS: dict[str, Any] = {
    "lbfgs": "lbfgs",
    "gradient_descent": {"name": "gradient_descent", "lr": 64.0},  # the first search is long
}


def data() -> TensorDataset:
    return regression_data(N, torch.float64)


def made() -> Regression:
    torch.manual_seed(5)
    return Regression().double()


class Validated(Regression):
    """Keeps its validation losses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("losses", torch.zeros(40, dtype=torch.float64))

    def on_validation_epoch_end(self) -> None:
        self.losses[self.current_epoch] = self.trainer.callback_metrics["val/loss"]


def trained(
    workers: int,
    size: int,
    epochs: int,
    update: str = "lbfgs",
    ckpt: Path | None = None,
    samples: Any = None,
    module: Any = None,
    loader: Any = None,
    validate: bool = False,
    **options: Any,
) -> tuple[Any, pl.Trainer]:
    """A module after so many passes, and its trainer."""
    ours = {name: options.pop(name) for name in ("on_failure", "faults") if name in options}
    policy = options.pop("policy", "sandblaster")
    strategy = HybridStrategy(policy, update=OPTIONS.get(update, update), **ours)
    trainer = make_trainer(strategy, workers, max_epochs=epochs, **options)
    torch.manual_seed(6)
    train = loader or DataLoader(samples or data(), size, shuffle=True)
    module = module or made()
    loaders = (train, DataLoader(data(), N)) if validate else (train,)
    trainer.fit(module, *loaders, ckpt_path=ckpt)
    return module, trainer


def alone(evaluations: int, update: str) -> list[torch.Tensor]:
    """Where a line search in one process stands after each evaluation: its accepted points."""
    module = made()
    x, y = data().tensors
    optimizer, accepted, known = KINDS[update](module.parameters()), [flat(module)], {}

    def closure() -> torch.Tensor:
        here = flat(module).numpy().tobytes()
        if here not in known and len(accepted) >= evaluations + 1:
            raise StopIteration
        module.zero_grad()
        loss = torch.nn.functional.mse_loss(module.net(x), y)
        loss.backward()
        if here not in known:
            known[here] = True
            accepted.append(accepted[-1])
        return loss.detach()

    try:
        while True:
            optimizer.step(closure)
            accepted[-1] = flat(module)
    except StopIteration:
        return accepted


@pytest.mark.few(2)
@pytest.mark.parametrize("update", KINDS)
@pytest.mark.parametrize(
    ("workers", "size"), by_default([(1, 7), (1, 48), (2, 5), (3, 4), (3, 20)], (1, 7), (2, 5))
)
def test_any_number_of_workers_and_portions_is_one_process_with_all_data(
    workers: int, size: int, update: str
) -> None:
    """The masters are the accepted point, also within a line search."""
    epochs = 12
    counted = Recorder(data())
    module, trainer = trained(workers, size, epochs, update, samples=counted)
    expected = alone(epochs, update)[epochs]
    assert float((flat(module) - expected).abs().max()) < 1e-9
    assert trainer.global_step == epochs
    assert min(counted.counts.tolist()) == epochs
    assert trainer.strategy.run_stats()["samples"] == epochs * N


@pytest.mark.few(2)
@pytest.mark.parametrize("update", KINDS)
@pytest.mark.parametrize("epoch", [1, 3])
def test_a_resumed_run_goes_on_within_a_line_search_to_the_bit(
    update: str, epoch: int, tmp_path: Path
) -> None:
    _, trainer = trained(1, 7, epoch, update)
    trainer.save_checkpoint(path := tmp_path / "early.ckpt")
    resumed, _ = trained(1, 7, 8, update, path)
    whole, _ = trained(1, 7, 8, update)
    assert torch.equal(flat(resumed), flat(whole))


def test_what_is_validated_is_the_accepted_point() -> None:
    module, _ = trained(2, 7, 8, "gradient_descent", module=Validated().double(), validate=True)
    losses = module.losses[:8].tolist()
    assert losses == sorted(losses, reverse=True), "no trial is seen that was not accepted"
    x, y = data().tensors
    last = float(torch.nn.functional.mse_loss(module.net(x), y))
    assert losses[-1] == pytest.approx(last, rel=1e-12)
    assert len(set(losses)) < 8, "some epochs have searched on"


# ---- backups ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", by_default([1, 2], 1))
def test_each_update_has_a_row_with_a_validation_and_without(workers: int, tmp_path: Path) -> None:
    rows = []
    for validate in (False, True):
        logger = CSVLogger(tmp_path, "", str(validate))
        options = {"logger": logger, "log_every_n_steps": 1, "validate": validate}
        trained(workers, 12, 4, **options)
        table = csv.DictReader((tmp_path / str(validate) / "metrics.csv").open())
        rows.append([row["step"] for row in table if row.get("train/loss")])
    assert rows == [["0", "1", "2"]] * 2  # each update but the last


class Stalls(Regression):
    """Worker 1 ends none of its first portions before another worker has begun it, too."""

    loaded: torch.Tensor  # how often each sample has been

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and self.current_epoch == 0:
            mine = [data().tensors[1].tolist().index(value) for value in batch[1].tolist()]
            while int(self.loaded[mine].min()) < 2:
                time.sleep(0.001)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("workers", "size"), by_default([(2, 4), (2, 5), (3, 4)], (2, 5)))
def test_a_portion_of_a_worker_that_stalls_is_processed_by_others_and_counts_once(
    workers: int, size: int
) -> None:
    counted, module = Recorder(data()), Stalls().double()
    module.load_state_dict(made().state_dict())
    module.loaded = counted.counts
    module, trainer = trained(workers, size, 4, samples=counted, module=module)
    assert float((flat(module) - alone(4, "lbfgs")[4]).abs().max()) < 1e-9
    assert trainer.strategy.run_stats()["samples"] == 4 * N
    assert int(counted.counts.sum()) > 4 * N, "some were processed twice"


class Means(Regression):
    """Another worker is sooner with all that worker 0 has drawn."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.3 * (self.global_rank == 0 and self.current_epoch > 0))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


def test_a_worker_whose_portions_all_others_have_processed_reduces_means_with_them() -> None:
    _, trainer = trained(2, 5, 4, module=Means().double())
    assert trainer.strategy.run_stats()["samples"] == 4 * N
    assert float(trainer.callback_metrics["mean"]) > 0.0


def test_without_backups_every_portion_is_processed_once() -> None:
    counted = Recorder(data())
    policy = {"name": "sandblaster", "backups": False}
    trained(2, 5, 3, samples=counted, policy=policy)
    assert counted.counts.tolist() == [3] * N


class Shaped(Regression):
    """With a weight that is laid out by columns, or complex."""

    def __init__(self, of: torch.Tensor) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(of)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        return loss + self.scale.abs().square().sum()


@pytest.mark.parametrize("update", ["lbfgs", "gradient_descent"])
def test_a_weight_laid_out_by_columns_goes_where_one_laid_out_by_rows_goes(update: str) -> None:
    rows = torch.arange(6.0).reshape(2, 3)
    ended = []
    for each in (rows, rows.t().contiguous().t()):
        pl.seed_everything(2, verbose=False)
        ended.append(flat(trained(2, 5, 3, update, module=Shaped(each.clone()).double())[0]))
    torch.testing.assert_close(*ended, rtol=1e-10, atol=1e-10)  # sums are made in another order


def test_complex_parameters_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"scale \(torch.complex64\).*view_as_real"):
        trained(2, 5, 1, module=Shaped(torch.ones(2, dtype=torch.complex64)))


# ---- workers that fail, training that stops ------------------------------------------------------


@pytest.mark.parametrize("choice", ["continue", "restart"])
@pytest.mark.parametrize("step", by_default([0, 2, 5], 2))
def test_a_lost_workers_portions_are_evaluated_by_others_at_the_same_point(
    choice: str, step: int
) -> None:
    fault = {"worker": 1, "step": step, "kind": "kill"}
    module, trainer = trained(3, 4, 6, on_failure=choice, faults=[fault])
    assert float((flat(module) - alone(6, "lbfgs")[6]).abs().max()) < 1e-9
    assert trainer.strategy.run_stats()["samples"] == 6 * N
    assert trainer.global_step == 6


class Stops(pl.Callback):
    """In mid-pass."""

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.current_epoch == 2 and rest[-1] == 1:
            trainer.should_stop = True


@pytest.mark.parametrize("workers", [1, 2])
def test_a_pass_that_is_broken_off_is_no_evaluation(workers: int, tmp_path: Path) -> None:
    module, trainer = trained(workers, 4, 6, callbacks=[Stops()])
    assert float((flat(module) - alone(2, "lbfgs")[2]).abs().max()) < 1e-9
    trainer.save_checkpoint(path := tmp_path / "early.ckpt")
    resumed, trainer = trained(workers, 4, 6, ckpt=path)
    evaluations = trainer.global_step
    assert float((flat(resumed) - alone(evaluations, "lbfgs")[evaluations]).abs().max()) < 1e-9


# ---- what a line search cannot use ---------------------------------------------------------------


class With(Regression):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.net.append(layer)


class Overflows(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.global_rank == 1 and batch_idx == 1 else loss


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (lambda: With(torch.nn.Dropout(0.1)), {}, ["net.3", "Dropout", "p to 0", "eval()"]),
        (lambda: With(torch.nn.BatchNorm1d(1)), {}, ["net.3", "BatchNorm1d", "LayerNorm"]),
        (made, {"update": "adam"}, ["update=adam", "one evaluation", "lbfgs", "hybrid"]),
        (made, {"update": "user"}, ["update=user", "lbfgs"]),
        (made, {"gradient_clip_val": 1.0}, ["gradient_clip_val", "portion"]),
        (made, {"accumulate_grad_batches": 2}, ["accumulate_grad_batches"]),
        (made, {"limit_train_batches": 3}, ["limit_train_batches=3", "other samples"]),
        (made, {"loader": DataLoader(data(), 5, drop_last=True)}, ["drop_last=True", "leave"]),
        (lambda: Overflows().double(), {}, ["worker 1", "mini-batch 1", "not finite", "net.0"]),
    ],
)
def test_sandblaster_refuses_by_name_what_it_cannot_compare(
    module: Any, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        trained(2, 4, 2, module=module(), **options)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    "parts",
    [
        {"policy": "hybrid", "exchange": "summed"},
        {"policy": "async", "update": "lbfgs"},
        {"policy": "sandblaster", "exchange": "movement", "update": "mean"},
    ],
)
def test_parts_of_sandblaster_are_refused_apart_from_one_another(parts: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="strategy=sandblaster"):
        make_trainer(HybridStrategy(**parts), 2).fit(made(), DataLoader(data(), 4))


# ---- without Lightning --------------------------------------------------------------------------


def evaluate(worker: Worker, dies: bool = False) -> int:
    """The step of ``Regression`` in a loop of one's own; returns the samples that have counted."""
    counted = 0
    for number, rows in enumerate(worker.batches()):
        if dies and worker.number == 1 and number == 2:
            os._exit(3)
        x, y = (torch.stack(column) for column in zip(*rows, strict=True))
        worker.model.zero_grad()
        loss = torch.nn.functional.mse_loss(worker.model.net(x), y)
        loss.backward()
        counted += len(rows) * worker.push(loss=loss)
    return counted


@pytest.mark.wide
def test_a_loop_of_ones_own_evaluates_as_the_strategy_to_the_bit(tmp_path: Path) -> None:
    """A server that has loaded the first passes goes on within their line search."""
    expected, _ = trained(1, 7, 12)
    first, then = Server(made(), "sandblaster"), Server(module := made(), "sandblaster")
    assert first.run(evaluate, data=data(), batch_size=7, epochs=4) == [4 * N]
    first.save(tmp_path / "run.pt")
    then.load(tmp_path / "run.pt")
    then.run(evaluate, data=data(), batch_size=7, epochs=8)
    assert torch.equal(flat(module), flat(expected))


def test_portions_of_a_loop_of_ones_own_count_once_in_virtual_time() -> None:
    server = Server(module := made(), "sandblaster")
    times = ServiceTimes("pareto", 1.0)
    counted = server.simulate(evaluate, 3, data(), times=times, batch_size=5, epochs=12)
    assert sum(counted) == server.stats()["samples"] == 12 * N
    assert float((flat(module) - alone(12, "lbfgs")[12]).abs().max()) < 1e-9


def test_a_lost_process_leaves_its_portions_to_a_loop_of_ones_own() -> None:
    server = Server(module := made(), "sandblaster", on_failure="continue")
    server.run(partial(evaluate, dies=True), 2, data(), batch_size=5, epochs=6)
    assert server.stats()["samples"] == 6 * N
    assert float((flat(module) - alone(6, "lbfgs")[6]).abs().max()) < 1e-9


@pytest.mark.parametrize(
    ("pushed", "run", "said"),
    [
        ({}, {}, r"epoch 0, mini-batch 1: loss=None was pushed; give push\(gradients, loss="),
        ({"loss": float("nan")}, {}, "loss=nan was pushed"),
        ({"loss": torch.ones(2)}, {}, "give push"),
        ({"loss": "low"}, {}, "loss='low' was pushed"),
        ({}, {"data": None}, "no data was given with exchange=summed"),
        ({}, {"drop_last": True}, "drop_last=True was given"),
    ],
)
def test_what_a_loop_of_ones_own_lacks_is_said(pushed: Any, run: Any, said: str) -> None:
    def body(worker: Worker) -> None:
        for _ in worker.batches():
            worker.push({"w": torch.ones(2)}, **pushed)

    server = Server({"w": torch.zeros(2)}, "sandblaster")
    with pytest.raises(UserError, match=said):
        server.simulate(body, **{"data": 10, **run})


def test_workers_that_step_nothing_need_no_optimizer() -> None:
    with pytest.raises(UserError, match="optimizer='sgd' was given with exchange=summed"):
        Server(torch.zeros(2), "sandblaster", optimizer="sgd")


def test_frozen_layers_that_are_in_eval_mode_may_have_dropout() -> None:
    layer = torch.nn.Dropout(0.5).eval()
    trained(1, 16, 1, module=With(layer).double())


def test_a_search_that_finds_nothing_keeps_the_best_point_and_says_so(recwarn: Any) -> None:
    class Wrong(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss + (loss.detach() - loss) * 2  # the gradient points uphill

    before = flat(wrong := Wrong().double())
    module, trainer = trained(1, 16, 30, module=wrong)
    assert torch.equal(flat(module), before) and trainer.global_step == 30
    assert "LBFGS has found no lower point in" in " ".join(str(each.message) for each in recwarn)


def test_a_minimum_is_said_and_kept(recwarn: Any) -> None:
    module = torch.nn.Linear(4, 1, bias=False).double()

    class Line(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.net = module

    found, _ = trained(2, 9, 20, module=Line())
    x, y = data().tensors
    best = torch.linalg.lstsq(x, y).solution
    assert torch.allclose(found.net.weight.T, best, atol=1e-6)
    said = " ".join(str(each.message) for each in recwarn)
    assert "LBFGS is at a minimum" in said or "LBFGS has found no lower point" in said


def test_the_minimum_of_a_loss_of_small_numbers_is_found_too() -> None:
    place = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    search = LBFGS([place], tolerance_grad=0.0)

    def closure() -> torch.Tensor:
        place.grad = None
        loss = 1e-8 * (place - 3).square().sum()
        loss.backward()
        return loss

    for _ in range(20):
        search.step(closure)
    assert place.item() == pytest.approx(3.0)


def test_weight_decay_of_the_modules_own_optimizer_is_said_to_have_no_effect(
    recwarn: Any,
) -> None:
    module = Regression(lambda p: torch.optim.AdamW(p, weight_decay=0.1)).double()
    warn_of_unused([module.configure_optimizers()])
    assert "weight_decay=0.1" in str(recwarn.pop().message)


@pytest.mark.parametrize(("loss", "warns"), [(torch.sum, True), (torch.mean, False)])
def test_a_loss_that_is_a_sum_is_noticed_in_a_short_portion(
    loss: Any, warns: bool, recwarn: Any
) -> None:
    """Its portion would weigh too little; portions of one size weigh alike in any case."""
    exchange, values = Summed(), torch.rand(70, generator=torch.Generator().manual_seed(0)) + 1
    for portion in values.split(16):
        local = SimpleNamespace(gradients=[], samples=len(portion), loss=float(loss(portion)))
        exchange.step(local)  # type: ignore[arg-type]
    assert bool(recwarn) == warns
    if warns:
        assert "reduction" in str(recwarn.pop().message)


# ---- portions that another worker has processed first --------------------------------------------


class Slow(Regression):
    """Worker 1 logs first, and has its gradient when the other has processed all portions."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        how: dict[str, Any] = {"on_step": False, "on_epoch": True, "reduce_fx": torch.sum}
        self.log("seen", float(len(batch[0])), sync_dist=True, **how)
        loss = super().training_step(batch, batch_idx)
        time.sleep(0.1 * (self.global_rank == 1))
        return loss


@pytest.mark.parametrize("workers", by_default([2, 3], 2))
def test_values_that_sandblaster_workers_log_count_once(workers: int, tmp_path: Path) -> None:
    """When a portion is broken off is not recorded, so a replay needs this, too."""
    run = Run(tmp_path, "sandblaster", workers, module=Slow, trainer={"max_epochs": 3})
    record = run.record()
    assert run.made is not None
    assert float(run.made.callback_metrics["seen"]) == len(regression_data())
    check_equal(run, record)


# ---- replay, virtual time ------------------------------------------------------------------------


class Dawdles(Regression):
    """Worker 1 is slow, so that others process its portions, too."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.02 * (self.global_rank == 1))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("workers", by_default([1, 2, 3], 2))
def test_a_run_is_replayed_to_the_bit(workers: int, tmp_path: Path) -> None:
    """Which worker adds up which portions is another in each run, and the same in a replay."""
    run = Run(tmp_path, "sandblaster", workers, module=Dawdles, trainer={"max_epochs": 4})
    check_equal(run, run.record())


@pytest.mark.parametrize("workers", by_default([1, 2, 5], 2))
def test_sandblaster_in_virtual_time_equals_one_process_with_all_data(workers: int) -> None:
    module = made()
    task = ModuleTask(module, VirtualTrainer(workers), DataLoader(data(), 7), 0)
    times = ServiceTimes("exponential", slower={0: 3.0})
    policy = make_policy("sandblaster")
    world = VirtualWorld(policy, workers, times, task=task, optimizer=task.make_optimizer)
    world.run(epochs=6)
    assert workers == 1 or world.interrupted, "some portions were processed twice"
    found = torch.cat([p.double().flatten() for p in world.parameters()])
    assert float((found - alone(6, "lbfgs")[6]).abs().max()) < 1e-9


class Nothing:
    """A task whose gradients cost nothing."""

    clip, loss = None, 1.0

    def __init__(self, workers: int, portions: int) -> None:
        self.timetable = Timetable(workers * portions, (1,) * workers)

    def parameters(self) -> list[torch.Tensor]:
        return [torch.zeros(1)]

    def gradient(self, worker: int, values: Any) -> list[torch.Tensor]:
        return [torch.ones(1)]

    def study(self, worker: int, epoch: int, positions: Any) -> float:
        return 1.0

    def updated(self, version: int) -> None: ...

    def epoch_ended(self) -> None: ...

    def groups(self) -> Any:
        return ()

    def own_schedules(self) -> Scheduled:
        return self


def pass_s(workers: int, portions: int, backups: bool) -> float:
    """The time of a pass that is one second of work for each of these workers, one in 20 of which
    takes three times as long."""
    slower = dict.fromkeys(range(0, workers, 20), 3.0)
    times = ServiceTimes("lognormal", 1 / portions, 0.2, slower)
    sgd = partial(torch.optim.SGD, lr=0.1)
    task = Nothing(workers, portions)
    policy = make_policy({"name": "sandblaster", "backups": backups})
    world = VirtualWorld(policy, workers, times, task=task, optimizer=sgd)
    world.run(epochs=1)
    return world.now_s


@pytest.mark.slow
@pytest.mark.parametrize("workers", by_default([100, 1000], 100))
def test_small_portions_leave_little_to_wait_for(workers: int) -> None:
    """One portion for each worker takes as long as the slowest of the slow. With n, the pass takes
    little more than a mean worker, and at most one portion of a slow one: 1.03 + 3 / n seconds.
    With backups it is one of a mean worker: 1.03 + 1 / n, and who finds nothing left has begun one
    that a slow worker will not end before."""
    whole, small = pass_s(workers, 1, False), pass_s(workers, 10, False)
    assert 2.5 < whole < 6.5
    assert 1.0 < small < 1.75
    assert whole / small > 1.8
    few, twice, small_twice = (
        pass_s(workers, 4, False),
        pass_s(workers, 4, True),
        pass_s(workers, 10, True),
    )
    assert twice < 1.4 < few, "as fast as with more than twice as many portions"
    assert small_twice < 0.96 * small < small
