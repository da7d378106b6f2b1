"""The workers of a host go on together, and are one worker to the exchange between hosts."""

from __future__ import annotations

import os
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
from pytorch_lightning.plugins.precision import Precision
from torch.utils.data import DataLoader, Subset, TensorDataset

from hybridtrain import HybridStrategy
from hybridtrain.engine.monitoring.hang_detector import Doing
from hybridtrain.errors import UserError
from tests.lightning.hosts.test_two_hosts import Slowly, kill_when_training
from tests.lightning.toys import make_trainer
from tests.picking import by_default
from tests.support.several_hosts import Host, run_hosts

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="hosts are forked processes")
SIZE, EPOCHS = 3, 2  # of a worker's mini-batch
NESTEROV = {"name": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}
Weights = dict[str, torch.Tensor]


class Net(pl.LightningModule):
    """In double precision, so that only rounding is left of the order of a sum."""

    def __init__(self, adam: bool = True) -> None:
        super().__init__()
        self.adam = adam
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        ).double()

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        kind = torch.optim.AdamW if self.adam else torch.optim.SGD
        optimizer = kind(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def data(samples: int) -> TensorDataset:
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(0)).double()
    return TensorDataset(x, x.sum(1, keepdim=True))


def as_hosts(samples: int, hosts: int, each: int) -> list[int]:
    """The order in which ``hosts`` workers get the samples of as many hosts with ``each``."""
    whole, order = hosts * each * SIZE, []
    for start in range(0, samples, whole):
        rest = min(whole, samples - start)
        shares = [[p for p in range(rest) if p % (hosts * each) // each == h] for h in range(hosts)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1, "dealt alike to both"
        order += [start + shares[n % hosts][n // hosts] for n in range(rest)]
    return order


def train(
    n_hosts: int,
    devices: int,
    exchange: Any = None,
    samples: int = 84,
    size: int = SIZE,
    order: list[int] | None = None,
    adam: bool = True,
    kind: type[Net] = Net,
    saves_every: int | None = None,
    ckpt: Path | None = None,
    epochs: int = EPOCHS,
    callbacks: tuple[Callable[[], pl.Callback], ...] = (),
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    module = kind(adam)
    strategy = HybridStrategy(exchange=exchange, keep_order=True, **options)
    extra: list[Any] = [make() for make in callbacks]
    if saves_every is not None:
        name = {"filename": "{step}", "save_top_k": -1, "every_n_train_steps": saves_every}
        extra.append(ModelCheckpoint(dirpath="saved", **name))
    made = make_trainer(
        strategy,
        devices,
        num_nodes=n_hosts,
        max_epochs=epochs,
        callbacks=extra,
        enable_checkpointing=saves_every is not None,
        **(trainer or {}),
    )
    known: Any = data(samples)
    loader = DataLoader(known if order is None else Subset(known, order), batch_size=size)
    made.fit(module, loader, DataLoader(known, batch_size=size), ckpt_path=ckpt, weights_only=False)
    stats = strategy.run_stats()
    return {
        "weights": {k: v.clone() for k, v in module.state_dict().items()},
        "step": made.global_step,
        "val": float(made.callback_metrics["val"]),
        "rates": [group["lr"] for group in made.optimizers[0].param_groups],
        "samples": stats.get("samples"),
        "updates": stats.get("updates"),
        "hosts": stats.get("hosts"),
        "waiting": stats.get("waiting_share"),
    }


def two_hosts(folder: Path, **options: Any) -> dict[str, Any]:
    """Two hosts with two workers each."""
    hosts = run_hosts(folder / "two", partial(train, 2, 2, **options))
    for host in hosts:
        assert host.status == 0, host.said
    assert hosts[1].result["val"] == hosts[0].result["val"]
    return dict(hosts[0].result)


def one_host(folder: Path, devices: int, **options: Any) -> dict[str, Any]:
    (host,) = run_hosts(folder / "one", partial(train, 1, devices, **options), n_hosts=1)
    assert host.status == 0, host.said
    return dict(host.result)


def assert_close(one: dict[str, Any], other: dict[str, Any], rounding: float = 1e-13) -> None:
    for name, value in one["weights"].items():
        assert (value - other["weights"][name]).abs().max() <= rounding, name
    assert one["val"] == pytest.approx(other["val"], abs=rounding, rel=rounding)
    for key in ("step", "rates", "samples"):
        assert one[key] == other[key], key


def movement(every: int, **options: Any) -> dict[str, Any]:
    return {"name": "movement", "every": every, **options}


STREAMING = {"name": "streaming", "every": 4, "fragments": 2, "overlap": 1, "mix": 0.25}
AS_ONE: dict[str, dict[str, Any]] = {
    "diloco": {"exchange": movement(4), "update": NESTEROV},
    "the last step is one worker's": {"exchange": movement(4), "update": NESTEROV, "samples": 85},
    "clipped": {"exchange": movement(3), "trainer": {"gradient_clip_val": 0.3}, "samples": 87},
    "accumulated": {"exchange": movement(2), "trainer": {"accumulate_grad_batches": 2}},
    "streaming_diloco": {"exchange": STREAMING, "update": NESTEROV},
    "int8": {"exchange": movement(4, compress="int8")},
    "easgd": {"exchange": {"name": "elastic", "every": 3}, "samples": 85},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", by_default(AS_ONE, "diloco", "the last step is one worker's"))
def test_a_host_is_a_worker_with_a_larger_mini_batch(tmp_path: Path, name: str) -> None:
    """To rounding: ``diloco`` with ``inside=hybrid`` is ``diloco`` with a worker per host."""
    options = AS_ONE[name]
    two = two_hosts(tmp_path, inside="hybrid", **options)
    order = as_hosts(options.get("samples", 84), 2, 2)
    one = one_host(tmp_path, 2, size=2 * SIZE, order=order, **options)
    assert_close(two, one, 1e-6 if name == "int8" else 1e-13)
    assert two["updates"] == one["updates"]


@pytest.mark.few(1)
@pytest.mark.parametrize("samples", [84, 86])
def test_a_movement_at_each_step_is_hybrid_over_both_hosts(tmp_path: Path, samples: int) -> None:
    """With plain SGD, to rounding."""
    plain: dict[str, Any] = {"adam": False, "samples": samples}
    two = two_hosts(tmp_path, inside="hybrid", exchange=movement(1), **plain)
    assert_close(two, one_host(tmp_path, 4, **plain))


@pytest.mark.slow
@pytest.mark.parametrize("samples", [84, pytest.param(86, marks=pytest.mark.slow)])
def test_a_mean_of_parameters_in_a_host_is_a_part_of_that_of_all(
    tmp_path: Path, samples: int
) -> None:
    """Two means at once, of a host and of hosts, are one of all workers, weighted by samples."""
    inside = {"name": "local_sgd", "every": 4}
    two = two_hosts(tmp_path, inside=inside, exchange=movement(4), samples=samples)
    assert_close(two, one_host(tmp_path, 4, exchange=movement(4), samples=samples))


def test_a_mean_of_parameters_at_each_step_is_one_of_gradients(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"exchange": movement(3), "adam": False, "update": NESTEROV}
    inside = {"name": "local_sgd", "every": 1}
    parameters = one_host(tmp_path / "a", 2, inside=inside, **plain)
    assert_close(parameters, one_host(tmp_path / "b", 2, inside="hybrid", **plain))


class LeavesOut(Net):
    """The third mini-batch of each epoch has no loss for every second sample."""

    def training_step(self, batch: Any, index: int) -> Any:
        if index == 2 and self.trainer.world_size == 2:
            return None if self.trainer.global_rank == 1 else self.loss(batch)
        return self.loss([part[::2] for part in batch] if index == 2 else batch)


@pytest.mark.slow
def test_a_worker_without_a_loss_steps_with_the_mean_of_the_others(tmp_path: Path) -> None:
    options: dict[str, Any] = {"exchange": movement(4), "trainer": {"gradient_clip_val": 0.3}}
    together = one_host(tmp_path / "a", 2, kind=LeavesOut, inside="hybrid", **options)
    one = one_host(tmp_path / "b", 1, kind=LeavesOut, size=2 * SIZE, **options)
    assert_close({**together, "samples": 0}, {**one, "samples": 0})


class SkipsOne(Precision):
    """As a gradient scaler that has seen an overflow."""

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **more: Any) -> Any:
        if model.trainer.global_step == 2:
            return closure()
        return super().optimizer_step(optimizer, model, closure, **more)


@pytest.mark.slow
def test_a_step_that_precision_skips_is_skipped_by_the_host(tmp_path: Path) -> None:
    options = {"exchange": movement(4), "trainer": {"plugins": [SkipsOne()]}}
    together = one_host(tmp_path / "a", 2, inside="hybrid", **options)
    one = one_host(tmp_path / "b", 1, size=2 * SIZE, **options)
    assert_close({**together, "samples": 0}, {**one, "samples": 0})


@pytest.mark.slow
def test_one_row_per_host_and_movement_travels(tmp_path: Path) -> None:
    options: dict[str, Any] = {"exchange": movement(7), "update": NESTEROV, "epochs": 1}
    together = two_hosts(tmp_path / "a", inside="hybrid", **options)
    alone = two_hosts(tmp_path / "b", **options)
    row = 8 * sum(value.numel() for value in together["weights"].values())
    (one, _), (two, _) = together["hosts"], alone["hosts"]
    assert together["updates"] == alone["updates"] == 1
    assert two["received"] - one["received"] == pytest.approx(row, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "inside", ["hybrid", pytest.param({"name": "local_sgd", "every": 3}, marks=pytest.mark.slow)]
)
def test_a_checkpoint_between_two_movements_is_resumed_to_the_bit(
    tmp_path: Path, inside: Any
) -> None:
    body = partial(train, 2, 2, movement(4), update=NESTEROV, inside=inside, samples=120)
    whole = run_hosts(tmp_path / "whole", partial(body, saves_every=5))
    assert [host.status for host in whole] == [0, 0], whole[0].said
    saved = tmp_path / "whole" / "host0" / "saved" / "step=5.ckpt"
    resumed = run_hosts(tmp_path / "resumed", partial(body, ckpt=saved))
    assert [host.status for host in resumed] == [0, 0], resumed[0].said
    for name, value in whole[0].result["weights"].items():
        assert torch.equal(value, resumed[0].result["weights"][name]), name
    for key in ("step", "val", "rates"):
        assert whole[0].result[key] == resumed[0].result[key], key


@pytest.mark.slow
def test_a_checkpoint_of_two_hosts_goes_on_as_one_group(tmp_path: Path) -> None:
    """All workers of the group have the state of the first one."""
    body = partial(train, exchange=movement(4), inside="hybrid", samples=120)
    whole = run_hosts(tmp_path / "two", partial(body, 2, 2, saves_every=5))
    saved = tmp_path / "two" / "host0" / "saved" / "step=5.ckpt"
    (one,) = run_hosts(tmp_path / "four", partial(body, 1, 4, ckpt=saved), n_hosts=1)
    (two,) = run_hosts(tmp_path / "2", partial(body, 1, 2, ckpt=saved, size=2 * SIZE), n_hosts=1)
    assert [host.status for host in (*whole, one, two)] == [0] * 4, one.said + two.said
    assert one.result["val"] == pytest.approx(two.result["val"], rel=1e-12)


# ---- ends that nobody wanted --------------------------------------------------------------------


def test_a_worker_that_dies_ends_the_run_with_its_name(tmp_path: Path) -> None:
    kill = [{"worker": 3, "step": 3, "kind": "kill"}]
    body = partial(train, 2, 2, movement(4), inside="hybrid", faults=kill)
    first, other = run_hosts(tmp_path, body)
    assert (first.status, other.status) == (1, 1)
    assert "worker 3" in first.said and "was killed" in first.said


def ended(folder: Path, host: int, how: int) -> list[Host]:
    body = partial(train, 2, 2, movement(4), inside="hybrid", callbacks=(Slowly,))
    return run_hosts(folder, body, meanwhile=partial(kill_when_training, folder, host, how))


def test_a_host_that_is_lost_ends_the_run_with_its_name(tmp_path: Path) -> None:
    first, lost = ended(tmp_path, 1, signal.SIGKILL)
    assert (first.status, lost.status) == (1, -signal.SIGKILL)
    assert "is lost with host 1 (" in first.said


def test_a_signal_ends_both_hosts(tmp_path: Path) -> None:
    hosts = ended(tmp_path, 0, signal.SIGTERM)
    assert [host.status for host in hosts] == [128 + signal.SIGTERM] * 2, hosts[0].said


class StopsAlone(pl.Callback):
    """One worker wants to end training; the others take one more round with it."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_rank == 1 and trainer.global_step == 3


def test_the_wish_of_one_worker_to_stop_is_all_workers(tmp_path: Path) -> None:
    trainer = {"min_epochs": 0}
    two = two_hosts(
        tmp_path, exchange=movement(2), inside="hybrid", callbacks=(StopsAlone,), trainer=trainer
    )
    assert 3 < two["step"] < 14


class Lags(pl.Callback):
    """Worker 1 is busy for a while, and shows it."""

    def on_train_batch_start(self, trainer: Any, _: Any, __: Any, number: int) -> None:
        client = trainer.strategy.client
        for _ in range(6 if (client.worker, number) == (1, 3) else 0):
            client.heartbeat.beat(Doing.BETWEEN)
            time.sleep(0.4)


def test_a_worker_that_waits_for_another_one_of_its_host_neither_hangs_nor_computes(
    tmp_path: Path,
) -> None:
    parts: dict[str, Any] = {"callbacks": (Lags,), "hang_timeout_s": 1.0}
    found = one_host(tmp_path, 2, exchange=movement(4), inside="hybrid", epochs=1, **parts)
    assert found["waiting"][0] > 0.5 > found["waiting"][1]


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inside": "hybrid"}, "every step's gradient goes to the server"),
        ({"inside": "hybrid", "policy": "hogwild"}, "workers write to the masters"),
        ({"inside": "hybrid", "policy": "async", "exchange": movement(4)}, "run freely there"),
        (
            {"inside": "local_sgd", "exchange": {"name": "elastic", "every": 4}},
            "inside=hybrid goes with it",
        ),
    ],
)
def test_what_cannot_go_together_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        train(1, 2, **options)


class Looks(Net):
    """Steps the rows of a table."""

    def __init__(self, _: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(9, 8, sparse=True).double()

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss((self.table(batch[0][:, 0].long().clamp(0, 8)), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(self.table.parameters())


def test_an_optimizer_that_takes_no_dense_gradients_is_refused() -> None:
    with pytest.raises(UserError, match=r"SparseAdam was given with inside=hybrid, .*use Adam"):
        train(1, 2, movement(4), kind=Looks, inside="hybrid")


def test_a_replay_is_refused(tmp_path: Path) -> None:
    strategy: Any = HybridStrategy(exchange=movement(4), inside="hybrid", record=tmp_path)
    strategy.recording.instead = object()
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, **off)
    with pytest.raises(UserError, match="cannot be replayed"):
        trainer.fit(Net(), DataLoader(data(12), batch_size=SIZE))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UserError, match="known are hybrid, local_sgd"):
        HybridStrategy(exchange=movement(4), inside="async")
