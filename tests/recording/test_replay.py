"""A recorded run, done again in one process, comes to the same bits; a difference is named."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.forkserver import _forkserver
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, Dataset

from hybridtrain import HybridStrategy
from hybridtrain.engine.policies import POLICIES as EVERY
from hybridtrain.engine.recording import Record, find_record, read_record
from hybridtrain.engine.recording.replayer import Replayed
from hybridtrain.errors import UserError
from hybridtrain.lightning.replay.replay_fit import replay_fit
from tests.lightning.toys import Regression, make_trainer, regression_data
from tests.picking import by_default

POLICIES = ["hybrid", "async"]


class Rich(Regression):
    """Dropout, running means, noise from three generators: whatever differs if a state does."""

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.Adam, lr=0.01))
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 32),
            torch.nn.BatchNorm1d(32),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(32, 1),
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        noise = 0.01 * (random.random() + float(np.random.rand()))
        return super().training_step([batch[0] + noise, batch[1]], batch_idx)


@dataclass
class Run:
    """What is trained, and how: twice, first with processes and then again without."""

    folder: Path
    policy: Any = "async"
    workers: int = 2
    module: Callable[[], pl.LightningModule] = Rich
    data: Callable[[], Dataset[Any]] = regression_data
    seed: int = 7
    strategy: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    made: pl.Trainer | None = None
    first: pl.LightningModule | None = None
    second: pl.LightningModule | None = None

    def made_anew(
        self, record: Path | None = None
    ) -> tuple[pl.Trainer, pl.LightningModule, dict[str, Any]]:
        pl.seed_everything(self.seed, verbose=False)
        module = self.module()
        strategy = HybridStrategy(self.policy, record=record, **self.strategy)
        trainer = make_trainer(strategy, self.workers, **self.trainer)
        options = {"batch_size": 4, "shuffle": True} | self.loader
        loaders = {"train_dataloaders": DataLoader(self.data(), **options)}
        loaders["val_dataloaders"] = DataLoader(regression_data(10), batch_size=5)
        return trainer, module, loaders | self.fit

    def record(self) -> Record:
        self.made, self.first, options = self.made_anew(self.folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.made.fit(self.first, **options)
        return read_record(find_record(self.folder))

    def replay(self, record: Record, anyway: bool = False) -> Replayed:
        trainer, self.second, options = self.made_anew()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return replay_fit(record, trainer, self.second, anyway, **options)

    def differing(self) -> list[str]:
        """The names of weights and buffers that have come home with other bits."""
        assert self.first is not None and self.second is not None
        one, other = self.first.state_dict(), self.second.state_dict()
        return [name for name in one if not torch.equal(one[name], other[name])]


def check_equal(run: Run, record: Record) -> None:
    report = run.replay(record)
    assert report.parted == "", f"and replayed again: {run.replay(record).parted!r}"
    assert report == Replayed(len(record.cells), record.told["end"]["stats"]["updates"])
    assert report.equal and run.differing() == []


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name",
    by_default(
        sorted(EVERY.keys() - {"hybrid", "async", "sandblaster"}),
        "backup",
        "k_async",
        "softsync",
        "switch",
    ),
)
def test_every_policy_is_replayed_whose_order_is_known(tmp_path: Path, name: str) -> None:
    given = {"switch": {"name": "switch", "at_update": 5}}.get(name, name)
    if name == "hogwild":
        return  # see test_a_run_without_a_lock_is_refused
    run = Run(tmp_path, given, 4, trainer={"max_epochs": 2})
    check_equal(run, run.record())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("policy", "exchange"),
    [
        ("hybrid", {"name": "movement", "every": 3, "compress": "topk"}),
        ("async", {"name": "accumulated", "n_push": 2, "n_fetch": 3}),
    ],
)
def test_workers_that_train_on_their_own_are_replayed(
    policy: str, exchange: dict[str, Any], tmp_path: Path
) -> None:
    run = Run(tmp_path, policy, 2, strategy={"exchange": exchange}, trainer={"max_epochs": 2})
    record = run.record()
    check_equal(run, record)
    with pytest.raises(UserError, match=r"exchange was .* and Gradient\(\) was given"):
        run.strategy = {}
        run.replay(record)


@pytest.mark.wide
@pytest.mark.few(1)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workers", by_default([2, 4], 4))
def test_a_replay_comes_to_the_same_bits(tmp_path: Path, policy: Any, workers: int) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    run = Run(tmp_path, policy, workers, trainer=options)
    record = run.record()
    assert record.told["end"]["stats"]["updates"] >= 3 * 2
    check_equal(run, record)


# ---- other ways to train ------------------------------------------------------------------------


class Forgetful(Regression):
    """An embedding, perhaps with sparse gradients; else user code weakens the momentum at times."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.01, momentum=0.9))
        self.sparse = sparse
        self.table = torch.nn.Embedding(50, 4, sparse=sparse)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        looked_up = self.table((batch[0].abs().sum(1) * 100).long() % 50)
        return super().training_step([batch[0] + looked_up, batch[1]], batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if not self.sparse and self.global_step % 3 == 2:
            for state in optimizer.state.values():
                state["momentum_buffer"] = state["momentum_buffer"] / 2


@pytest.mark.wide
@pytest.mark.parametrize("sparse", by_default([True, False], True))
def test_sparse_gradients_clipping_and_states_changed_by_user_code_are_replayed(
    tmp_path: Path, sparse: bool
) -> None:
    clip = {} if sparse else {"gradient_clip_val": 0.5}
    run = Run(tmp_path, "hybrid", module=partial(Forgetful, sparse), trainer=clip)
    check_equal(run, run.record())


class Manual(Rich):
    """Two optimizers, stepped by hand, and a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        one, other = self.optimizers()
        for optimizer in (one, other) if batch_idx % 2 else (other,):
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        one = torch.optim.SGD(self.net[0].parameters(), lr=0.01, momentum=0.9)
        other = torch.optim.Adam(self.net[4].parameters(), lr=0.01)
        return [one, other], [torch.optim.lr_scheduler.StepLR(one, 3)]


@pytest.mark.parametrize("policy", by_default(POLICIES, "hybrid"))
def test_manual_optimization_is_replayed(tmp_path: Path, policy: Any) -> None:
    run = Run(tmp_path, policy, module=Manual, trainer={"max_epochs": 2})
    check_equal(run, run.record())


class Noisy(Dataset[Any]):
    """Augments with random numbers, in the loader's own processes."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        x = torch.full((4,), index / 24) + 0.1 * torch.rand(4) + 0.1 * float(np.random.rand())
        return x, x.sum(0, keepdim=True)


@pytest.mark.slow
def test_random_augmentation_in_processes_of_the_loader_is_replayed(tmp_path: Path) -> None:
    run = Run(tmp_path, data=Noisy, loader={"num_workers": 2}, trainer={"max_epochs": 2})
    check_equal(run, run.record())


@pytest.mark.wide
@pytest.mark.parametrize("policy", by_default(POLICIES, "async"))
def test_a_run_that_went_on_from_a_checkpoint_is_replayed(tmp_path: Path, policy: Any) -> None:
    before = Run(tmp_path / "before", policy, trainer={"max_steps": 8, "limit_val_batches": 0})
    before.record()
    path = tmp_path / "half.ckpt"
    assert before.made is not None
    before.made.save_checkpoint(path)
    fit = {"ckpt_path": path, "weights_only": False}
    run = Run(tmp_path / "after", policy, fit=fit, trainer={"max_epochs": 4})
    check_equal(run, run.record())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_run_of_processes_started_afresh_is_replayed(tmp_path: Path, method: str) -> None:
    run = Run(tmp_path, strategy={"start_method": method}, trainer={"max_epochs": 2})
    check_equal(run, run.record())


@pytest.mark.slow
def test_processes_started_afresh_have_the_seed_of_their_own_run(tmp_path: Path) -> None:
    """A fork server outlives a run where multiprocessing was used before; it has old variables."""
    get_temp_dir()
    try:
        for seed in (1, 7):
            options = {"strategy": {"start_method": "forkserver"}, "trainer": {"max_epochs": 1}}
            run = Run(tmp_path / str(seed), seed=seed, **options)
            check_equal(run, run.record())
    finally:
        _forkserver._stop()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "correction", by_default(["dc_asgd_adaptive", "gap_aware"], "dc_asgd_adaptive")
)
def test_corrections_of_late_gradients_are_replayed(tmp_path: Path, correction: str) -> None:
    options = {"correction": correction}
    run = Run(tmp_path, workers=4, strategy=options, trainer={"max_epochs": 2})
    check_equal(run, run.record())


