"""Writes down what a user could observe of a run, in every rank.

Lightning calls each hook through two functions; wrapping them shows the order of all hooks without
overriding any (an overridden hook may change what a strategy does). At the end of a fit, and at the
teardown of whatever ran, each rank writes what it has to a file of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers.logger import Logger, rank_zero_experiment
from pytorch_lightning.trainer import call
from pytorch_lightning.utilities import rank_zero_only

from tests.parity.toys import fingerprint


class MemoryLogger(Logger):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return None

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.told.append((step, dict(metrics)))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        self.told.append(dict(params))


class Recorder:
    """One for each run; forked ranks continue with copies of it.

    Args:
        folder: where the ranks' files are written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hooks: list[str] = []
        self._samples: list[Any] = []
        self._fits: list[dict[str, Any]] = []
        self._ends: list[dict[str, Any]] = []

    def attach(self) -> None:
        """Wrap the functions through which Lightning calls hooks. For the rest of the process."""
        of_callbacks, of_module = call._call_callback_hooks, call._call_lightning_module_hook

        def callbacks(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
            self._hooks.append(f"callbacks.{hook_name}")
            if hook_name == "on_train_batch_start":
                self._samples.append(fingerprint(args[0]))
            return of_callbacks(trainer, hook_name, *args, **kwargs)

        def module(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
            self._hooks.append(hook_name)
            result = of_module(trainer, hook_name, *args, **kwargs)
            if hook_name == "on_train_end":
                self._fits.append(state_of_fit(trainer))
            if hook_name == "teardown":
                self._ends.append(state_of_end(trainer))
                self._write(trainer)
            return result

        call._call_callback_hooks = callbacks
        call._call_lightning_module_hook = module

    def _write(self, trainer: Any) -> None:
        module = trainer.lightning_module
        loggers = [logger for logger in trainer.loggers if isinstance(logger, MemoryLogger)]
        seen = {
            "hooks": tuple(self._hooks),
            "samples": self._samples,
            "fit": self._fits,
            "end": self._ends,
            "notes": list(getattr(module, "notes", [])),
            "logged": [logger.told for logger in loggers],
        }
        torch.save(flatten(seen), self._folder / f"rank-{trainer.global_rank}.pt")


def state_of_fit(trainer: Any) -> dict[str, Any]:
    """Weights and counters of any rank; of rank 0 also what a checkpoint would hold."""
    module: pl.LightningModule = trainer.lightning_module
    groups = [
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for optimizer in trainer.optimizers
    ]
    seen = {
        "parameters": dict(module.named_parameters()),
        "groups": groups,
        "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        "counters": counters(trainer),
    }
    if trainer.is_global_zero:
        seen["buffers"] = dict(module.named_buffers())
        seen["checkpoint"] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    else:
        # What all ranks take part in; the result belongs to rank 0's file.
        trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return detached(seen)


def state_of_end(trainer: Any) -> dict[str, Any]:
    """After fit, validate, test or predict, in any rank."""
    return detached(
        {
            "counters": counters(trainer),
            "callback_metrics": dict(trainer.callback_metrics),
            "progress_bar_metrics": dict(trainer.progress_bar_metrics),
            "logged_metrics": dict(trainer.logged_metrics),
        }
    )


def counters(trainer: Any) -> dict[str, Any]:
    return {
        "global_step": trainer.global_step,
        "current_epoch": trainer.current_epoch,
        "should_stop": trainer.should_stop,
        "num_training_batches": trainer.num_training_batches,
        "num_val_batches": trainer.num_val_batches,
        "estimated_stepping_batches": trainer.fit_loop.max_steps,
    }


def detached(value: Any) -> Any:
    """The same with copies of all tensors, so that later steps leave it alone."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: detached(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return (
            type(value)(detached(each) for each in value)
            if type(value) in (list, tuple)
            else ([detached(each) for each in value])
        )
    return value


Leaf = Any  # a tensor, a number, a string, None, or a tuple of strings


def flatten(value: Any, prefix: str = "") -> dict[str, Leaf]:
    """Dotted names -> leaves. Empty containers stay, as leaves."""
    if isinstance(value, dict) and value:
        parts = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, list | tuple | set) and value and not _is_trace(value):
        parts = [(str(index), each) for index, each in enumerate(value)]
    else:
        return {prefix: _plain(value)}
    found: dict[str, Leaf] = {}
    for name, each in parts:
        found |= flatten(each, f"{prefix}.{name}" if prefix else name)
    return found


def _is_trace(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) > 3 and all(isinstance(v, str) for v in value)


def _plain(value: Any) -> Leaf:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if value is None or isinstance(value, bool | int | float | complex | str | tuple):
        return value
    if isinstance(value, dict | list | set):
        return repr(value)
    return repr(type(value))
