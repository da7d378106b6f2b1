"""Two hosts with two workers each train as one host with four."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import HybridStrategy
from hybridtrain.hosts import transport
from hybridtrain.lightning.hosts import agreement
from tests.lightning.toys import make_trainer
from tests.picking import by_default
from tests.support.several_hosts import Host, Pids, run_hosts

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="hosts are forked processes")
EPOCHS, SAMPLES = 3, 64


class Net(pl.LightningModule):
    """A small regression with batch normalisation, and so with buffers."""

    def __init__(self, rate: float = 0.01) -> None:
        super().__init__()
        self.rate = rate
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.Tanh(),
            torch.nn.Linear(16, 1),
        )

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class ReadsGradients(pl.Callback):
    """Sees the mean of all workers' gradients."""

    def on_before_optimizer_step(self, _: Any, module: Any, __: Any) -> None:
        for parameter in module.parameters():
            assert torch.isfinite(parameter.grad).all()


class Slowly(pl.Callback):
    """Gives whoever kills a host the time to do so; says that training has begun."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        time.sleep(0.05)
        if trainer.global_step > 0:
            Path("begun").touch()


class Patiently(Slowly):
    """Leaves host 1 the time to come."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        super().on_train_batch_start(trainer)
        time.sleep(0.0 if Path("../host1/begun").exists() else 0.5)


def data() -> DataLoader[Any]:
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def train(
    n_hosts: int,
    devices: int,
    policy: Any = "hybrid",
    callbacks: tuple[Callable[[], pl.Callback], ...] = (),
    ckpt: Path | None = None,
    epochs: int = EPOCHS,
    saves: bool = False,
    make: Callable[[], Net] = Net,
    clips: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What is left of a training."""
    pl.seed_everything(7, verbose=False)
    module, strategy = make(), HybridStrategy(policy, **options)
    made = [make() for make in callbacks]
    trainer = make_trainer(
        strategy,
        devices,
        num_nodes=n_hosts,
        max_epochs=epochs,
        gradient_clip_val=clips,
        callbacks=made,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in made),
    )
    trainer.fit(module, data(), data(), ckpt_path=ckpt, weights_only=False)
    if saves:
        trainer.save_checkpoint("end.ckpt")
    stats = strategy.run_stats()
    return {
        "weights": {k: v.clone() for k, v in module.state_dict().items()},
        "step": trainer.global_step,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "samples": stats.get("samples"),
        "hosts": stats.get("hosts"),
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
    }


def both(folder: Path, body: Callable[..., Any], **options: Any) -> tuple[list[Host], Host]:
    """Two hosts with two workers, and one host with four."""
    two = run_hosts(folder / "two", partial(body, 2, 2, **options))
    (one,) = run_hosts(folder / "one", partial(body, 1, 4, **options), n_hosts=1)
    for host in (*two, one):
        assert host.status == 0, host.said
    return two, one


def assert_equal(one: dict[str, Any], other: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    for name, value in one["weights"].items():
        assert torch.equal(value, other["weights"][name]), name
    for key in ("step", "metrics", "rates", "samples"):
        assert key in but or one[key] == other[key], key


OWN = {"name": "movement", "every": 4}
LOCK_STEP: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "hybrid, gradients are read": {"callbacks": (ReadsGradients,)},
    "hybrid, int8": {"exchange": {"name": "gradient", "compress": "int8"}},
    "hybrid, bf16": {"transport_dtype": "bf16"},
    "hybrid, bf16 state": {"state_dtype": "bf16"},
    "median": {"update": "median"},
    "local_sgd": {"exchange": OWN},
    "synchronous": {"policy": "synchronous"},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", by_default(LOCK_STEP, "hybrid, gradients are read", "local_sgd"))
def test_in_lock_step_two_hosts_train_what_one_does_to_the_bit(tmp_path: Path, name: str) -> None:
    two, one = both(tmp_path, train, **LOCK_STEP[name])
    assert_equal(two[0].result, one.result)
    assert_equal(two[1].result, one.result)
    assert two[0].result["samples"] == EPOCHS * SAMPLES
    assert all(each["sent"] > 0 for each in two[0].result["hosts"]) and one.result["hosts"] is None


class WithoutBuffers(Net):
    """In float64, as a line search likes it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), self.net[-1])
        self.double()

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss([each.double() for each in batch])