# ---- runs that ended early ----------------------------------------------------------------------


class Signals(Rich):
    """Worker 1 signals the process that started it, in the second epoch of the first run.

    The others wait for that in the same epoch: alone they might make all of its mini-batches.
    """

    def __init__(self, mark: Path, signum: int = 0, parent: int = 0) -> None:
        super().__init__()
        self.mark, self.signum, self.parent = mark, signum, parent

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch != 1 or os.getppid() != self.parent:
            return  # a replay has no processes below this one
        while self.global_rank != 1 and batch_idx > 0 and not self.mark.exists():
            time.sleep(0.01)
        if self.global_rank == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(self.parent, self.signum)
            time.sleep(0.3)


@pytest.mark.parametrize("policy", by_default(POLICIES, "hybrid"))
def test_a_run_ended_by_ctrl_c_is_replayed_to_where_it_stopped(tmp_path: Path, policy: Any) -> None:
    mark = tmp_path / "mark"
    run = Run(tmp_path, policy, module=lambda: Signals(mark, signal.SIGINT, os.getpid()))
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run.record()
    record = read_record(find_record(tmp_path))
    assert record.whole and len(record.of_kind("Stopped"))
    report = run.replay(record)
    updates = record.told["end"]["stats"]["updates"]
    assert report == Replayed(len(record.cells), updates) and 3 <= updates < 36


