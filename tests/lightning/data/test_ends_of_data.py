"""The end of the data is the end of the epoch, whatever length a loader has said; or there is none.

A stream with the length of the whole, of which each worker reads its own part, ends before that
length in every worker. What Lightning does at an epoch's end is done then: the step with what has
been accumulated, schedulers, validation, checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, Sampler

from hybridtrain import HybridStrategy
from tests.lightning.metamorphic.strategies import NAMES, make
from tests.lightning.toys import Regression, make_trainer, regression_data
from tests.picking import by_default

EPOCHS = 2
LOCK_STEP = ("hybrid", "local_sgd", "diloco")


class Part(IterableDataset[Any]):
    """Every W-th sample, starting with the rank of its reader."""

    def __init__(self, module: pl.LightningModule, n: int) -> None:
        self.module, self.data = module, regression_data(max(n, 1))
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        trainer = self.module.trainer
        return (self.data[i] for i in range(trainer.global_rank, self.n, trainer.world_size))


class Long(Part):
    """Says how many samples all workers have together."""

    def __len__(self) -> int:
        return self.n


class TooLong(Part):
    def __len__(self) -> int:
        return 2 * self.n + 4


class Upper(Sampler[int]):
    """Its length is an upper bound."""

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        return iter(range(14))


class Counting(Regression):
    """Counts, by rank in shared memory, its mini-batches and validations."""

    def __init__(self) -> None:
        def plateau(optimizer: Any) -> Any:
            halving = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0, threshold=1e9
            )
            return {"scheduler": halving, "monitor": "val/loss"}

        super().__init__(schedule=plateau)
        self.trained = torch.zeros(3, dtype=torch.int64).share_memory_()
        self.validated = torch.zeros(3, dtype=torch.int64).share_memory_()
        self.began = torch.zeros(3, dtype=torch.int64).share_memory_()

    def on_train_start(self) -> None:
        self.began[self.global_rank] += 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.trained[self.global_rank] += 1

    def on_validation_end(self) -> None:
        self.validated[self.global_rank] += 1


def trained(
    strategy: Any, workers: int, loader: Callable[[Counting], Any], **options: Any
) -> tuple[Counting, pl.Trainer]:
    pl.seed_everything(3, verbose=False)
    module = Counting()
    trainer = make_trainer(strategy, workers, **({"max_epochs": EPOCHS} | options))
    trainer.fit(module, loader(module), DataLoader(regression_data(8), 4))
    return module, trainer


def rate(trainer: pl.Trainer) -> float:
    return float(trainer.optimizers[0].param_groups[0]["lr"])


def stream(kind: type[Part], n: int = 24) -> Callable[[Counting], Any]:
    return lambda module: DataLoader(kind(module, n), batch_size=4)


def check_epochs(module: Counting, trainer: pl.Trainer, workers: int) -> None:
    """Each epoch has a validation, a step of the plateau's schedule, and a checkpoint."""
    assert module.validated[:workers].tolist() == [EPOCHS] * workers
    assert rate(trainer) == 0.01 * 0.5**EPOCHS


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", [Long, TooLong])
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("strategy", NAMES)
def test_a_stream_that_ends_before_its_length_is_validated_in_each_epoch(
    strategy: str, workers: int, kind: Any
) -> None:
    module, trainer = trained(make(strategy, workers, iterable="own"), workers, stream(kind))
    check_epochs(module, trainer, workers)
    if strategy in LOCK_STEP:
        assert trainer.global_step == EPOCHS * 6 // workers


@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_a_stream_that_one_worker_reads_is_validated_where_lightning_forgets_it(
    strategy: str,
) -> None:
    module, trainer = trained(strategy, 1, stream(TooLong))
    check_epochs(module, trainer, 1)
    assert trainer.global_step == EPOCHS * 6
    alone, lightnings = trained("auto", 1, stream(TooLong))
    assert not alone.validated.any() and lightnings.global_step == trainer.global_step


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["hybrid", "async", "local_sgd"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("n", [24, 21])  # 21: one worker has a mini-batch more
@pytest.mark.parametrize("every", [2, 4])
def test_mini_batches_that_were_accumulated_are_stepped_at_the_end(
    strategy: str, workers: int, n: int, every: int
) -> None:
    options = {"accumulate_grad_batches": every}
    module, trainer = trained(strategy, workers, stream(TooLong, n), **options)
    known, whole = trained(strategy, workers, stream(Part, n), **options)  # of unknown length
    assert trainer.global_step == whole.global_step
    check_epochs(module, trainer, workers)
    if strategy == "hybrid":
        ours, theirs = (dict(each.named_parameters()) for each in (module, known))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_validation_that_was_just_made_is_not_made_again(share: float) -> None:
    module, _ = trained("hybrid", 2, stream(Long), val_check_interval=share)
    assert module.validated[:2].tolist() == [EPOCHS] * 2  # of 6 mini-batches each worker has 3


def test_checkpoints_of_the_best_are_kept(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="val/loss", save_top_k=1)
    trained("hybrid", 2, stream(Long), callbacks=[best], enable_checkpointing=True)
    assert Path(best.best_model_path).exists() and best.best_model_score is not None


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_sampler_whose_length_is_an_upper_bound_is_validated(strategy: str, workers: int) -> None:
    made = make(strategy, workers)
    module, trainer = trained(
        made, workers, lambda _: DataLoader(regression_data(24), 4, sampler=Upper())
    )
    check_epochs(module, trainer, workers)
    assert trainer.strategy.run_stats()["samples"] == EPOCHS * 14  # type: ignore[attr-defined]


def test_a_stream_beside_a_data_set_ends_the_epoch_of_both() -> None:
    class Both(Counting):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch[0], batch_idx)

    module, trainer = Both(), make_trainer("hybrid", 2, max_epochs=EPOCHS)
    loaders = [DataLoader(Long(module, 16), 4), DataLoader(regression_data(48), 4)]
    trainer.fit(module, CombinedLoader(loaders, "min_size"), DataLoader(regression_data(8), 4))
    check_epochs(module, trainer, 2)
    assert trainer.global_step == EPOCHS * 2


