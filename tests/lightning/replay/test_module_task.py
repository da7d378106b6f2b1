"""Modules in virtual time: the same numbers as in processes, from one process."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hybridtrain  # noqa: F401 (makes the strategies known)
from hybridtrain import HybridStrategy
from hybridtrain.engine.exchanges import Requirements, begin_policy, make_exchange
from hybridtrain.engine.exchanges.gradient import Gradient
from hybridtrain.engine.policies import make_policy
from hybridtrain.engine.protocol.messages import Clip
from hybridtrain.errors import UserError
from hybridtrain.lightning.replay.module_task import ModuleTask, OptimizerSchedules, VirtualTrainer
from hybridtrain.virtual.network import Conditions
from hybridtrain.virtual.script import Dies, Joins, Script
from hybridtrain.virtual.service_times import ServiceTimes
from hybridtrain.virtual.virtual_world import VirtualWorld
from tests.picking import by_default

N = 22  # samples; the last global mini-batch of 2 workers with 4 each is an uneven one
TIMES = ServiceTimes("exponential", slower={1: 3.0})


class Toy(pl.LightningModule):
    """Regression, with whatever optimizer and schedule are wanted; remembers what it has seen."""

    def __init__(self, kind: str = "sgd", interval: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.kind, self.interval = kind, interval
        self.seen: Counter[int] = Counter()

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        x, index = batch
        self.seen.update(index.tolist())
        loss = (self.net(x) - x.square()).square().mean()
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        kinds: dict[str, Any] = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
            "adam": lambda p: torch.optim.Adam(p, lr=0.05),
            "groups": lambda p: torch.optim.Adam([{"params": p[1::2]}, {"params": p[::2]}], 0.05),
        }
        optimizer = kinds[self.kind](list(self.parameters()))
        if self.interval is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        config = {"scheduler": schedule, "interval": self.interval, "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": config}


def loader(batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    x = torch.linspace(-1, 1, N).unsqueeze(1)
    return DataLoader(TensorDataset(x, torch.arange(N)), batch_size, shuffle=True, **options)


def virtual(
    policy: Any,
    module: Toy,
    workers: int = 2,
    clip: Clip | None = None,
    epochs: float = math.inf,
    wants: Requirements | None = None,
    **rest: Any,
) -> VirtualWorld:
    trainer = VirtualTrainer(workers)
    lesson = ModuleTask(module, trainer, loader(), 3, clip, epochs, wants)
    return VirtualWorld(
        make_policy(policy), workers, TIMES, task=lesson, optimizer=lesson.make_optimizer, **rest
    )


def trained(module: Toy, strategy: Any, devices: int, epochs: int, **options: Any) -> list[Tensor]:
    pl.seed_everything(3, verbose=False)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_epochs=epochs, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **options,
    )  # fmt: skip
    trainer.fit(module, loader())
    return [p.detach().clone() for p in module.parameters()]


def assert_same(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("kind", "interval", "clip"),
    by_default(
        [("sgd", None, None), ("adam", "step", None), ("adam", None, 0.05), ("sgd", "epoch", None)],
        ("adam", "step", None),
        ("adam", None, 0.05),
    ),
)
def test_hybrid_in_virtual_time_is_hybrid_in_processes_to_the_bit(
    kind: str, interval: str | None, clip: float | None
) -> None:
    """Uneven shares, momentum, schedules, clipping, parameters without a gradient: 4 epochs."""
    real = trained(Toy(kind, interval), "hybrid", 2, 4, gradient_clip_val=clip)
    world = virtual("hybrid", Toy(kind, interval), clip=Clip("norm", clip) if clip else None)
    world.run(updates=4 * 3)
    assert_same(world.parameters(), real)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "interval", "clip", "compress"),
    [
        ("sgd", "step", None, None),  # which counts each worker's own steps
        ("adam", None, None, None),
        ("sgd", "epoch", 0.05, None),
        ("groups", None, None, "topk"),
    ],
)
def test_local_sgd_in_virtual_time_is_local_sgd_in_processes_to_the_bit(
    kind: str, interval: str | None, clip: float | None, compress: str | None
) -> None:
    """Three steps an epoch: a mean after two of them, and one where all meet."""
    exchange = make_exchange({"name": "movement", "every": 2, "compress": compress})
    strategy = HybridStrategy("hybrid", exchange=exchange)
    real = trained(Toy(kind, interval), strategy, 2, 4, gradient_clip_val=clip)
    given = Clip("norm", clip) if clip else None
    world = virtual("hybrid", Toy(kind, interval), clip=given, exchange=exchange)
    world.run(updates=4 * 2)
    assert_same(world.parameters(), real)
    there, here = strategy.run_stats(), world.server.statistics.stats()
    assert there["handed_over"] == here["handed_over"]
    assert (here["handed_over"]["saved_bytes"] > 0) is (compress is not None)


@pytest.mark.parametrize("compress", by_default([None, "int8"], "int8"))
def test_fragments_in_virtual_time_are_those_in_processes_to_the_bit(compress: str | None) -> None:
    """One travels behind the second of three steps and is taken over a step later; then all."""
    given = {"every": 4, "fragments": 2, "overlap": 1, "mix": 0.5, "compress": compress}
    exchange = make_exchange({"name": "streaming", **given})
    strategy = HybridStrategy("hybrid", exchange=exchange)
    real = trained(Toy("adam"), strategy, 2, 4)
    world = virtual("hybrid", Toy("adam"), exchange=exchange)
    world.run(updates=4 * 3)
    assert_same(world.parameters(), real)
    there, here = strategy.run_stats(), world.server.statistics.stats()
    assert there["handed_over"] == here["handed_over"]
    assert (there["samples"], there["updates"]) == (here["samples"], 12)


def test_a_schedule_makes_a_step_for_each_of_several_updates_at_once() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    each = SimpleNamespace(scheduler=scheduler, interval="step", frequency=2)
    schedules = OptimizerSchedules(optimizer, [each])
    assert schedules.updated(5) == ({"lr": 0.25},)
    assert schedules.epoch_ended() is None
    assert schedules.updated(6) is None, "each epoch counts anew"
    assert schedules.updated(9) == ({"lr": 0.0625},)


def test_a_worker_that_comes_back_goes_on_with_the_schedule_of_the_others() -> None:
    """Each worker's own steps are counted, and those of a dead one go on elsewhere meanwhile."""
    exchange = make_exchange({"name": "movement", "every": 2})
    conditions = Conditions(script=Script((Dies(6.5, 1), Joins(12.5, 1))))
    world = virtual("hybrid", Toy("sgd", "step"), exchange=exchange, conditions=conditions)
    world.run(until_s=40.0)
    assert world._replicas is not None
    rates = [own.optimizer.param_groups[0]["lr"] for own in world._replicas._workers]
    behind = round(math.log(rates[0] / rates[1]) / math.log(0.7))  # schedulers' steps
    assert 0 <= behind <= 2, "those that it has not computed in the epoch in which it came back"
    assert rates[1] < 0.1 * 0.7**3


