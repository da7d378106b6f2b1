"""Base of tasks whose compiled steps write to tables in shared memory."""

from __future__ import annotations

import importlib.util
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from hybridtrain.errors import UserError
from hybridtrain.util.option_types import typed

# ---- functions that numba compiles, where it is installed (extra sparse) ------------------------

Function = TypeVar("Function", bound=Callable[..., Any])
INSTALL = "pip install 'hybridtrain[sparse]'"
# Sums in any order, so that they are vectorised; NaN and infinity stay what they are.
_FAST = {"contract", "nsz", "arcp", "reassoc"}


def is_installed() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


def compiled(function: Function) -> Function:
    """Compile with numba at the first call, cached on disk for the next process.

    Raises:
        UserError: if numba is not installed.
    """
    try:
        import numba
    except ImportError as error:
        raise UserError(f"compiled steps need numba: {INSTALL}") from error
    options: dict[str, Any] = {"nogil": True, "fastmath": _FAST, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError as error:  # no folder that can be written to
        warnings.warn(
            f"compiled steps cannot be kept for the next start, which takes seconds longer "
            f"({error}); name a folder that can be written to in NUMBA_CACHE_DIR",
            stacklevel=2,
        )
        return numba.njit(**options)(function)


MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def shares_parameters(trainer: Any) -> bool:
    """Whether this process writes to the trained parameters: hogwild, or one process on a CPU."""
    requirements = getattr(trainer.strategy, "requirements", None)
    if requirements is not None:
        return bool(requirements.in_place)
    return bool(trainer.world_size == 1 and trainer.strategy.root_device.type == "cpu")


_SMALLER = "give a smaller model.dim, a larger data.min_count, data.max_words, or fewer workers"


def check_size(n_bytes: int, workers: int, what: str, advice: str = _SMALLER) -> None:
    """Check that the tables fit into memory, once shared and once in each worker.

    Raises:
        UserError: if they exceed the memory of this machine.
    """
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if n_bytes * (workers + 1) > there:
        raise UserError(
            f"{what} are {n_bytes / 2**30:.1f} GiB, which {workers} "
            f"worker{'s' * (workers > 1)} and the server need once each, and this machine has "
            f"{there / 2**30:.1f}; {advice}"
        )


def are_compiled(compiled: bool | Literal["auto"], trainer: pl.Trainer) -> bool:
    """Whether to compile steps; ``"auto"``: where parameters are shared and numba is installed.

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
    """The trainer's data module.

    Raises:
        UserError: if the module reads data of another kind.
    """
    data: Any = module.trainer.datamodule  # type: ignore[attr-defined]
    if getattr(data, "kind", None) != kind:
        raise UserError(
            f"{type(data).__name__} was given as data, but {type(module).__name__} reads "
            f"data={kind}"
        )
    return data


class CompiledSteps(pl.LightningModule, ABC):
    """A module with compiled steps where workers share parameters, elsewhere torch's.

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
        """Number of workers; 1 before there is a trainer."""
        return self._trainer.world_size if self._trainer is not None else 1

    def setup(self, stage: str) -> None:
        """Read the sizes of the data, and choose how to step.

        Raises:
            UserError: if compiled steps were asked for and cannot be made.
        """
        self.know(data_of(self, self.reads))
        self.steps_compiled = are_compiled(self.compiled, self.trainer)
        self.automatic_optimization = not self.steps_compiled

    def configure_optimizers(self) -> Any:
        """No optimizer for compiled steps; else one with its schedule."""
        return (
            None if self.steps_compiled else self.scheduled(self.make_optimizer(self.parameters()))
        )

    @abstractmethod
    def know(self, data: Any) -> None:
        """Take the sizes of the tables from the data."""

    @abstractmethod
    def scheduled(self, optimizer: Optimizer) -> Any:
        """The optimizer with its learning rate schedule, as Lightning takes them."""
