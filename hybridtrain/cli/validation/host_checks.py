"""Check the machine, directories and file owners before a run. Raises UserError with one line."""

from __future__ import annotations

import os
import tempfile
from itertools import chain
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from hybridtrain.errors import UserError

_WRITTEN = (".yaml", ".json", ".csv", ".log")


def check_machine(cfg: DictConfig) -> None:
    """Check that this machine has the devices; imports torch, does not initialise CUDA."""
    trainer = cfg.trainer
    count = 0 if trainer.accelerator == "cpu" else count_gpus()
    if count == 0 and trainer.accelerator in ("gpu", "cuda"):
        raise UserError(
            f"trainer.accelerator={trainer.accelerator}: this machine has no usable CUDA device; "
            "choose trainer.accelerator=cpu, or auto to take a GPU when there is one"
        )
    if count > 0:
        _check_gpus(cfg, count)
    elif isinstance(trainer.devices, ListConfig):
        raise UserError(
            f"trainer.devices={list(trainer.devices)}: a list chooses GPUs, and this run is on the "
            "CPU; give the number of workers"
        )


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


def check_name(path: Path, what: str) -> None:
    """Check that a directory is called what Hydra and YAML can keep.

    Raises:
        UserError: if its path has ``${``, which Hydra would replace, or is not UTF-8.
    """
    text = str(path.absolute())
    if "${" in text:
        raise UserError(
            f"{what} {text} has ${{ in its name, which Hydra would replace; rename it, or choose "
            "another"
        )
    check_text(text, what)


def check_text(text: str, what: str) -> None:
    """Raise UserError if a text is not UTF-8, as names of files may be."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{what} {text} is not UTF-8, and files of a run are; rename it (convmv)"
        ) from None


def check_directory(directory: Path) -> None:
    """Make the run directory if necessary, and check that it can be written."""
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


def check_files(directory: Path) -> None:
    """Check that no name under which a run writes is a FIFO or a device, whose opening may wait.

    Raises:
        UserError: naming the file.
    """
    for path in chain(directory.glob("*"), directory.glob("*/*")):
        if path.suffix in _WRITTEN and path.exists() and not (path.is_file() or path.is_dir()):
            raise UserError(f"{path} is a FIFO or a device, and a run writes such files: remove it")


def refusal_of(directory: Path) -> OSError | None:
    """Why a directory, or its nearest existing parent, cannot be written; None: it can."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        return error
    return None