class Decays(Toy):
    def configure_optimizers(self) -> Any:
        total = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("every", [1, 2])
def test_a_schedule_that_ends_with_the_training_is_that_of_processes(every: int) -> None:
    """Three global mini-batches an epoch; the last one is smaller."""
    exchange = make_exchange({"name": "movement", "every": every} if every > 1 else "gradient")
    real = trained(Decays(), HybridStrategy("hybrid", exchange=exchange), 2, 4)
    wants = begin_policy(make_policy("hybrid"), exchange, 2)
    world = virtual("hybrid", Decays(), epochs=4, wants=wants, exchange=exchange)
    world.run(updates=4 * (3 if every == 1 else 2))
    assert_same(world.parameters(), real)


def test_a_schedule_of_free_workers_is_as_long_as_all_updates() -> None:
    module = Decays()
    virtual("async", module, epochs=4, wants=begin_policy(make_policy("async"), Gradient(), 2))
    assert module.trainer.estimated_stepping_batches == 4 * 6


def test_async_with_one_worker_in_virtual_time_is_the_same_in_a_process() -> None:
    real = trained(Toy("adam"), "async", 1, 3)
    world = virtual("async", Toy("adam"), workers=1)
    world.run(updates=3 * 6)
    assert_same(world.parameters(), real)


