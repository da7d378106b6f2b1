"""``StopIteration`` out of user code is a failure that names the line, not the end of an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from tests.lightning.toys import Regression, make_trainer, regression_data

HOOKS = ("training_step", "validation_step", "on_train_batch_end", "on_train_epoch_end")
SEVERAL = (*HOOKS, "on_train_epoch_start", "on_validation_end", "on_before_optimizer_step")


class Careless(Regression):
    """Takes from an empty iterator in one of its methods, in one worker."""

    def __init__(self, where: str, mark: Path | None = None) -> None:
        super().__init__()
        self.where, self.mark, self.left = where, mark, 1
        inner = getattr(self, where)

        def method(*args: Any) -> Any:
            done = self.mark is not None and self.mark.exists()
            if self.trainer.global_rank == 1 and self.left == 0 and not done:
                if self.mark is not None:
                    self.mark.touch()
                next(iter(()))  # of the user
            self.left -= 1
            return inner(*args)

        setattr(self, where, method)


def fit(module: pl.LightningModule, strategy: HybridStrategy) -> pl.Trainer:
    trainer = make_trainer(strategy, 2, max_epochs=3)
    data = regression_data(16)
    trainer.fit(module, DataLoader(data, 4), DataLoader(data, 8))
    return trainer


@pytest.mark.parametrize("where", HOOKS)
def test_the_line_is_named(where: str) -> None:
    with pytest.raises(RuntimeError, match=r"StopIteration.*test_stop_iteration.py.*of the user"):
        fit(Careless(where), HybridStrategy("hybrid"))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["hybrid", "async", "hogwild"])
@pytest.mark.parametrize("where", SEVERAL)
def test_the_line_is_named_everywhere(where: str, policy: str) -> None:
    with pytest.raises(RuntimeError, match=r"StopIteration.*test_stop_iteration.py.*of the user"):
        fit(Careless(where), HybridStrategy(policy))


@pytest.mark.parametrize("policy", ["hybrid", "async"])
def test_the_worker_is_restarted_as_after_any_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], policy: str
) -> None:
    mark = tmp_path / "raised"
    trainer = fit(Careless("training_step", mark), HybridStrategy(policy, on_failure="restart"))
    assert mark.exists() and trainer.current_epoch == 3
    assert trainer.strategy.run_stats()["samples"] == 48  # type: ignore[attr-defined]
    assert "restart 1" in capfd.readouterr().err
