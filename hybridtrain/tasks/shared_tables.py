"""What tasks have in common whose workers step shared tables themselves, where they can."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Literal

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from hybridtrain.errors import UserError
from hybridtrain.tasks.compiled import INSTALL, is_installed
from hybridtrain.util.option_types import typed

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def shares_parameters(trainer: Any) -> bool:
    """Whether what this process writes to parameters is what is trained."""
    requirements = getattr(trainer.strategy, "requirements", None)
    if requirements is not None:
        return bool(requirements.in_place)
    return bool(trainer.world_size == 1 and trainer.strategy.root_device.type == "cpu")


def machine_bytes() -> int:
    """How much memory this machine has, free or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_SMALLER = "give a smaller model.dim, a larger data.min_count, data.max_words, or fewer workers"


def check_size(n_bytes: int, workers: int, what: str, advice: str = _SMALLER) -> None:
    """The tables fit into this machine, once shared and once in each worker as they are made.

    Raises:
        UserError: if not even into an empty one.
    """
    there = machine_bytes()
    if n_bytes * (workers + 1) > there:
        raise UserError(
            f"{what} are {n_bytes / 2**30:.1f} GiB, which {workers} workers and the server need "
            f"once each, and this machine has {there / 2**30:.1f}; {advice}"
        )


def are_compiled(compiled: bool | Literal["auto"], trainer: pl.Trainer) -> bool:
    """Whether steps are, which the user has forced, forbidden or left open (``"auto"``).

    Raises:
        UserError: if compiled steps were asked for and cannot be made.
    """
    shares = shares_parameters(trainer)
    if compiled is True and not shares:
        raise UserError(
            "model.compiled=true was given, but only workers that share parameters can step "
            "them; use strategy=hogwild, or model.compiled=auto"
        )
    if compiled is True and not is_installed():
        raise UserError(f"model.compiled=true was given, which needs numba: {INSTALL}")
    if compiled == "auto" and shares and not is_installed():
        rank_zero_info(f"Steps go through torch, at a tenth of the speed: {INSTALL}")
    found = bool(compiled) and shares and is_installed()
    if found:
        warnings.filterwarnings("ignore", message=r".*configure_optimizers` returned `None`")
    return found


def data_of(module: pl.LightningModule, kind: str) -> Any:
    """The data that the module is trained on.

    Raises:
        UserError: if they are of another kind than it reads.
    """
    data: Any = module.trainer.datamodule  # type: ignore[attr-defined]
    if getattr(data, "kind", None) != kind:
        raise UserError(
            f"{type(data).__name__} was given as data, but {type(module).__name__} reads "
            f"data={kind}"
        )
    return data


class CompiledSteps(pl.LightningModule, ABC):
    """Stepped in a compiled function where workers share parameters; elsewhere through torch.

    Args:
        compiled: ``True``, ``False``, or ``"auto"``: where workers share parameters (``hogwild``,
            or one process on a CPU) and numba is installed.
        make_optimizer: of steps through torch.
    """

    reads = ""  # the kind of data that it is made for

    @typed("model.")
    def __init__(self, compiled: bool | Literal["auto"], make_optimizer: MakeOptimizer) -> None:
        super().__init__()
        self.compiled, self.make_optimizer = compiled, make_optimizer
        self.steps_compiled = False

    @property
    def workers(self) -> int:
        """How many train; 1 before there is a trainer."""
        return self._trainer.world_size if self._trainer is not None else 1

    def setup(self, stage: str) -> None:
        """Look at the data, and choose how to step.

        Raises:
            UserError: if compiled steps were asked for and cannot be made.
        """
        self.know(data_of(self, self.reads))
        self.steps_compiled = are_compiled(self.compiled, self.trainer)
        self.automatic_optimization = not self.steps_compiled

    def configure_optimizers(self) -> Any:
        """None where steps are compiled; else one with its schedule."""
        return (
            None if self.steps_compiled else self.scheduled(self.make_optimizer(self.parameters()))
        )

    @abstractmethod
    def know(self, data: Any) -> None:
        """These are the data, which say how large tables are."""

    @abstractmethod
    def scheduled(self, optimizer: Optimizer) -> Any:
        """An optimizer as Lightning wants it, with the schedule of its rate."""
