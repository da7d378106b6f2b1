"""A worker goes on before its release has come, unless somebody would look at parameters."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    LambdaCallback,
    ModelCheckpoint,
    TQDMProgressBar,
    WeightAveraging,
)
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from hybridtrain.engine.protocol.messages import (
    Done,
    Gather,
    Gathered,
    Install,
    Push,
    ReadStats,
    Released,
    Stats,
    Stop,
)
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worker.inbox import StopRequested
from tests.lightning.toys import Regression, flat, make_trainer, regression_data

# ---- the client ---------------------------------------------------------------------------------


class Script:
    """A line on which replies come only after they were put there."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.replies: deque[Any] = deque()

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self) -> tuple[Any, int | None]:
        return self.replies.popleft(), None

    def ready(self) -> bool:
        return bool(self.replies)


@pytest.fixture
def line() -> Script:
    return Script()


def test_a_push_that_is_offered_does_not_wait_and_is_settled_once(line: Script) -> None:
    client, taken = Client(0, 2, line), list[Released]()
    client.pushes.offer(Push(0, 1.0), taken.append)
    assert line.sent == [Push(0, 1.0)]
    assert taken == []
    line.replies.append(Released(7))
    client.pushes.settle()
    client.pushes.settle()
    assert taken == [Released(7)]
    assert client.steps.version == 7


def test_any_request_behind_an_offered_push_settles_the_push_first(line: Script) -> None:
    client, taken = Client(0, 2, line), list[Released]()
    client.pushes.offer(Push(0, 1.0), taken.append)
    line.replies += [Released(3), Stats({"updates": 3})]
    assert client.stats() == {"updates": 3}
    assert taken == [Released(3)]
    assert line.sent == [Push(0, 1.0), ReadStats()]


def test_a_second_offer_settles_the_first(line: Script) -> None:
    client, taken = Client(0, 2, line), list[Released]()
    client.pushes.offer(Push(0, 1.0), taken.append)
    line.replies.append(Released(1))
    client.pushes.offer(Push(0, 2.0), taken.append)
    assert taken == [Released(1)]


def test_a_stop_instead_of_the_release_ends_the_worker_at_the_boundary(line: Script) -> None:
    client, taken = Client(0, 2, line), list[Released]()
    client.pushes.offer(Push(0, 1.0), taken.append)
    line.replies.append(Stop(now=True))
    with pytest.raises(StopRequested):
        client.check_stop()
    line.replies.append(Gathered((b"", b""), (0, 1)))
    with pytest.raises(EOFError):  # what is asked afterwards is asked, not taken for the release
        client.gather("a", None)
    assert isinstance(line.sent[-1], Gather)
    assert taken == []
    line.replies.append(Done())
    client.install(Install())


def test_what_was_counted_ahead_is_undone_unless_the_release_has_come(line: Script) -> None:
    client, undone = Client(0, 2, line), list[str]()
    client.pushes.offer(Push(0, 1.0), lambda _: None, lambda: undone.append("first"))
    assert client.steps.offered is not None
    client.steps.offered.undoing.append(lambda: undone.append("second"))
    line.replies.append(Stop(now=True))
    with pytest.raises(StopRequested):
        client.pushes.settle()
    assert undone == ["second", "first"], "what was done last is undone first"

    def fail(_: Released) -> None:
        raise LookupError

    client.pushes.offer(Push(0, 1.0), fail, lambda: undone.append("an update that was made"))
    line.replies.append(Released(1))
    with pytest.raises(LookupError):
        client.pushes.settle()
    assert undone == ["second", "first"]


# ---- who looks ----------------------------------------------------------------------------------


class Ask(pl.Callback):
    """Notes what the worker has decided."""

    lazy: bool | None = None

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.lazy = trainer.strategy.session.steps[0]._parts.goes_ahead


def rests(
    module: Any = None,
    callbacks: Any = (),
    data: Any = None,
    policy: Any = "hybrid",
    workers: int = 1,
    **options: Any,
) -> bool:
    """Whether a worker goes on before its release, as a run with all our parts decides it."""
    ask = Ask()
    once = {"max_steps": 1} if policy == "hybrid" else {"max_epochs": 1, "limit_train_batches": 1}
    trainer = make_trainer(policy, workers, callbacks=[ask, *callbacks], **{**once, **options})
    trainer.fit(module or Regression(), data or DataLoader(regression_data(), 8))
    assert ask.lazy is not None
    return ask.lazy


class ByName(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.net.zero_grad()


class BarThatLooks(TQDMProgressBar):
    def get_metrics(self, trainer: Any, model: Any) -> Any:
        return {"norm": flat(model).norm()}


class Elsewhere(pl.Callback):
    def on_train_epoch_end(self, *_: Any) -> None:
        """A checkpoint, say."""


class Hooked(Regression):
    def on_train_batch_end(self, *_: Any) -> None:
        self.net[0].weight.data.clamp_(-1, 1)


class Scheduling(Regression):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        super().lr_scheduler_step(scheduler, metric)


class OwnSchedule(torch.optim.lr_scheduler.LambdaLR):
    """May look at anything."""


def test_workers_go_on_before_their_release_in_ordinary_training(tmp_path: Any) -> None:
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    assert rests(callbacks=[Elsewhere(), saving], enable_checkpointing=True)
    assert rests(Regression(schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 1)))


