"""Every argument of ``pl.Trainer`` works under our strategies, or is refused in one sentence."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    SpikeDetection,
    Timer,
)
from pytorch_lightning.plugins import (
    AsyncCheckpointIO,
    DoublePrecision,
    MixedPrecision,
    TorchCheckpointIO,
)
from pytorch_lightning.plugins.environments import (
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from pytorch_lightning.profilers import AdvancedProfiler, PassThroughProfiler, SimpleProfiler
from pytorch_lightning.tuner import Tuner
from torch.utils.data import DataLoader

from hybridtrain.engine.worlds.start_workers import ProcessSpawner
from hybridtrain.errors import UserError
from tests.lightning.toys import Regression, distance, fit, flat, make_trainer, regression_data
from tests.picking import by_default

# Arguments that other files are about.
ELSEWHERE = {
    "strategy": "everywhere",
    "devices": "test_equality",
    "max_epochs": "everywhere",
    "limit_train_batches": "tests/parity",
    "limit_val_batches": "tests/parity",
    "limit_test_batches": "tests/parity",
    "limit_predict_batches": "tests/parity",
    "val_check_interval": "tests/parity; by the clock: here",
    "check_val_every_n_epoch": "tests/parity",
    "num_sanity_val_steps": "tests/parity",
    "accumulate_grad_batches": "test_equality",
    "gradient_clip_val": "test_equality",
    "gradient_clip_algorithm": "test_equality",
    "sync_batchnorm": "tests/parity",
    "log_every_n_steps": "test_loggers",
    "logger": "test_loggers",
    "callbacks": "everywhere",
}

# What says how to run, not what to compute: equal to the bit with and without.
HARMLESS: dict[str, dict[str, Any]] = {
    "accelerator=auto": {"accelerator": "auto"},
    "devices as text": {"devices": "2"},
    "num_nodes=1": {"num_nodes": 1},
    "precision=32": {"precision": 32},
    "environment": {"plugins": [LightningEnvironment()]},
    "CheckpointIO": {"plugins": [TorchCheckpointIO()]},
    "detect_anomaly": {"detect_anomaly": True},
    "inference_mode": {"inference_mode": False},
    "benchmark": {"benchmark": True},
    "deterministic": {"deterministic": True},
    "deterministic=warn": {"deterministic": "warn"},
    "profiler=simple": {"profiler": "simple"},
    "AdvancedProfiler": {"profiler": AdvancedProfiler(filename=None)},
    "PassThroughProfiler": {"profiler": PassThroughProfiler()},
    "profiler=pytorch": {"profiler": "pytorch"},
    "max_time": {"max_time": "00:01:00:00"},
    "Timer": {"callbacks": [Timer("00:01:00:00")]},
    "min_epochs": {"min_epochs": 1},
    "min_steps": {"min_steps": 2},
    "max_steps": {"max_epochs": -1, "max_steps": 8},
    "progress bar": {"enable_progress_bar": True},
    "summary": {"enable_model_summary": True},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
    "model_registry": {"model_registry": "somewhere"},
    "enable_autolog_hparams": {"enable_autolog_hparams": False},
    "SpikeDetection": {"callbacks": [SpikeDetection(atol=1e9, rtol=1e9)]},
}


def trained(strategy: str = "hybrid", **options: Any) -> tuple[pl.LightningModule, pl.Trainer]:
    return fit(strategy, options.pop("devices", 2), 6, **({"max_epochs": 2} | options))


def test_no_argument_of_the_trainer_is_forgotten() -> None:
    used = {name for options in HARMLESS.values() for name in options} | ELSEWHERE.keys()
    source = inspect.getsource(inspect.getmodule(test_no_argument_of_the_trainer_is_forgotten))  # type: ignore[arg-type]
    mentioned = {n for n in inspect.signature(pl.Trainer).parameters if f"{n}=" in source}
    assert set(inspect.signature(pl.Trainer).parameters) - used - mentioned == set()


@pytest.fixture(scope="module")
def plain() -> torch.Tensor:
    return flat(trained()[0])


@pytest.mark.few(3)
@pytest.mark.parametrize("name", by_default(HARMLESS, *list(HARMLESS)[::4]))
def test_an_option_that_does_not_touch_the_arithmetic_changes_no_bit(
    name: str, plain: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module, trainer = trained(**HARMLESS[name])
    torch.use_deterministic_algorithms(False)
    assert trainer.global_step == 8
    assert torch.equal(flat(module), plain)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", by_default(HARMLESS, "detect_anomaly", "reload", "Timer"))
def test_options_that_do_not_touch_the_arithmetic_also_run_asynchronously(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, trainer = trained("async", **HARMLESS[name])
    torch.use_deterministic_algorithms(False)
    assert trainer.global_step in (({16}, {8, 9})[name == "max_steps"])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"precision": "bf16-true"}, torch.bfloat16),
        pytest.param({"precision": "16-true"}, torch.float16, marks=pytest.mark.slow),
        pytest.param({"precision": "bf16-mixed"}, torch.float32, marks=pytest.mark.slow),
        ({"plugins": [MixedPrecision("bf16-mixed", "cpu")]}, torch.float32),
        ({"plugins": [DoublePrecision()]}, torch.float64),
    ],
    ids=["bf16-true", "16-true", "bf16-mixed", "mixed plugin", "double plugin"],
)
def test_precision_is_that_of_one_process_on_the_union(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    ours, _ = fit("hybrid", 2, 6, max_epochs=1, **options)
    alone, _ = fit("hybrid", 1, 12, max_epochs=1, **options)
    assert next(ours.parameters()).dtype == dtype
    assert distance(ours, alone) < {torch.float64: 1e-12, torch.float32: 3e-3}.get(dtype, 2e-2)


def test_16_mixed_on_a_cpu_is_bf16_mixed_as_lightning_has_it() -> None:
    ours, _ = trained(precision="16-mixed")
    theirs, _ = trained(precision="bf16-mixed")
    assert torch.equal(flat(ours), flat(theirs))


def test_barebones_leaves_the_numbers_alone(plain: torch.Tensor) -> None:
    pl.seed_everything(7, verbose=False)
    trainer = pl.Trainer(
        strategy="hybrid", accelerator="cpu", devices=2, max_epochs=2, barebones=True
    )
    module = Regression()
    trainer.fit(module, DataLoader(regression_data(), 6, shuffle=True))
    assert torch.equal(flat(module), plain)


def test_fast_dev_run_takes_one_step_and_writes_nothing(tmp_path: Path) -> None:
    _, trainer = trained(fast_dev_run=True, default_root_dir=tmp_path)
    assert trainer.global_step == 1
    assert list(tmp_path.iterdir()) == []


def test_overfit_batches_takes_the_same_batches_again() -> None:
    _, trainer = trained(overfit_batches=2, max_epochs=3)
    assert trainer.global_step == 6
    _, trainer = trained(overfit_batches=0.5, max_epochs=3)
    assert trainer.global_step == 6


@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_use_distributed_sampler_false_shows_everybody_everything(strategy: str) -> None:
    _, trainer = trained(strategy, use_distributed_sampler=False, max_epochs=1)
    assert trainer.strategy.run_stats()["samples_per_worker"] == [48, 48]


def test_max_time_ends_a_run(tmp_path: Path) -> None:
    _, trainer = trained(max_epochs=-1, max_time={"seconds": 1})
    assert trainer.global_step > 0 and trainer.current_epoch > 1


def test_checkpoints_lie_under_default_root_dir_also_when_written_behind_the_back(
    tmp_path: Path,
) -> None:
    kinds = {"plain": TorchCheckpointIO(), "async": AsyncCheckpointIO()}
    states = []
    for name, plugin in kinds.items():
        _, trainer = trained(
            plugins=[plugin], enable_checkpointing=True, default_root_dir=tmp_path / name
        )
        path = Path(trainer.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
        assert path.is_relative_to(tmp_path / name)
        states.append(torch.load(path, weights_only=True)["state_dict"])
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@pytest.mark.slow
def test_a_file_written_in_mid_training_behind_the_back_is_of_one_step(tmp_path: Path) -> None:
    """AsyncCheckpointIO clones before it goes on; views of shared memory are cloned like others."""
    files = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    adam = {"module": lambda: Regression(lambda p: torch.optim.Adam(p, lr=0.01))}
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [files]} | adam
    trained(plugins=[AsyncCheckpointIO()], **options)
    for path in tmp_path.glob("*.ckpt"):
        content = torch.load(path, weights_only=True)
        again, _ = trained(max_epochs=-1, max_steps=content["global_step"], **adam)
        for name, value in again.state_dict().items():
            assert torch.equal(content["state_dict"][name], value)


class SlowOne(Regression):
    """Whose clocks differ: worker 1 begins late."""

    def on_train_start(self) -> None:
        self.trainer._last_val_time = self.trainer._last_val_time + 100.0 * self.global_rank

    def on_validation_start(self) -> None:
        self.validated = getattr(self, "validated", 0) + 1

    def on_fit_end(self) -> None:
        counts = self.all_gather(torch.tensor(getattr(self, "validated", 0)))
        assert counts[0] == counts[1] > 2


@pytest.mark.slow
def test_validating_by_the_clock_follows_the_clock_that_is_due_first() -> None:
    loader = DataLoader(regression_data(), 4)
    trainer = make_trainer(
        "hybrid", 2, max_epochs=40, val_check_interval="00:00:00:01", check_val_every_n_epoch=None
    )
    trainer._val_check_time_interval = 0.05  # type: ignore[assignment]
    trainer.fit(SlowOne(), loader, loader)


class Found(Regression):
    """With an attribute for the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-5

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return DataLoader(regression_data(), 6)