@pytest.mark.slow
def test_two_hosts_evaluate_what_one_does(tmp_path: Path) -> None:
    """Which worker adds up which portions is left to chance, and with it the last bits."""
    two, one = both(tmp_path, train, policy="sandblaster", make=WithoutBuffers, epochs=8)
    assert_equal(two[0].result, two[1].result)
    assert one.result["samples"] == two[0].result["samples"] == 8 * SAMPLES
    for name, value in one.result["weights"].items():
        assert float((value - two[0].result["weights"][name]).abs().max()) < 1e-9, name


FREE: dict[str, dict[str, Any]] = {
    "async": {"policy": "async"},
    "ssp": {"policy": {"name": "ssp", "lead": 1}},
    "downpour": {
        "policy": "async",
        "exchange": {"name": "accumulated", "n_push": 1, "n_fetch": 1},
    },
    "easgd": {"policy": "async", "exchange": {"name": "elastic", "every": 2}},
}


@pytest.mark.parametrize("name", by_default(FREE, "async"))
def test_workers_that_run_freely_train_on_each_sample_once(tmp_path: Path, name: str) -> None:
    two = run_hosts(tmp_path, partial(train, 2, 2, **FREE[name]))
    for host in two:
        assert host.status == 0, host.said
    assert two[0].result["samples"] == EPOCHS * SAMPLES
    assert_equal(two[0].result, two[1].result)


@pytest.mark.slow
def test_a_worker_of_another_host_is_restarted_and_nothing_changes(tmp_path: Path) -> None:
    kill = [{"worker": 3, "step": 4, "kind": "kill"}]
    disturbed = run_hosts(tmp_path / "a", partial(train, 2, 2, on_failure="restart", faults=kill))
    undisturbed = run_hosts(tmp_path / "b", partial(train, 2, 2))
    assert [host.status for host in disturbed] == [0, 0], disturbed[0].said
    assert_equal(disturbed[0].result, undisturbed[0].result)
    assert "restart 1" in disturbed[0].said


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [OWN, pytest.param("gradient", marks=pytest.mark.slow)])
def test_a_checkpoint_of_two_hosts_is_resumed_on_one_and_back(
    tmp_path: Path, exchange: Any
) -> None:
    begun = partial(train, exchange=exchange, epochs=1, saves=True)
    two = run_hosts(tmp_path / "two", partial(begun, 2, 2))
    one = run_hosts(tmp_path / "one", partial(begun, 1, 4), n_hosts=1)
    assert [host.status for host in (*two, *one)] == [0, 0, 0], two[0].said
    again = partial(train, exchange=exchange)
    there = tmp_path / "two" / "host0" / "end.ckpt", tmp_path / "one" / "host0" / "end.ckpt"
    assert not (tmp_path / "two" / "host1" / "end.ckpt").exists()
    (on_one,) = run_hosts(tmp_path / "c", partial(again, 1, 4, ckpt=there[0]), n_hosts=1)
    on_two = run_hosts(tmp_path / "d", partial(again, 2, 2, ckpt=there[1]))
    assert on_one.status == 0 == on_two[0].status, on_one.said + on_two[0].said
    assert_equal(on_one.result, on_two[0].result)


# ---- hosts that are lost ------------------------------------------------------------------------


def kill_when_training(folder: Path, host: int, how: int, pids: Pids) -> None:
    wait_for((folder / f"host{host}" / "begun").exists)
    os.kill(pids[host], how)


