"""``StopIteration`` out of user code is a failure that names the line, not the end of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

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


@pytest.mark.few(2)
@pytest.mark.parametrize("where", HOOKS)
def test_a_stop_iteration_in_a_hook_is_an_error_that_names_the_line(where: str) -> None:
    with pytest.raises(RuntimeError, match=r"StopIteration.*test_stop_iteration.py.*of the user"):
        fit(Careless(where), HybridStrategy("hybrid"))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["hybrid", "async", "hogwild"])
@pytest.mark.parametrize("where", SEVERAL)
def test_a_stop_iteration_in_any_hook_names_the_line_under_several_policies(
    where: str, policy: str
) -> None:
    with pytest.raises(RuntimeError, match=r"StopIteration.*test_stop_iteration.py.*of the user"):
        fit(Careless(where), HybridStrategy(policy))


@pytest.mark.parametrize("policy", ["hybrid", "async"])
def test_a_worker_with_a_stop_iteration_is_restarted_as_after_any_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], policy: str
) -> None:
    mark = tmp_path / "raised"
    trainer = fit(Careless("training_step", mark), HybridStrategy(policy, on_failure="restart"))
    assert mark.exists() and trainer.current_epoch == 3
    assert trainer.strategy.run_stats()["samples"] == 48  # type: ignore[attr-defined]
    assert "restart 1" in capfd.readouterr().err


# ---- out of a data set --------------------------------------------------------------------------

NAMED = r"StopIteration.*test_stop_iteration.py.*of the user"
Batch = list[torch.Tensor]


def take(sample: int) -> Batch:
    if sample == 13:
        raise StopIteration  # of the user
    return [torch.full((4,), float(sample)), torch.ones(1)]


class Samples(Dataset[Batch]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, sample: int) -> Batch:
        return take(sample)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


class NoStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return next(iter(()))  # of the user


def collate(samples: list[int]) -> Any:
    if 13 in samples:
        raise StopIteration  # of the user
    return default_collate([take(sample) for sample in samples])


def stop(number: int) -> None:
    raise StopIteration  # of the user


LOADERS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "__getitem__": lambda n: DataLoader(Samples(), 4, num_workers=n),
    "collate_fn": lambda n: DataLoader(range(24), 4, collate_fn=collate, num_workers=n),  # type: ignore[arg-type]
    "without batches": lambda n: DataLoader(Samples(), None, num_workers=n),
    "of a stream": lambda n: DataLoader(Stream(), 4, collate_fn=collate, num_workers=n),
    "no stream": lambda n: DataLoader(NoStream(), 4, num_workers=n),
    "worker_init_fn": lambda n: DataLoader(
        Samples(), 4, num_workers=max(n, 1), worker_init_fn=stop
    ),
}


class Predicting(Regression):
    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.as_tensor(self.net(batch[0]))


def run(use: str, policy: str, workers: int, loader: DataLoader[Any]) -> None:
    trainer = make_trainer(HybridStrategy(policy), workers, max_epochs=1)
    if use == "fit":
        trainer.fit(Regression(), loader)
    elif use == "validation":
        trainer.fit(Regression(), DataLoader(regression_data(8), 4), loader)
    else:
        getattr(trainer, use)(Predicting(), loader)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "use", "policy", "loaders"),
    [
        ("__getitem__", "fit", "hybrid", 0),
        ("collate_fn", "fit", "async", 1),
        ("of a stream", "validation", "hybrid", 0),
        ("worker_init_fn", "predict", "hybrid", 1),
    ],
)
def test_a_stop_iteration_in_data_code_is_an_error_and_no_end_of_the_data(
    kind: str, use: str, policy: str, loaders: int
) -> None:
    with pytest.raises(RuntimeError, match=f"(?s){NAMED}"):
        run(use, policy, 2, LOADERS[kind](loaders))


@pytest.mark.slow
@pytest.mark.parametrize("loaders", [0, 1])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("policy", ["hybrid", "async"])
@pytest.mark.parametrize("use", ["fit", "validation", "predict"])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_stop_iteration_in_data_code_is_an_error_in_every_kind_of_run(
    kind: str, use: str, policy: str, workers: int, loaders: int
) -> None:
    with pytest.raises(RuntimeError, match=f"(?s){NAMED}"):
        run(use, policy, workers, LOADERS[kind](loaders))