def test_free_running_workers_go_on_before_their_release() -> None:
    """Where a push is part of an update when its release comes: they know what will be counted."""
    assert rests(policy="async") and rests(policy="hogwild")
    assert not rests(callbacks=[ByName()], policy="async")
    assert not rests(policy="async", max_steps=1), "what comes after the last must not count"
    assert not rests(policy="synchronous", workers=2), "they wait for their turn anyway"
    assert not rests(policy=HybridStrategy({"name": "backup", "k": 1}), workers=2), (
        "late ones are dropped"
    )


class Counted(pl.Callback):
    """Numbers of steps, as they are known before the release; taken for a callback of ours."""

    __module__ = "hybridtrain"

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps.append(trainer.global_step)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        if self.steps != sorted(set(self.steps)):
            raise ValueError(f"every step has a number of its own, not {self.steps}")
        if trainer.world_size == 1 and self.steps != list(range(1, len(self.steps) + 1)):
            raise ValueError(f"alone nobody else makes steps: {self.steps}")


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["async", "hogwild"])
def test_what_is_counted_before_the_release_is_what_was_counted_after_it(policy: str) -> None:
    """Steps of schedules, numbers of rows and of the trainer, with one worker and with several."""

    assert rests(callbacks=[Counted()], policy=policy)
    for workers in (1, 2):
        trainer = make_trainer(policy, workers, callbacks=[Counted()], max_epochs=2)
        trainer.fit(Regression(), DataLoader(regression_data(), 4, shuffle=True))
        assert trainer.global_step == 24


@pytest.mark.parametrize("module", [Hooked, Scheduling])
def test_workers_wait_for_their_release_where_the_module_may_look_at_parameters(
    module: Any,
) -> None:
    assert not rests(module())


def test_workers_wait_for_their_release_where_a_callback_may_look_at_parameters() -> None:
    assert not rests(callbacks=[ByName()])
    assert not rests(callbacks=[BarThatLooks()], enable_progress_bar=True)
    assert not rests(callbacks=[LambdaCallback(on_train_batch_end=lambda *_: None)])
    assert not rests(callbacks=[WeightAveraging()])


def test_workers_wait_for_their_release_where_a_users_schedule_may_look_at_parameters() -> None:
    assert not rests(Regression(schedule=lambda o: OwnSchedule(o, lambda step: 1.0)))


# ---- what is seen -------------------------------------------------------------------------------


class Witness(Regression):
    """Keeps what the parameters are when a step ends, and when the next mini-batch begins."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[torch.Tensor] = []
        self.begins: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.begins.append(flat(self))
        return super().training_step(batch, batch_idx)


class Looking(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.ends.append(flat(module))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        assert len(module.ends) == 12
        for end, begin in zip(module.ends, module.begins[1:], strict=False):
            assert torch.equal(end, begin)
        assert not torch.equal(module.ends[0], module.ends[1])


def test_a_callback_that_looks_at_the_end_of_a_step_sees_that_step() -> None:
    trainer = make_trainer("hybrid", 2, callbacks=[Looking()], max_epochs=2)
    trainer.fit(Witness(), DataLoader(regression_data(), 4, shuffle=True))
    assert trainer.global_step == 12


class Collating(Witness):
    """Has a loader whose mini-batches are put together with a look at the parameters."""

    def train_dataloader(self) -> Any:
        return DataLoader(regression_data(), 4, collate_fn=self.collate)

    def collate(self, samples: Any) -> Any:
        self.ends.append(flat(self))
        return torch.utils.data.default_collate(samples)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.ends.append(flat(self))
        return batch

    def on_train_end(self) -> None:
        assert len(self.ends) == 2 * len(self.begins) == 24
        for fetched, begin in zip(self.ends, [x for x in self.begins for _ in "ab"], strict=True):
            assert torch.equal(fetched, begin)
        assert not torch.equal(self.begins[0], self.begins[1])


def test_a_loader_that_looks_at_parameters_sees_the_step_before() -> None:
    """Although the worker goes on before its release: it awaits that before it fetches."""
    ask = Ask()
    trainer = make_trainer("hybrid", 2, callbacks=[ask], max_epochs=2)
    trainer.fit(Collating())
    assert trainer.global_step == 12 and ask.lazy


def test_a_checkpoint_in_mid_epoch_holds_the_step_that_was_just_made(tmp_path: Any) -> None:
    """Although the worker that writes it had not waited for that step."""
    found = {}
    for name, strategy, workers in (("ours", "hybrid", 1), ("theirs", "auto", 1)):
        pl.seed_everything(3, verbose=False)
        saving = ModelCheckpoint(tmp_path / name, every_n_train_steps=3, save_top_k=-1)
        options = {"enable_checkpointing": True, "use_distributed_sampler": False}
        trainer = make_trainer(strategy, workers, callbacks=[saving], max_epochs=1, **options)
        module = Regression(lambda p: torch.optim.Adam(p, lr=0.01, fused=True))
        trainer.fit(module, DataLoader(regression_data(), 4))
        paths = sorted((tmp_path / name).glob("*.ckpt"))
        found[name] = [torch.load(path, weights_only=True)["state_dict"] for path in paths]
    assert len(found["ours"]) == len(found["theirs"]) == 4
    for ours, theirs in zip(found["ours"], found["theirs"], strict=True):
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-6, atol=1e-7)