POLICIES = [
    "hybrid",
    "synchronous",
    {"name": "backup", "k": 2},
    {"name": "k_async", "k": 2},
    {"name": "k_batch_sync", "k": 2},
    {"name": "softsync", "n": 2},
    {"name": "ssp", "lead": 1},
    "async",
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("interrupt", [False, True])
def test_every_sample_counts_once_in_every_epoch(policy: Any, interrupt: bool) -> None:
    """Whatever is dropped, late or unevenly shared: three epochs are 3 N samples."""
    module = Toy()
    world = virtual(policy, module, 3, conditions=Conditions(interrupt=interrupt))
    source = world._source
    assert source is not None
    statistics = world.server.statistics
    for epoch in (1, 2, 3):
        while source.tag != f"the end of epoch {epoch}":
            world._step()
        assert statistics.samples == epoch * N
        assert set(module.seen) == set(range(N))
        assert min(module.seen.values()) >= epoch
    if not statistics.stats()["dropped"] or not sum(statistics.stats()["dropped"]):
        fillers = sum(module.seen.values()) - 3 * N
        assert fillers == 0, "nothing was computed twice"


def test_workers_that_die_and_join_in_an_epoch_lose_no_sample() -> None:
    module = Toy()
    script = Script((Dies(2.5, 0), Joins(7.0, 0), Joins(4.0, 2)))
    world = virtual("async", module, 3, conditions=Conditions(script=script))
    source = world._source
    assert source is not None
    while source.tag != "the end of epoch 4":
        world._step()
    assert world.now_s > 7.0, "all that happened lies behind"
    assert world.server.statistics.samples == 4 * N


def test_a_contribution_that_waits_when_its_worker_dies_does_not_count() -> None:
    """Worker 1 is waited for; worker 0 has pushed and dies, and worker 2 does its samples again."""
    script = Script((Dies(4.0, 0),))
    slow = ServiceTimes("constant", slower={1: 5.0})
    module = Toy()
    lesson = ModuleTask(module, VirtualTrainer(3), loader(), seed=3)
    world = VirtualWorld(
        make_policy({"name": "backup", "k": 3}), 3, slow, task=lesson,
        optimizer=lesson.make_optimizer, conditions=Conditions(script=script),
    )  # fmt: skip
    world.run(updates=1)
    stats = world.server.statistics.stats()
    assert stats["samples_per_worker"] == [0, 4, 4] and stats["dropped"] == [1, 0, 0]


@pytest.mark.parametrize("dead", by_default([0, 1, 2], 0, 2))
def test_turns_go_round_without_the_dead_in_every_later_epoch(dead: int) -> None:
    script = Script((Dies(10.3, dead),))
    world = virtual("synchronous", Toy(), 3, conditions=Conditions(script=script))
    world.run(until_s=400.0)
    assert world.now_s > 390.0 and world.server.statistics.version > 100


def test_losses_are_kept_against_virtual_time() -> None:
    world = virtual("async", Toy())
    world.run(mini_batches=100)
    points = world.curve.points()
    assert len(points) == 100 and [t for t, _ in points] == sorted(t for t, _ in points)
    assert points[-1][1] < points[0][1]


# ---- what cannot be trained ---------------------------------------------------------------------


class Manual(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Plateau(Toy):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "loss"},
        }


class Silent(Toy):
    def training_step(self, batch: list[Tensor]) -> Any:
        return None


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        yield torch.ones(1)


@pytest.mark.parametrize(
    ("module", "data", "text"),
    [
        (Manual, loader, "Manual optimizes manually"),
        (Plateau, loader, "a schedule that follows a metric"),
        (Toy, lambda: DataLoader(Endless()), "one DataLoader over a data set that can be indexed"),
        (Toy, lambda: [loader(), loader()], "train_dataloader gave list"),
    ],
)
def test_what_cannot_be_trained_in_virtual_time_says_why(module: Any, data: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        ModuleTask(module(), VirtualTrainer(2), data(), seed=0)


def test_a_step_without_a_loss_is_named() -> None:
    with pytest.raises(UserError, match="training_step returned None"):
        virtual("async", Silent()).run(updates=1)