def wait_for(there: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60.0
    while not there() and time.monotonic() < limit:
        time.sleep(0.02)


def lose(folder: Path, host: int, how: int = signal.SIGKILL, **options: Any) -> list[Host]:
    """Two hosts, of which one gets a signal in the middle of training."""
    body = partial(train, 2, 2, callbacks=(Slowly,), **options)
    return run_hosts(folder, body, meanwhile=partial(kill_when_training, folder, host, how))


def test_a_host_is_lost_and_the_run_ends_with_its_name(tmp_path: Path) -> None:
    first, lost = lose(tmp_path, 1)
    assert (first.status, lost.status) == (1, -signal.SIGKILL)
    assert "is lost with host 1 (" in first.said


@pytest.mark.parametrize("policy", ["async", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_a_host_is_lost_and_the_other_trains_on_all_that_is_left(
    tmp_path: Path, policy: str
) -> None:
    first, lost = lose(tmp_path, 1, policy=policy, on_failure="continue")
    assert (first.status, lost.status) == (0, -signal.SIGKILL), first.said
    assert first.result["samples"] == EPOCHS * SAMPLES


def stop_until_it_is_lost(folder: Path, pids: Pids) -> None:
    kill_when_training(folder, 1, signal.SIGSTOP, pids)
    wait_for(lambda: "is lost" in (folder / "host0" / "log").read_text())
    os.kill(pids[1], signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["async", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_a_host_that_hangs_is_lost_and_ends_once_it_wakes(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "SILENT_S", 6.0)
    body = partial(train, 2, 2, policy, callbacks=(Slowly,), on_failure="continue")
    first, stopped = run_hosts(tmp_path, body, meanwhile=partial(stop_until_it_is_lost, tmp_path))
    assert (first.status, stopped.status) == (0, 1), first.said
    assert first.result["samples"] == EPOCHS * SAMPLES
    assert "no sign of life for 6 s" in first.said and "host 0, which has" in stopped.said


def test_the_server_is_lost_and_the_other_host_ends_in_one_line(tmp_path: Path) -> None:
    lost, other = lose(tmp_path, 0)
    assert (lost.status, other.status) == (-signal.SIGKILL, 1)
    assert "host 0, which has the parameters, is lost" in other.said


@pytest.mark.parametrize("host", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_signal_to_one_host_ends_both(tmp_path: Path, host: int) -> None:
    ended = lose(tmp_path, host, signal.SIGTERM)
    assert [each.status for each in ended] == [128 + signal.SIGTERM] * 2, [
        each.said[-3000:] for each in ended
    ]


def test_an_error_of_a_worker_elsewhere_is_shown_on_host_0(tmp_path: Path) -> None:
    wrong = [{"worker": 2, "step": 3, "kind": "exception"}]
    first, other = run_hosts(tmp_path, partial(train, 2, 2, faults=wrong))
    assert (first.status, other.status) == (1, 1)
    assert "This happened in worker 2" in first.said
    assert "the run has ended on host 0: InjectedFault" in other.said


# ---- hosts that come back, or later -------------------------------------------------------------


def kill_and_start(folder: Path, pids: Pids) -> None:
    kill_when_training(folder, 1, signal.SIGKILL, pids)
    (folder / "host1" / "begun").unlink()
    pids.start(1)


# Makes decisions of its own; each host has another directory.
SAVES = partial(ModelCheckpoint, monitor="val", save_last=True)
COMES_BACK: dict[str, dict[str, Any]] = {
    "hybrid": {"callbacks": (Slowly,)},
    "hybrid, checkpoints": {"callbacks": (Slowly, SAVES)},
    "async": {"callbacks": (Slowly,), "policy": "async"},
    "hybrid, gradients are read": {"callbacks": (Slowly, ReadsGradients)},
    "ssp": {"callbacks": (Slowly,), "policy": {"name": "ssp", "lead": 1}},
    "backup": {"callbacks": (Slowly,), "policy": {"name": "backup", "k": 3}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", by_default(COMES_BACK, "hybrid"))
def test_a_host_that_comes_back_takes_its_place(tmp_path: Path, name: str) -> None:
    body = partial(train, 2, 2, **COMES_BACK[name], on_failure="restart", max_restarts=1)
    disturbed = run_hosts(tmp_path / "a", body, meanwhile=partial(kill_and_start, tmp_path / "a"))
    assert [host.status for host in disturbed] == [0, 0], [x.said[-3000:] for x in disturbed]
    assert disturbed[0].result["samples"] == EPOCHS * SAMPLES
    assert_equal(disturbed[0].result, disturbed[1].result)
    if "policy" not in COMES_BACK[name]:
        undisturbed = run_hosts(tmp_path / "b", body)
        assert_equal(disturbed[0].result, undisturbed[0].result)


def start_when_training(folder: Path, pids: Pids) -> None:
    wait_for((folder / "host0" / "begun").exists)
    pids.start(1)


@pytest.mark.parametrize("choice", by_default(["continue", "restart"], "continue"))
def test_a_host_that_comes_later_takes_a_vacant_place(tmp_path: Path, choice: str) -> None:
    body = partial(train, 2, 2, "async", (Patiently,), epochs=12, on_failure=choice, min_hosts=1)
    meanwhile = partial(start_when_training, tmp_path)
    hosts = run_hosts(tmp_path, body, meanwhile=meanwhile, late=1)
    assert [host.status for host in hosts] == [0, 0], [x.said[-3000:] for x in hosts]
    assert hosts[0].result["samples"] == 12 * SAMPLES
    assert (tmp_path / "host1" / "begun").exists()  # its workers have trained
    assert_equal(hosts[0].result, hosts[1].result)


def start_and_end(folder: Path, pids: Pids) -> None:
    """Host 1 comes while training runs, and gets a SIGTERM once it trains."""
    start_when_training(folder, pids)
    kill_when_training(folder, 1, signal.SIGTERM, pids)


@pytest.mark.slow
def test_a_signal_to_a_host_that_came_later_ends_both(tmp_path: Path) -> None:
    body = partial(train, 2, 2, "async", (Slowly,), epochs=200, on_failure="restart", min_hosts=1)
    hosts = run_hosts(tmp_path, body, meanwhile=partial(start_and_end, tmp_path), late=1)
    assert [host.status for host in hosts] == [143] * 2, [host.said[-3000:] for host in hosts]


class Counted(pl.Callback):
    """Worker 0 writes down how many steps each epoch has, and leaves host 1 the time to come."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_rank == 0:
            self.file = Path("steps").open("a")  # noqa: SIM115

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        Path("begun").touch()
        time.sleep(0.0 if Path("../host1/begun").exists() else 0.1)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_rank == 0:
            print(trainer.num_training_batches, file=self.file, flush=True)


class Plain(Net):
    """Without buffers and moments."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)]


def trained_by_hand(steps: list[int]) -> dict[str, torch.Tensor]:
    """The weights after so many steps in each epoch, each with the mean of its samples."""
    pl.seed_everything(7, verbose=False)
    module = Plain()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    for epoch, n in enumerate(steps):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.9 ** (epoch // 20)
        for part in x.split(SAMPLES // n):
            optimizer.zero_grad()
            module.loss((part, part.sum(1, keepdim=True))).backward()
            optimizer.step()
    return module.state_dict()


COMES_LATER: dict[str, dict[str, Any]] = {
    "continue": {"on_failure": "continue"},
    "continue, checkpoints": {"on_failure": "continue", "callbacks": (Counted, SAVES)},
    "restart": {"on_failure": "restart"},
    "restart, host sums": {"on_failure": "restart", "host_sums": True},
}


@pytest.mark.parametrize("name", by_default(COMES_LATER, "continue, checkpoints"))
def test_in_lock_step_a_late_host_shares_the_epochs_from_the_next_on(
    tmp_path: Path, name: str
) -> None:
    given = {"callbacks": (Counted,), "make": Plain, "keep_order": True} | COMES_LATER[name]
    body = partial(train, 2, 2, epochs=30, min_hosts=1, **given)
    meanwhile = partial(start_when_training, tmp_path)
    hosts = run_hosts(tmp_path, body, meanwhile=meanwhile, late=1)
    assert [host.status for host in hosts] == [0, 0], [x.said[-3000:] for x in hosts]
    steps = list(map(int, (tmp_path / "host0" / "steps").read_text().split()))
    n_alone = steps.index(SAMPLES // 16)
    alone, together = n_alone * [SAMPLES // 8], (30 - n_alone) * [SAMPLES // 16]
    assert 0 < n_alone < 30 and steps == alone + together
    for key, value in trained_by_hand(steps).items():
        torch.testing.assert_close(hosts[0].result["weights"][key], value)
    assert hosts[0].result["samples"] == 30 * SAMPLES and hosts[0].result["step"] == sum(steps)
    assert_equal(hosts[0].result, hosts[1].result)


@pytest.mark.slow
@pytest.mark.parametrize("policy", by_default(["async", "hybrid"], "async"))
def test_a_host_that_died_comes_back_though_the_others_went_on(tmp_path: Path, policy: str) -> None:
    body = partial(train, 2, 2, policy, (Patiently,), epochs=12, on_failure="continue", min_hosts=2)
    hosts = run_hosts(tmp_path, body, meanwhile=partial(kill_and_start, tmp_path))
    assert [host.status for host in hosts] == [0, 0], [x.said[-3000:] for x in hosts]
    assert hosts[0].result["samples"] == 12 * SAMPLES
    assert (tmp_path / "host1" / "begun").exists()
    assert_equal(hosts[0].result, hosts[1].result)


def come_and_go(folder: Path, pids: Pids) -> None:
    """Host 1 comes four times, and is killed three times: waiting, admitted or training."""
    wait_for((folder / "host0" / "begun").exists)
    for turn, pause_s in enumerate((0.0, 0.8, 1.6, None), 1):
        pids.start(1)
        wait_for(partial(has_come, folder, turn))
        if pause_s is not None:
            time.sleep(pause_s)
            os.killpg(pids[1], signal.SIGKILL)


def has_come(folder: Path, times: int) -> bool:
    return (folder / "host0" / "log").read_text().count("host 1 comes") == times


@pytest.mark.slow
@pytest.mark.parametrize("validates", [True, False])
def test_a_host_that_is_lost_before_it_begins_leaves_no_sample(
    tmp_path: Path, validates: bool
) -> None:
    make, callbacks = (Net, (Paced, ReadsGradients)) if validates else (Plain, (Paced,))
    body = partial(
        train, 2, 2, "hybrid", callbacks, None, 8, make=make, on_failure="continue", min_hosts=1
    )
    hosts = run_hosts(tmp_path, body, meanwhile=partial(come_and_go, tmp_path), late=1)
    assert [host.status for host in hosts] == [0, 0], [x.said[-3000:] for x in hosts]
    assert hosts[0].result["samples"] == 8 * SAMPLES
    assert_equal(hosts[0].result, hosts[1].result)


class Paced(pl.Callback):
    """An epoch takes long enough for a host to come and go."""

    def on_train_batch_start(self, *_: Any) -> None:
        Path("begun").touch()
        time.sleep(0.15)


def resumes_elsewhere(there: Path, found: tuple[int, str] | None) -> dict[str, Any]:
    """Host 1 is given no checkpoint, and has ``found`` where host 0 has its own."""
    if os.environ["NODE_RANK"] == "0":
        return train(2, 2, ckpt=there)
    agreement._size_and_digest = lambda _: found
    return train(2, 2)


@pytest.mark.parametrize("found", [None, pytest.param((3, "another"), marks=pytest.mark.slow)])
def test_all_go_on_from_the_checkpoint_of_host_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: tuple[int, str] | None
) -> None:
    run_hosts(tmp_path / "a", partial(train, 2, 2, epochs=1, saves=True))
    monkeypatch.setattr(agreement, "_PART_BYTES", 1000)
    body = partial(resumes_elsewhere, tmp_path / "a" / "host0" / "end.ckpt", found)
    resumed, whole = (
        run_hosts(tmp_path / "b", body),
        run_hosts(tmp_path / "c", partial(train, 2, 2)),
    )
    assert [host.status for host in resumed] == [0, 0], resumed[1].said
    assert_equal(resumed[0].result, whole[0].result, but=("samples",))  # of this run
    assert_equal(resumed[1].result, resumed[0].result)


def test_a_checkpoint_that_host_0_lacks_is_one_error(tmp_path: Path) -> None:
    hosts = run_hosts(tmp_path, partial(train, 2, 1, ckpt=tmp_path / "gone.ckpt"))
    assert [host.status for host in hosts] == [1, 1]
    assert "FileNotFoundError: Checkpoint file not found" in hosts[0].said


# ---- hosts that do not fit ----------------------------------------------------------------------


def differing() -> dict[str, Any]:
    return train(2, 2, policy="hybrid" if os.environ["NODE_RANK"] == "0" else "async")


def test_hosts_with_other_options_are_named_before_training(tmp_path: Path) -> None:
    first, other = run_hosts(tmp_path, differing)
    assert (first.status, other.status) == (1, 1)
    assert "host 1 does not fit: " in first.said and "policy" in first.said


def test_hogwild_is_refused_between_hosts(tmp_path: Path) -> None:
    refused = run_hosts(tmp_path, partial(train, 2, 2, policy="hogwild"))
    for host in refused:
        assert host.status == 1 and "use num_nodes=1, or strategy=async" in host.said


def test_each_host_gets_the_predictions_of_all_workers(tmp_path: Path) -> None:
    def predictions(n_hosts: int = 2, devices: int = 1) -> Any:
        return make_trainer("hybrid", devices, num_nodes=n_hosts).predict(Predicts(), data())

    hosts = run_hosts(tmp_path, predictions)
    assert [host.status for host in hosts] == [0, 0], [host.said[-2000:] for host in hosts]
    wanted = torch.cat(predictions(1, 2))
    for host in hosts:
        assert torch.equal(torch.cat(host.result), wanted) and len(wanted) == SAMPLES


class Predicts(Net):
    def predict_step(self, batch: Any, _: int) -> torch.Tensor:
        return batch[1] + 1


@pytest.mark.few(3)
@pytest.mark.parametrize("policy", ["hybrid", "async", "local_sgd"])
@pytest.mark.parametrize(
    ("own", "named"),
    [
        ("SAMPLES", r"samples of loader 0 is 40 on host 1 and 64 on host 0; give"),
        ("BATCH", r"batch sizes of loader 0 is \[2, 2\] on host 1 and \[4, 4\] on host 0"),
        ("RATE", r"lr of optimizer 0 is 0.5 on host 1 and 0.01 on host 0; configure"),
    ],
)
def test_hosts_with_other_data_or_rates_are_told_apart(
    policy: str, own: str, named: str, tmp_path: Path
) -> None:
    def run() -> None:
        host = int(os.environ["NODE_RANK"])
        n = 40 if own == "SAMPLES" and host else SAMPLES
        pl.seed_everything(1)
        trainer = make_trainer(policy, 1, num_nodes=2, max_epochs=2)
        size = 2 if own == "BATCH" and host else 4
        trainer.fit(
            Net(0.5 if own == "RATE" and host else 0.01),
            datamodule=Owned(n, size),
        )

    for host in run_hosts(tmp_path, run):
        assert host.status == 1 and re.search(named, host.said), host.said[-3000:]


class Owned(pl.LightningDataModule):
    """Data that a host makes by itself, in its workers."""

    def __init__(self, n: int, size: int) -> None:
        super().__init__()
        self.n, self.size = n, size

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(self.n, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=self.size)