def test_a_killed_run_is_replayed_as_far_as_its_record_goes(tmp_path: Path) -> None:
    run, mark = Run(tmp_path), tmp_path / "mark"
    if (pid := os.fork()) == 0:
        run.module = lambda: Signals(mark, signal.SIGKILL, os.getpid())
        run.record()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    record = read_record(find_record(tmp_path))
    run.module = lambda: Signals(mark)
    report = run.replay(record)
    assert report.equal and not report.whole
    assert report.events == len(record.cells) and report.updates >= 12


class Fails(Rich):
    """Worker 1 fails in the middle, in every run, or is killed in the first.

    The others wait for that in the same epoch: alone they might make all of its mini-batches.
    """

    def __init__(self, mark: Path, killed_below: int | None = None) -> None:
        super().__init__()
        self.mark, self.killed_below = mark, killed_below

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch != 1:
            return
        while self.global_rank != 1 and batch_idx > 0 and not self.mark.exists():
            time.sleep(0.01)
        if self.global_rank == 1:
            self.mark.touch()
            if self.killed_below is None:
                raise RuntimeError("on purpose")
            if os.getppid() == self.killed_below:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("policy", by_default(POLICIES, "async"))
def test_a_worker_that_fails_fails_again_in_the_replay(tmp_path: Path, policy: Any) -> None:
    run = Run(tmp_path, policy, module=lambda: Fails(tmp_path / "mark"))
    with pytest.raises(RuntimeError, match="on purpose"):
        run.record()
    record = read_record(find_record(tmp_path))
    report = run.replay(record)
    assert report.equal and report.events == len(record.cells)
    assert [str(error) for error in report.errors] == ["on purpose"]


@pytest.mark.parametrize("policy", by_default(POLICIES, "async"))
def test_a_worker_that_was_killed_is_gone_in_the_replay_as_well(
    tmp_path: Path, policy: Any
) -> None:
    run = Run(tmp_path, policy, module=lambda: Fails(tmp_path / "mark", os.getpid()))
    with pytest.raises(RuntimeError, match="was killed by SIGKILL"):
        run.record()
    record = read_record(find_record(tmp_path))
    assert 1 in record.of_kind("Lost")["worker"]
    report = run.replay(record)
    assert report.equal and report.events == len(record.cells) and not report.errors


def test_a_record_cut_short_says_where_it_ends(tmp_path: Path) -> None:
    run = Run(tmp_path)
    record = run.record()
    short = replace(record, told={"header": record.header}, cells=record.cells[:60])
    report = run.replay(short)
    assert (report.events, report.whole, report.equal) == (60, False, True)
    assert 0 < report.updates < 36


# ---- differences --------------------------------------------------------------------------------


