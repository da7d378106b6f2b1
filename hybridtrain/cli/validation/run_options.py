"""Types and ranges of the configuration's keys.

Those of strategies are in :mod:`hybridtrain.options.strategy_arguments`; the classes of models,
data, optimizers, callbacks and loggers declare theirs in their signatures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from hybridtrain.util.option_types import (
    Natural,
    NotNegative,
    Part,
    Positive,
    Range,
    Share,
    Workers,
)

Group = Mapping[str, Any]
Parts = Mapping[str, Mapping[str, Any] | None]  # by name; null removes one
FromMinus1 = Annotated[int, Range(-1)]  # -1: no limit
_DEVICES = "all GPUs is auto; CUDA_VISIBLE_DEVICES names GPUs and parts, numbered from 0"


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The task.

    Args:
        name: of the task, in summaries.
        monitor: a logged metric by which the best checkpoint is kept; null: the latest is kept.
        mode: whether a small or a large value of it is good.
        metric: a logged metric that a sweep compares.
    """

    name: str
    monitor: str | None
    mode: Literal["min", "max"]
    metric: str | None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Groups, and options of a run.

    Args:
        model: a LightningModule: `_target_` and its arguments.
        data: a LightningDataModule.
        optimizer: of the model.
        strategy: policy, exchange, update, and the options below.
        trainer: arguments of Lightning's `Trainer`.
        callbacks: by name.
        logger: by name.
        task: what is learnt.
        seed: of initial weights, order of samples, augmentation; null: another each time.
        ckpt: a checkpoint to go on from, or to test; `last`: the newest whole one of this model.
        resume: the directory of a run to go on with; `auto`: the last unfinished one.
        resume_override: let resume=DIR go on with other options than the run had.
        test_only: test ckpt, train nothing.
        test: test the best checkpoint at the end, where the task has a test set.
        profile: measure where each worker's time goes.
        faults: what is to go wrong on purpose.
        run_dir: where the run writes; chosen with hydra.run.dir=DIR.
    """

    model: Group
    data: Group
    optimizer: Group
    strategy: Group
    trainer: Group
    callbacks: Parts
    logger: Parts
    task: Group
    seed: Annotated[int, Range(0, 2**32 - 1)] | None
    ckpt: str | None
    resume: str | None
    resume_override: bool
    test_only: bool
    test: bool
    profile: bool
    faults: Sequence[Any] | None
    run_dir: str = "."


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """Of Lightning's ``Trainer``, in the order of ``conf/trainer/default.yaml``."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda"]
    devices: Annotated[Workers | Literal["auto"] | Sequence[Natural], _DEVICES]
    num_nodes: Workers
    precision: (
        Literal["32-true", "16-mixed", "bf16-mixed", "64-true", "bf16-true", "16-true"]
        | Literal["32", "16", "64", "bf16", 32, 16, 64]
        | Literal["transformer-engine", "transformer-engine-float16"]
        | None
    )
    max_epochs: FromMinus1 | None
    min_epochs: Natural | None
    max_steps: FromMinus1
    min_steps: Natural | None
    max_time: str | Mapping[str, Natural] | None
    accumulate_grad_batches: Positive
    gradient_clip_val: NotNegative | None
    gradient_clip_algorithm: Literal["norm", "value"] | None
    deterministic: bool | Literal["warn"] | None
    benchmark: bool | None
    detect_anomaly: bool
    sync_batchnorm: bool
    limit_train_batches: Natural | Share | None
    limit_val_batches: Natural | Share | None
    limit_test_batches: Natural | Share | None
    limit_predict_batches: Natural | Share | None
    overfit_batches: Natural | Share
    fast_dev_run: bool | Natural
    use_distributed_sampler: bool
    reload_dataloaders_every_n_epochs: Natural
    val_check_interval: Positive | Share | str | Mapping[str, Natural] | None
    check_val_every_n_epoch: Positive | None
    num_sanity_val_steps: FromMinus1 | None
    log_every_n_steps: Natural | None
    enable_checkpointing: bool | None
    enable_progress_bar: bool | None
    enable_model_summary: bool | None
    inference_mode: bool
    profiler: Literal["simple", "advanced", "pytorch", "xla"] | Part | None
    barebones: bool
    plugins: str | Sequence[Any] | Part | None
    enable_autolog_hparams: bool
    model_registry: str | None
    default_root_dir: str | None