@pytest.mark.slow
def test_the_learning_rate_finder_brings_home_what_it_found(tmp_path: Path) -> None:
    found = {}
    for workers in (1, 2):
        pl.seed_everything(7, verbose=False)
        module = Found()
        before = flat(module).clone()
        trainer = make_trainer("hybrid", workers, default_root_dir=tmp_path, max_epochs=8)
        finder = Tuner(trainer).lr_find(module, num_training=30, early_stop_threshold=None)
        assert finder is not None and len(finder.results["loss"]) == 30
        assert module.lr == finder.suggestion() != 1e-5
        assert torch.equal(flat(module), before)
        found[workers] = module.lr
        trainer.fit(module)
        assert not torch.equal(flat(module), before)
    alone = Found()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=8,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    Tuner(trainer).lr_find(alone, num_training=30, early_stop_threshold=None)
    assert {found[1], found[2], alone.lr} <= set(finder.results["lr"])
    assert list(tmp_path.glob(".lr_find*")) == []


def test_the_learning_rate_finder_works_as_a_callback(tmp_path: Path) -> None:
    callback = LearningRateFinder(num_training_steps=30, early_stop_threshold=None)
    module, trainer = fit(
        "hybrid", 2, 6, Found, callbacks=[callback], max_epochs=10, default_root_dir=tmp_path
    )
    assert trainer.global_step == 40
    assert callback.optimal_lr is not None
    assert module.lr == callback.optimal_lr.suggestion()  # type: ignore[union-attr]