@pytest.mark.parametrize("kind", by_default([Part, Long], Long))
@pytest.mark.parametrize("strategy", by_default(["hybrid", "local_sgd"], "hybrid"))
def test_workers_with_unequal_parts_end_at_one_limit_of_steps(strategy: str, kind: Any) -> None:
    module, trainer = trained(strategy, 2, stream(kind, 25), max_epochs=10, max_steps=6)
    assert trainer.global_step == 6 and trainer.current_epoch == 2
    assert module.trained[:2].tolist() == [6, 5]


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", [Part, Long])
@pytest.mark.parametrize("strategy", ["hybrid", "async", "local_sgd", "hogwild"])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_without_a_mini_batch_of_a_stream_validates_with_the_others(
    workers: int, strategy: str, kind: Any
) -> None:
    module, trainer = trained(strategy, workers, stream(kind, 1))
    check_epochs(module, trainer, workers)
    assert trainer.global_step == EPOCHS
    assert module.trained.tolist() == [EPOCHS, 0, 0]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_a_dealt_stream_with_one_mini_batch_is_trained_on_by_one_worker(
    strategy: str, workers: int
) -> None:
    class Whole(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([regression_data(2)[i] for i in range(2)])

    dealing = HybridStrategy(policy=strategy, iterable="deal")
    module, trainer = trained(dealing, workers, lambda _: DataLoader(Whole(), 4))
    check_epochs(module, trainer, workers)
    assert trainer.global_step == EPOCHS


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", [Part, TooLong])
@pytest.mark.parametrize("strategy", ["auto", "hybrid", "async", "hogwild"])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_empty_stream_passes_its_epochs_as_on_one_device(
    workers: int, strategy: str, kind: Any
) -> None:
    workers = 1 if strategy == "auto" else workers
    module, trainer = trained(strategy, workers, stream(kind, 0))
    assert trainer.current_epoch == EPOCHS and rate(trainer) == 0.01
    assert not module.trained.any() and not module.validated.any()


# ---- no data at all ------------------------------------------------------------------------------

EMPTY: dict[str, Callable[[Counting], Any]] = {
    "no sample": lambda _: DataLoader(torch.utils.data.Subset(regression_data(4), []), 4),
    "no mini-batch": lambda _: DataLoader(regression_data(4), batch_sampler=[]),
    "all dropped": lambda _: DataLoader(regression_data(3), 4, drop_last=True),
    "two loaders": lambda _: [DataLoader(torch.utils.data.Subset(regression_data(4), []))] * 2,
    "a stream": lambda module: DataLoader(Long(module, 0)),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("strategy", ["auto", *NAMES])
def test_training_on_nothing_stops_before_it_begins(strategy: str, workers: int, name: str) -> None:
    workers = 1 if strategy == "auto" else workers
    module, trainer = trained(make(strategy, workers), workers, EMPTY[name])
    assert trainer.current_epoch == trainer.global_step == 0
    assert not module.began.any() and not module.validated.any()


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("limit", [0, 0.0])
def test_a_limit_of_no_mini_batches_trains_on_nothing(strategy: str, limit: float) -> None:
    whole = DataLoader(regression_data(8), 4)
    module, trainer = trained(make(strategy, 2), 2, lambda _: whole, limit_train_batches=limit)
    assert trainer.global_step == 0 and not module.began.any() and not module.validated.any()


@pytest.mark.few(2)
@pytest.mark.parametrize("call", ["validate", "test", "predict"])
@pytest.mark.parametrize("strategy", ["hybrid", "async", "local_sgd"])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_evaluation_of_nothing_is_as_on_one_device(
    workers: int, strategy: str, call: str
) -> None:
    def found(strategy: str, workers: int) -> Any:
        loader = DataLoader(torch.utils.data.Subset(regression_data(4), []), 4)
        return getattr(make_trainer(strategy, workers), call)(Counting(), loader)

    assert found(strategy, workers) == found("auto", 1)
