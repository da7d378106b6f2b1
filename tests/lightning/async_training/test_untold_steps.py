"""What is counted of steps that workers have made on the masters and not told of yet."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hybridtrain import HybridStrategy
from tests.lightning.toys import distance, fit, make_trainer
from tests.picking import by_default
from tests.support.ends import first


def wait_until(there: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if there():
            return
        time.sleep(0.001)
    raise TimeoutError("it never came")


@pytest.fixture(autouse=True)
def tell_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that steps are not told of because some time has passed."""
    monkeypatch.setattr("hybridtrain.engine.worker.makers.in_place._TELL_S", 1e9)


class Indices(Dataset[Any]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class Count(pl.LightningModule):
    """Each sample's coordinate says how often it was trained on, times its part of a mini-batch."""

    def __init__(self, n: int, path: Path) -> None:
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(n))
        self.path = path

    @property
    def n_untold(self) -> int:
        return len(self.trainer.strategy.client.steps.maker.untold)  # type: ignore[attr-defined]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return -self.counts[batch].mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class SavedMeanwhile(Count):
    """Worker 0 saves, and then has no gradient, while the other has made some that it keeps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        mark, saved, folder = self.path / "mark", self.path / "saved", self.path / "checkpoints"
        if self.global_rank == 1 and self.n_untold == 5 and not mark.exists():
            mark.write_text(str(len(list(folder.iterdir()))))
            wait_until(saved.exists)
        if self.global_rank == 0 and batch_idx == 6:
            wait_until(mark.exists)
        if self.global_rank == 0 and batch_idx > 8 and not saved.exists():
            n_before = int(mark.read_text())
            saved.touch() if len(list(folder.iterdir())) > n_before else None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        absent = self.global_rank == 0 and batch_idx % 3 == 1
        return None if absent else super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        with (self.path / f"steps {self.global_rank}").open("a") as file:
            print(self.trainer.global_step, file=file)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("policy", ["hogwild", "async"])
def test_whoever_asks_hears_of_all_steps_that_were_made(policy: str, tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=20, save_top_k=-1)
    (tmp_path / "checkpoints").mkdir()
    options: dict[str, Any] = {"callbacks": [save], "enable_checkpointing": True}
    module, data = SavedMeanwhile(400, tmp_path), Indices(400)
    _, trainer = fit(policy, 2, 2, module, data, max_epochs=1, **options)
    found = [torch.load(path) for path in (tmp_path / "checkpoints").iterdir()]
    assert trainer.global_step > 150 and len(found) > 5
    for each in found:
        counts = {float(state["step"]) for state in each["optimizer_states"][0]["state"].values()}
        counts.add(each["lr_schedulers"][0]["last_epoch"])
        assert counts == {each["global_step"]}
    for worker in (0, 1):
        steps = [int(line) for line in (tmp_path / f"steps {worker}").read_text().split()]
        assert steps == sorted(steps), "nothing is counted backwards"


class Stepping(torch.optim.SGD):
    """Counts its steps, as Adam does."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
        return loss


class KilledUntold(Count):
    """Killed when it has made five steps, of two mini-batches each, and not told of them."""

    def on_train_batch_start(self, *_: Any) -> None:
        if self.n_untold == 5 and first(self.path / "died"):
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self) -> Any:
        free = self.trainer.strategy.requirements.in_place  # type: ignore[attr-defined]
        return (Stepping if free else torch.optim.SGD)(self.parameters(), lr=1.0)


class Stream(IterableDataset[Any]):
    """Nobody knows where in it a worker is."""

    def __iter__(self) -> Any:
        return iter(torch.arange(240))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("accumulated", "stream"),
    by_default([(1, False), (2, False), (1, True)], (2, False), (1, True)),
)
@pytest.mark.parametrize("policy", by_default(["hogwild", "async"], "async"))
def test_all_steps_that_a_lost_worker_has_made_count(
    policy: str, accumulated: int, stream: bool, tmp_path: Path
) -> None:
    module, path = KilledUntold(240, tmp_path), tmp_path / "last.ckpt"
    data: Any = Stream() if stream else Indices(240)
    trainer = make_trainer(
        HybridStrategy(policy, on_failure="restart"),
        1,
        max_epochs=1,
        accumulate_grad_batches=accumulated,
    )
    trainer.fit(module, DataLoader(data, 2))
    trainer.save_checkpoint(path)
    assert (tmp_path / "died").exists()
    made = round(float(module.counts.detach().sum()))
    state, stats = torch.load(path)["optimizer_states"][0]["state"], trainer.strategy.run_stats()
    assert state.get(0, {"step": made})["step"] == made, "torch's SGD counts none"
    assert trainer.global_step == stats["updates"] == made
    assert stats["dropped"] == [0]
    if not stream:
        assert made == 120 // accumulated and stats["samples"] == 240
        assert set(module.counts.tolist()) == {0.5 / accumulated}


@pytest.mark.parametrize("phase", ["push", "pull"])
def test_faults_on_purpose_come_between_steps_that_are_made_unasked(
    phase: str, tmp_path: Path
) -> None:
    module = Count(60, tmp_path)
    fault = {"worker": 0, "step": 20, "kind": "kill", "phase": phase}
    strategy = HybridStrategy("hogwild", on_failure="restart", faults=[fault])
    make_trainer(strategy, 1, max_epochs=1).fit(module, DataLoader(Indices(60), 2))
    assert [row["count"] for row in strategy.run_stats()["faults"]] == [1]
    assert set(module.counts.tolist()) == {0.5}


class Two(Count):
    """Has mini-batches of two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(torch.cat([batch["a"], batch["b"] + 60]), batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        own = self.trainer.strategy.client.steps.maker  # type: ignore[attr-defined]
        assert not own.untold, "a step was made unasked"


def test_steps_with_mini_batches_of_two_loaders_are_asked_for(
    monkeypatch: Any, tmp_path: Path
) -> None:
    """Else nobody would know which of these have been made, should the worker be lost."""
    monkeypatch.setattr("hybridtrain.engine.worker.makers.in_place._TELL_S", 1e9)
    module = Two(120, tmp_path)
    loaders = CombinedLoader({key: DataLoader(Indices(60), 2) for key in "ab"}, "max_size")
    make_trainer("hogwild", 1, max_epochs=1).fit(module, loaders)
    assert set(module.counts.tolist()) == {0.25}


class Joined(pl.LightningModule):
    """A second optimizer joins the first in mid-run."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net, self.other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 10:
            second = torch.optim.Adam(self.other.parameters(), lr=0.1)
            self.trainer.optimizers = [*self.trainer.optimizers, second]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        known = self.optimizers()
        for optimizer in known if isinstance(known, list) else [known]:
            optimizer.zero_grad()
            loss = (self.other(self.net(batch[:, None].float() / 60)) - 1).pow(2).mean()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=0.1)


def test_where_another_optimizer_joins_each_counts_its_own_steps() -> None:
    done = []
    for strategy in ("auto", "hogwild"):
        pl.seed_everything(7, verbose=False)
        module = Joined()
        make_trainer(strategy, 1, max_epochs=1).fit(module, DataLoader(Indices(60), 2))
        done.append(module)
    assert distance(*done) == 0.0