class Flips(Rich):
    """In its fifth mini-batch, worker 1 changes the last bit of one element of its gradient."""

    flip = False

    def on_after_backward(self) -> None:
        if self.flip and self.global_rank == 1 and self.trainer.fit_loop.total_batch_idx == 4:
            gradient = self.net[0].weight.grad
            assert gradient is not None
            gradient[3, 2] = torch.nextafter(gradient[3, 2], torch.tensor(9.0))


@pytest.mark.parametrize("policy", by_default(POLICIES, "hybrid"))
def test_one_flipped_bit_is_named_at_its_event(
    tmp_path: Path, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, policy, module=Flips)
    record = run.record()
    monkeypatch.setattr(Flips, "flip", True)
    pushes = [e.number for e in record.events() if (e.kind, e.worker) == ("Push", 1)]
    report = run.replay(record)
    assert report.parted.startswith(f"event {pushes[4]} (Push of worker 1, in update ")
    assert "other bits" in report.parted and report.events == pushes[4]


@pytest.mark.slow
def test_another_seed_is_named_before_the_first_update(tmp_path: Path) -> None:
    run = Run(tmp_path)
    record = run.record()
    run.seed = 8
    report = run.replay(record)
    assert "initial parameters have other bits" in report.parted and report.updates == 0


def test_another_path_through_the_code_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, "hybrid")
    record = run.record()
    run.trainer = {"max_epochs": 2}
    assert "in the replay" in run.replay(record).parted


def test_other_data_are_named_before_training_begins(tmp_path: Path) -> None:
    run = Run(tmp_path)
    record = run.record()
    run.data = lambda: regression_data(44)
    with pytest.raises(UserError, match=r"training data: 44 items, 48 in the run; .*anyway=true"):
        run.replay(record)
    run.data = lambda: torch.utils.data.TensorDataset(*(2 * t for t in regression_data().tensors))
    with pytest.raises(UserError, match="items have another content"):
        run.replay(record)
    assert run.replay(record, anyway=True).parted.startswith("event ")


def test_changed_code_and_versions_are_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    record = run.record()
    assert str(Path("tests/lightning/toys.py")) in record.header["code"]
    other = {"code": {**record.header["code"], "tests/lightning/toys.py": "0" * 16}}
    other["versions"] = {**record.header["versions"], "torch": "1.0"}
    changed = replace(record, told=record.told | {"header": record.header | other})
    with pytest.raises(UserError) as caught:
        run.replay(changed)
    assert "code: tests/lightning/toys.py has changed" in str(caught.value)
    assert "1.0 in the run" in str(caught.value) and "anyway=true" in str(caught.value)
    assert run.replay(changed, anyway=True).equal


def test_another_policy_or_number_of_workers_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    record = run.record()
    run.workers = 3
    with pytest.raises(UserError, match="the run had 2 workers, and 3 were given"):
        run.replay(record)
    run.workers, run.policy = 2, "hybrid"
    with pytest.raises(UserError, match=r"policy was .* and .* was given"):
        run.replay(record)


def test_a_run_without_a_lock_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    record = run.record()
    requirements = {**record.header["requirements"], "parameters": "shared"}
    header = {**record.header, "requirements": requirements, "policy": "Hogwild()"}
    told = {**record.told, "header": header}
    with pytest.raises(UserError, match=r"Hogwild\(\).*nobody knows the order"):
        run.replay(replace(record, told=told))


class Uncopyable(Rich):
    def __init__(self) -> None:
        super().__init__()
        self.file = Path(os.devnull).open()  # noqa: SIM115


@pytest.mark.slow
def test_what_cannot_be_copied_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, module=Uncopyable)
    with pytest.raises(UserError, match=r"cannot be copied.*TextIOWrapper"):
        run.replay(run.record())


# ---- one process --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_replay_starts_no_process_and_leaves_this_one_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, trainer={"max_epochs": 1})
    record = run.record()

    def fork() -> int:
        raise AssertionError("no process is wanted")

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setenv("LOCAL_RANK", "5")
    threads = torch.get_num_threads()
    rank = vars(rank_zero_only).get("rank")
    assert run.replay(record).equal
    assert os.environ["LOCAL_RANK"] == "5" and vars(rank_zero_only).get("rank") == rank
    assert torch.get_num_threads() == threads
