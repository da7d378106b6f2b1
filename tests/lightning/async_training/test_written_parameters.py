"""Hogwild with a module that writes to the shared parameters itself, and has no optimizer."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import TensorDataset

from hybridtrain import HybridStrategy
from hybridtrain.engine.memory import Store
from hybridtrain.lightning.step.session import writes_itself
from tests.lightning.toys import distance, fit
from tests.support.ends import first

DATA = TensorDataset(torch.arange(24))


class Counts(pl.LightningModule):
    """Counts in a table which samples it has seen; what it knows is in ``weight`` alone."""

    def __init__(self, mark: Path | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.table = torch.nn.Embedding(24, 3, sparse=True)
        torch.nn.init.zeros_(self.table.weight)
        self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.mark = mark

    def training_step(self, batch: Any, batch_idx: int) -> None:
        table = self.table.weight.detach().numpy()
        np.add.at(table, batch[0].numpy(), 1.0)
        self.frozen += 1.0
        if self.mark is not None and batch_idx == 2 and first(self.mark):
            table[batch[0].numpy()] -= 1.0
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self) -> None:
        """None: the step writes."""


def test_all_write_to_one_table_and_every_mini_batch_is_an_update() -> None:
    done, trainer = fit("hogwild", 2, 4, Counts, DATA, max_epochs=3)
    assert done.table.weight.unique().tolist() == [3.0]
    stats = trainer.strategy.run_stats()
    assert trainer.global_step == stats["updates"] == 18
    assert sum(stats["samples_per_worker"]) == 72
    mine = stats["samples_per_worker"][0] // 4
    assert done.frozen.tolist() == [mine] * 2, "what needs no gradient is each worker's own"


class Steps(pl.LightningModule):
    """SGD by hand, in float64, so that one worker's steps can be compared to the bit."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.table = torch.nn.Embedding(24, 3, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        table = self.table.weight.detach().numpy()
        for row in batch[0].tolist():
            table[row] -= 0.1 * (table[row] - np.tanh(table.sum(0)))

    def configure_optimizers(self) -> None: ...


def test_one_worker_is_a_plain_loop_to_the_bit() -> None:
    alone, _ = fit("auto", 1, 4, Steps, DATA, overfit_batches=1.0)
    done, trainer = fit("hogwild", 1, 4, Steps, DATA, overfit_batches=1.0)
    assert distance(alone, done) == 0.0
    assert trainer.global_step == 18


def test_no_memory_is_asked_for_gradients(monkeypatch: Any) -> None:
    """Of a table of 32 MiB, two workers' gradients would be 64 more."""
    sizes = torch.zeros(2, dtype=torch.int64).share_memory_()
    made = Store.__init__

    def noted(self: Store, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        sizes[0] = max(int(sizes[0]), os.fstat(self.arena.fd).st_blocks * 512)

    monkeypatch.setattr(Store, "__init__", noted)
    module = Counts()
    module.table = torch.nn.Embedding(1 << 18, 32, sparse=True)
    fit("hogwild", 2, 4, module, DATA, max_epochs=1)
    assert 32 * 2**20 <= int(sizes[0]) < 33 * 2**20


def test_training_ends_after_max_steps_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    _, trainer = fit("hogwild", 2, 4, Counts, DATA, max_epochs=9, max_steps=8)
    assert trainer.global_step == 8
    done, trainer = fit("hogwild", 2, 4, Counts, DATA, max_epochs=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    path = str(tmp_path / "two.ckpt")
    done, trainer = fit("hogwild", 2, 4, Counts, DATA, ckpt_path=path, max_epochs=5)
    assert done.table.weight.unique().tolist() == [5.0]
    assert trainer.global_step == 30
    done, _ = fit("auto", 1, 4, Counts, DATA, ckpt_path=path, max_epochs=3)
    assert done.table.weight.unique().tolist() == [3.0]


class Chooses(Steps):
    """Steps by itself, or has an optimizer, as a module of ours does by the strategy."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.automatic_optimization = not own
        self.own = own

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if self.own else self.table(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return None if self.own else torch.optim.Adagrad(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("own", "strategy"), [(True, "hybrid"), (False, "hogwild")])
def test_a_checkpoint_of_steps_without_optimizer_goes_on_with_one_and_back(
    own: bool, strategy: str, tmp_path: Path
) -> None:
    """The optimizer begins anew; moments that nobody needs are left."""
    first, trainer = fit("hogwild", 1, 4, Chooses(own), DATA, max_epochs=1)
    trainer.save_checkpoint(path := str(tmp_path / "one.ckpt"))
    assert bool(torch.load(path)["optimizer_states"][0]) != own
    then, trainer = fit(strategy, 1, 4, Chooses(not own), DATA, ckpt_path=path, max_epochs=2)
    assert (trainer.current_epoch, trainer.global_step) == (2, 6)  # Lightning counts these apart
    assert 0.0 < distance(first, then) < 1.0, "it began where the other one was"


@pytest.mark.parametrize("on_failure", ["restart", "continue"])
def test_a_mini_batch_of_a_lost_worker_is_done_again(on_failure: str, tmp_path: Path) -> None:
    module = Counts(mark=tmp_path / "died")
    strategy = HybridStrategy("hogwild", on_failure=on_failure)
    fit(strategy, 2, 4, module, DATA, max_epochs=2)
    assert (tmp_path / "died").exists()
    assert module.table.weight.unique().tolist() == [2.0]


def test_where_nobody_shares_parameters_a_module_is_told_who_does() -> None:
    with pytest.warns(UserWarning, match=r"Counts has no optimizer .* use strategy=hogwild"):
        assert not writes_itself(Counts(), [], shared=False)
