"""What this machine has to have for a run. Raises UserError with one line."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from hybridtrain.errors import UserError


def check_machine(cfg: DictConfig) -> None:
    """This machine has the devices asked for. Imports torch; does not initialise CUDA."""
    trainer = cfg.trainer
    count = 0 if trainer.accelerator == "cpu" else count_gpus()
    if count == 0 and trainer.accelerator in ("gpu", "cuda"):
        raise UserError(
            f"trainer.accelerator={trainer.accelerator}: this machine has no usable CUDA device; "
            "choose trainer.accelerator=cpu, or auto to take a GPU when there is one"
        )
    if count == 0:
        _check_cpu(trainer)
    else:
        _check_gpus(cfg, count)


def count_gpus() -> int:
    """CUDA devices that torch can use, counted without binding this process to one."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _check_gpus(cfg: DictConfig, count: int) -> None:
    wanted = cfg.trainer.devices
    if wanted == "auto":
        return
    if (max(wanted) < count) if isinstance(wanted, ListConfig) else (wanted <= count):
        return
    several = "strategy.workers_per_device=N for several workers on each, "
    raise UserError(
        f"trainer.devices={wanted}: this machine has {count} GPU{'s' * (count > 1)}; ask for at "
        f"most {count}, or {several if 'workers_per_device' in cfg.strategy else ''}"
        "trainer.accelerator=cpu for worker processes on the CPU"
    )


def _check_cpu(trainer: DictConfig) -> None:
    if isinstance(trainer.devices, ListConfig):
        raise UserError(
            f"trainer.devices={list(trainer.devices)}: a list chooses GPUs, and this run is on the "
            "CPU; give the number of workers"
        )


def check_directory(directory: Path) -> None:
    """The run directory exists or can be made, and can be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        refusal = refusal_of(directory)
    except OSError as error:
        refusal = error
    if refusal is not None:
        raise UserError(
            f"the run directory {directory} cannot be written ({refusal.strerror}); choose another "
            "with hydra.run.dir=DIR"
        )


def refusal_of(directory: Path) -> OSError | None:
    """Why nothing can be written to a directory, or in its place where there is none yet."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        return error
    return None
