"""All workers are lost at once: the first that is restarted goes on, and tells the others."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from tests.lightning.toys import Regression, make_trainer, regression_data

N, SIZE, EPOCHS = 48, 4, 3
PLACES = (
    ("training_step", 5),
    ("on_before_optimizer_step", 5),  # the mean of all is there
    ("on_train_batch_end", 5),
    ("validation_step", 2),
    ("on_train_epoch_end", 1),
    ("on_train_epoch_end", 2),  # the last
)


class Looking(Regression):
    """Needs the mean of all gradients before it pushes."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        pass


class AllKilled(pl.Callback):
    """Every worker is killed in the same place, once, or twice: again as it comes back."""

    def __init__(self, module: Any, where: str, when: int, folder: Path, times: int) -> None:
        self.folder, self.left, self.times = folder, when, times
        inner = getattr(module, where)

        def method(*args: Any) -> Any:
            self.come(module.trainer)
            return inner(*args)

        setattr(module, where, method)

    def come(self, trainer: Any) -> None:
        died = len(list(self.folder.glob(f"{trainer.global_rank}-*")))
        first = 1 if trainer.global_rank == 0 else self.times  # the others, again
        if died < first and (self.left <= 0 or died):
            (self.folder / f"{trainer.global_rank}-{died}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def lose_all(
    folder: Path, n: int, place: tuple[str, int], times: int = 1, kind: Any = Looking
) -> pl.Trainer:
    module = kind()
    killed = AllKilled(module, *place, folder, times)
    strategy = HybridStrategy("hybrid", on_failure="restart", max_restarts=None)
    trainer = make_trainer(strategy, n, max_epochs=EPOCHS, callbacks=[killed])
    data = regression_data(N)
    trainer.fit(module, DataLoader(data, SIZE, shuffle=True), DataLoader(data, SIZE))
    assert trainer.current_epoch == EPOCHS
    assert trainer.strategy.run_stats()["samples"] == N * EPOCHS  # type: ignore[attr-defined]
    return trainer


def test_the_first_that_is_back_answers_while_it_waits_for_the_mean(tmp_path: Path) -> None:
    lose_all(tmp_path, 2, PLACES[0])
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow  # three seconds each
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("kind", [Regression, Looking])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_wherever_it_happens(
    tmp_path: Path, n: int, place: tuple[str, int], kind: Any, times: int
) -> None:
    lose_all(tmp_path, n, place, times, kind)
    assert {path.name for path in tmp_path.iterdir()} >= {f"{worker}-0" for worker in range(n)}
