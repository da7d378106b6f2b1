"""Runs that lose a worker and go on: without it, or with another process in its place."""

from __future__ import annotations

import csv
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset, Sampler

from hybridtrain import HybridStrategy
from hybridtrain.engine.worlds.worker_exit import WorkerDied
from hybridtrain.errors import UserError
from tests.lightning.toys import Regression, distance, make_trainer
from tests.picking import by_default

N, EVEN, SIZE = 41, 48, 4  # EVEN: all mini-batches are equal


class Numbered(Dataset[Any]):
    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return x, x.pow(2).sum(0, keepdim=True), index


class Mortal(Regression):
    """Says what it has trained on; worker ``who`` is killed once, in its step ``when``.

    ``phase``: before the gradient, at the end of the mini-batch (behind the update), or while it
    validates.
    """

    def __init__(self, folder: Path, who: int, when: int, phase: str = "compute") -> None:
        super().__init__(lambda p: torch.optim.Adam(p, lr=0.01))
        self.double()
        self.dropout = torch.nn.Dropout(0.1)
        self.folder, self.who, self.when, self.phase = folder, who, when, phase
        self.count = 0

    def _reach(self, phase: str) -> None:
        if phase != self.phase:
            return
        self.count += 1
        mark = self.folder / "died"
        if self.global_rank == self.who and self.count > self.when and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._reach("compute")
        x, y, _ = batch
        return torch.nn.functional.mse_loss(self.net(self.dropout(x)), y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.strategy.session._gathered.weight > 0:  # else a filler, beside the others
            line = f"{self.current_epoch} {self.global_step} {batch[2].tolist()}\n"
            with (self.folder / "seen").open("a") as file:
                file.write(line)
        self._reach("end")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._reach("validation")
        x, y, _ = batch
        self.log("val", torch.nn.functional.mse_loss(self.net(x), y), sync_dist=True)


class Shuffled(Sampler[int]):
    """A user's own random sampler."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(N).tolist())


def run(
    module: Mortal,
    policy: str,
    on_failure: str,
    n: int = N,
    sampler: Sampler[int] | None = None,
    **options: Any,
) -> pl.Trainer:
    pl.seed_everything(3, verbose=False)
    strategy = HybridStrategy(policy=policy, on_failure=on_failure)
    trainer = make_trainer(strategy, 3, max_epochs=2, **options)
    data = Numbered(n)
    loader = DataLoader(data, SIZE, shuffle=sampler is None, sampler=sampler)
    trainer.fit(module, loader, DataLoader(data, 16))
    return trainer


def seen(folder: Path) -> dict[int, Counter[int]]:
    """How often each sample was trained on, epoch by epoch."""
    counts: dict[int, Counter[int]] = {}
    for line in (folder / "seen").read_text().splitlines():
        epoch, _, indices = line.split(" ", 2)
        counts.setdefault(int(epoch), Counter()).update(map(int, indices[1:-1].split(",")))
    return counts


def undisturbed(folder: Path, n: int = EVEN, **options: Any) -> tuple[Mortal, pl.Trainer]:
    folder.mkdir()
    module = mortal(folder, who=9, when=0, phase="compute")
    return module, run(module, "hybrid", "stop", n, **options)


def mortal(folder: Path, who: int, when: int, phase: str) -> Mortal:
    pl.seed_everything(5, verbose=False)
    return Mortal(folder, who, when, phase)


def each_once(n: int = N) -> dict[int, Counter[int]]:
    return {epoch: Counter(range(n)) for epoch in range(2)}


CASES = [("compute", 1, 1), ("end", 0, 3), ("validation", 2, 0)]


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", by_default(["hybrid", "async"], "async"))
@pytest.mark.parametrize(("phase", "who", "when"), CASES)
def test_remaining_workers_go_on_and_train_on_every_sample_of_the_epoch_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], policy: str, phase: str, who: int, when: int
) -> None:
    trainer = run(mortal(tmp_path, who, when, phase), policy, "continue")
    assert seen(tmp_path) == each_once()
    assert trainer.current_epoch == 2 and "val" in trainer.callback_metrics
    assert f"worker {who}" in (said := capfd.readouterr().err) and "go on without it" in said
    assert ("missing from the metrics" in said) == (phase == "validation")


@pytest.mark.parametrize("policy", ["hybrid", "async"])
def test_remaining_workers_finish_the_random_order_of_a_users_sampler(
    tmp_path: Path, policy: str
) -> None:
    run(mortal(tmp_path, 1, 1, "compute"), policy, "continue", sampler=Shuffled())
    assert (tmp_path / "died").exists() and seen(tmp_path) == each_once()


@pytest.mark.parametrize(("phase", "who", "when"), by_default(CASES, CASES[0]))
def test_in_lock_step_a_restarted_worker_leaves_no_trace_in_the_parameters(
    tmp_path: Path, phase: str, who: int, when: int
) -> None:
    module = mortal(tmp_path, who, when, phase)
    trainer = run(module, "hybrid", "restart", EVEN)
    assert (tmp_path / "died").exists()
    expected, other = undisturbed(tmp_path / "undisturbed")
    assert distance(module, expected) == 0.0
    assert trainer.global_step == other.global_step
    assert seen(tmp_path) == seen(tmp_path / "undisturbed") == each_once(EVEN)


@pytest.mark.parametrize(
    ("phase", "who", "when", "n", "accumulate"),
    by_default(
        [
            ("compute", 2, 4, 47, 1),  # behind a shorter mini-batch
            ("end", 2, 1, 47, 1),
            ("end", 2, 4, 47, 1),
            ("validation", 1, 0, 47, 1),
            ("compute", 1, 2, EVEN, 2),  # the first mini-batch of the step
            ("compute", 1, 3, EVEN, 2),  # the second
            ("compute", 0, 2, 50, 3),
        ],
        ("compute", 1, 3, EVEN, 2),
    ),
)
def test_a_restarted_worker_draws_the_numbers_of_the_lost_one(
    tmp_path: Path, phase: str, who: int, when: int, n: int, accumulate: int
) -> None:
    module = mortal(tmp_path, who, when, phase)
    run(module, "hybrid", "restart", n, accumulate_grad_batches=accumulate)
    expected, _ = undisturbed(tmp_path / "undisturbed", n, accumulate_grad_batches=accumulate)
    assert (tmp_path / "died").exists() and distance(module, expected) == 0.0


@pytest.mark.parametrize("policy", ["async", "ssp"])
def test_where_workers_run_freely_a_restarted_one_does_what_is_left(
    tmp_path: Path, policy: str
) -> None:
    run(mortal(tmp_path, 1, 2, "compute"), policy, "restart")
    assert seen(tmp_path) == each_once()


def test_when_worker_0_is_lost_another_logs_and_saves(tmp_path: Path) -> None:
    module = mortal(tmp_path, 0, 0, "validation")
    checkpoint = ModelCheckpoint(tmp_path / "checkpoints", save_top_k=-1)
    logger = CSVLogger(tmp_path, name="", version="log")
    run(
        module,
        "hybrid",
        "continue",
        callbacks=[checkpoint],
        logger=logger,
        enable_checkpointing=True,
        log_every_n_steps=1,
    )
    rows = (tmp_path / "log" / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["epoch", "0", "1"]
    saved = sorted((tmp_path / "checkpoints").glob("*.ckpt"))
    assert [path.name.split("-")[0] for path in saved] == ["epoch=0", "epoch=1"]
    last = torch.load(saved[-1], weights_only=True)["state_dict"]
    assert all(torch.equal(last[name], value) for name, value in module.state_dict().items())


class Losing(Mortal):
    """Its row of each mini-batch says which worker has written it."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("who", float(self.global_rank))
        time.sleep(0.02)  # so that all have some of the epoch
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("policy", "on_failure"),
    [
        ("async", "restart"),
        *(
            pytest.param(policy, choice, marks=pytest.mark.slow)
            for policy in ("async", "k_batch_async", "softsync", "ssp", "hogwild", "hybrid")
            for choice in ("continue", "restart")
            if (policy, choice) != ("async", "restart")
        ),
    ],
)
def test_rows_go_on_where_those_of_the_lost_worker_ended(
    tmp_path: Path, policy: str, on_failure: str
) -> None:
    pl.seed_everything(5, verbose=False)
    module = Losing(tmp_path, 0, 2, "end")
    logger = CSVLogger(tmp_path, name="", version="log")
    trainer = run(module, policy, on_failure, 72, logger=logger, log_every_n_steps=1)
    with (tmp_path / "log" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows if row["who"]]
    assert steps == sorted(set(steps)) and steps[-1] < trainer.global_step
    validated = [int(row["step"]) for row in rows if row["val"]]
    assert len(validated) == 2 and validated[-1] == trainer.global_step - 1
    assert [int(row["step"]) for row in rows] == sorted(steps + validated)