class Silent(Regression):
    """Without ``self.log``, which torch 2.13 cannot compile."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])


@pytest.mark.parametrize("strategy", by_default(["hybrid", "async"], "async"))
def test_a_compiled_module_may_be_given_to_fit(strategy: str) -> None:
    pl.seed_everything(7, verbose=False)
    inner = Silent()
    trainer = make_trainer(strategy, 2, max_epochs=2)
    loader = DataLoader(regression_data(), 6, shuffle=True)
    trainer.fit(torch.compile(inner, backend="eager"), loader)  # type: ignore[arg-type]
    reference, _ = trained(strategy, module=Silent)
    if strategy == "hybrid":
        assert torch.equal(flat(inner), flat(reference))
    assert trainer.global_step == (8 if strategy == "hybrid" else 16)


# ---- what is refused ----------------------------------------------------------------------------


def refused(strategy: str, match: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ProcessSpawner, "start", lambda *_: pytest.fail("a process was started"))
        with pytest.raises(UserError, match=match) as caught:
            fit(strategy, 2, 6, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_finding_a_batch_size_is_for_one_process(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    callbacks = [BatchSizeFinder()]
    refused(strategy, "BatchSizeFinder.*strategy='auto'", monkeypatch, callbacks=callbacks)
    with pytest.raises(ValueError, match="batch size is currently not supported with distributed"):
        Tuner(make_trainer(strategy, 2)).scale_batch_size(Regression())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"val_check_interval": 2}, "val_check_interval=2 was given"),
        ({"val_check_interval": 0.5}, "val_check_interval=0.5 was given"),
        ({"val_check_interval": "00:00:01:00"}, "val_check_interval=60 s was given"),
        ({"limit_train_batches": 0.5}, "limit_train_batches=0.5 was given"),
        ({"overfit_batches": 0.5}, "overfit_batches=0.5 was given"),
        ({"callbacks": [LearningRateFinder()]}, "search for the learning rate"),
    ],
    ids=["every 2", "every half", "every minute", "half of it", "overfit", "finder"],
)
def test_options_that_free_running_workers_cannot_follow_are_refused(
    options: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused("async", f"{match}.*strategy=hybrid", monkeypatch, **options)


def test_several_hosts_need_an_engine_or_its_variables() -> None:
    with pytest.raises(UserError, match=r"num_nodes is more than 1, and .*NODE_RANK is missing"):
        make_trainer("hybrid", 2, num_nodes=2)


class ForeignAccelerator(pl.accelerators.CPUAccelerator):
    """Stands for one that this machine has not."""


def test_an_accelerator_that_cannot_share_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pytorch_lightning.accelerators import MPSAccelerator

    trainer = make_trainer("hybrid", 2)
    monkeypatch.setattr(trainer.strategy, "_accelerator", object.__new__(MPSAccelerator))
    with pytest.raises(UserError, match=r"accelerator='mps' .* Trainer\(accelerator='cpu'\)"):
        trainer.fit(Regression(), DataLoader(regression_data(), 6))


ELASTIC = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "GROUP_RANK": "0",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "a",
}


def test_a_process_of_many_that_torchrun_has_started_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in ELASTIC.items():
        monkeypatch.setenv(name, value)
    match = r"one of 4 processes that TorchElasticEnvironment has started.*start the script once"
    refused("hybrid", match, monkeypatch)  # found by itself
    refused("hybrid", match, monkeypatch, plugins=[TorchElasticEnvironment()])


def test_one_task_of_slurm_may_start_workers(
    monkeypatch: pytest.MonkeyPatch, plain: torch.Tensor
) -> None:
    slurm = {"NTASKS": "1", "JOB_NAME": "train", "NODEID": "0", "PROCID": "0", "LOCALID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    module, trainer = trained()
    assert type(trainer.strategy.cluster_environment) is SLURMEnvironment
    assert torch.equal(flat(module), plain)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    refused("hybrid", "one of 2 processes that SLURMEnvironment has started", monkeypatch)


def test_every_worker_writes_its_profilers_report_as_under_ddp(tmp_path: Path) -> None:
    trained(profiler=SimpleProfiler(dirpath=tmp_path, filename="times"))
    reports = sorted(path.name for path in tmp_path.iterdir() if path.stat().st_size)
    assert reports == ["fit-times-0.txt", "fit-times-1.txt"]
    assert "run_training_batch" in (tmp_path / reports[0]).read_text()


@pytest.mark.parametrize("strategy", by_default(["hybrid", "async"], "async"))
@pytest.mark.parametrize("n", [48, 29])
def test_reloaded_loaders_give_every_sample_exactly_once(strategy: str, n: int) -> None:
    """Lightning begins to iterate a reloaded loader twice; what it has fetched is not lost."""
    _, trainer = trained(
        strategy, data=regression_data(n), max_epochs=4, reload_dataloaders_every_n_epochs=1
    )
    stats = trainer.strategy.run_stats()
    assert stats["samples"] == 4 * n
    assert stats["updates"] == 4 * -(-n // (12 if strategy == "hybrid" else 6))