def raises(module: Any, **options: Any) -> pytest.ExceptionInfo[WorkerDied]:
    strategy = HybridStrategy(**options)
    trainer = make_trainer(strategy, 2, max_epochs=2)
    with pytest.raises(WorkerDied) as caught:
        trainer.fit(module, DataLoader(Numbered(), SIZE))
    return caught


class Validated(Mortal):
    """Counts what all workers have validated."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        samples = float(len(batch[2]))
        self.log("validated", samples, sync_dist=True, reduce_fx="sum", batch_size=1)


@pytest.mark.parametrize("policy", by_default(["hybrid", "async"], "hybrid"))
def test_who_is_left_validates_everything_from_the_next_validation_on(
    policy: str, tmp_path: Path
) -> None:
    class Look(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            if trainer.is_global_zero:
                with (tmp_path / "validated").open("a") as file:
                    file.write(f"{float(trainer.callback_metrics['validated'])}\n")

    module = Validated(tmp_path, who=1, when=2)
    strategy = HybridStrategy(policy, on_failure="continue")
    trainer = make_trainer(strategy, 3, max_epochs=3, callbacks=[Look()])
    trainer.fit(module, DataLoader(Numbered(), SIZE), DataLoader(Numbered(23), SIZE))
    seen = [float(line) for line in (tmp_path / "validated").read_text().split()]
    assert seen == [23.0, 23.0, 23.0]
    assert float(trainer.callback_metrics["validated"]) == 23.0


def test_samples_that_no_update_has_any_more_do_not_count(tmp_path: Path) -> None:
    strategy = HybridStrategy(on_failure="stop")
    trainer = make_trainer(strategy, 3, max_epochs=2)
    with pytest.raises(WorkerDied):
        trainer.fit(mortal(tmp_path, 1, 2, "compute"), DataLoader(Numbered(EVEN), SIZE))
    stats = strategy.run_stats()
    assert (stats["updates"], stats["samples"]) == (2, 2 * 3 * SIZE)


def test_with_too_few_workers_left_the_run_ends_and_says_so(tmp_path: Path) -> None:
    module = mortal(tmp_path, 1, 1, "compute")
    caught = raises(module, on_failure="continue", min_workers=2)
    assert any("1 worker would be left" in note for note in caught.value.__notes__)


def test_a_worker_is_restarted_no_more_often_than_the_user_allows(tmp_path: Path) -> None:
    class Doomed(Mortal):
        def _reach(self, phase: str) -> None:
            (self.folder / "died").unlink(missing_ok=True)
            super()._reach(phase)

    pl.seed_everything(5, verbose=False)
    module = Doomed(tmp_path, 1, 1, "compute")
    caught = raises(module, on_failure="restart", max_restarts=1)
    assert any("max_restarts=1" in note for note in caught.value.__notes__)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"on_failure": "retry"}, "on_failure='retry' .* stop, continue or restart"),
    ({"on_failure": "continue", "min_workers": 3}, "min_workers=3 .* for 2 workers.* at most 2"),
    ({"on_failure": "continue", "min_workers": 0}, "min_workers=0 .* from 1 to 4096"),
    ({"min_workers": 2}, "min_workers=2 .* on_failure=stop"),
    ({"on_failure": "restart", "max_restarts": 0}, "max_restarts=0, which allows none"),
    ({"on_failure": "restart", "max_restarts": -1}, "max_restarts=-1 .* or null"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_what_makes_no_sense_is_refused_before_a_process_starts(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start: Callable[..., Any] = partial(pytest.fail, "a process was started")
    monkeypatch.setattr("hybridtrain.engine.worlds.start_workers.ProcessSpawner.start", start)
    with pytest.raises(UserError, match=message):
        trainer = make_trainer(HybridStrategy(**options), 2)
        trainer.fit(Regression(), DataLoader(Numbered(), SIZE))


@pytest.mark.parametrize("policy", by_default(["hybrid", "async"], "hybrid"))
def test_a_worker_that_was_alone_goes_on_from_where_training_had_come(
    tmp_path: Path, policy: str
) -> None:
    pl.seed_everything(5, verbose=False)
    module = Mortal(tmp_path, 0, 14, "compute")
    module.dropout = torch.nn.Identity()
    module.schedule = lambda o: {
        "scheduler": torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
        "interval": "step",
    }
    strategy = HybridStrategy(policy=policy, on_failure="restart")
    pl.seed_everything(3, verbose=False)
    trainer = make_trainer(strategy, 1, max_epochs=2)
    trainer.fit(module, DataLoader(Numbered(), SIZE, shuffle=True))
    assert (tmp_path / "died").exists() and seen(tmp_path) == each_once()
    alone = tmp_path / "undisturbed"
    alone.mkdir()
    pl.seed_everything(5, verbose=False)
    expected = Mortal(alone, 9, 0)
    expected.dropout, expected.schedule = torch.nn.Identity(), module.schedule
    pl.seed_everything(3, verbose=False)
    other = make_trainer(HybridStrategy(policy=policy), 1, max_epochs=2)
    other.fit(expected, DataLoader(Numbered(), SIZE, shuffle=True))
    assert distance(module, expected) == 0.0
    assert trainer.global_step == other.global_step == 22
    loops = trainer.fit_loop.epoch_loop, other.fit_loop.epoch_loop  # as loggers count
    assert [loop._batches_that_stepped for loop in loops] == [22, 22]
