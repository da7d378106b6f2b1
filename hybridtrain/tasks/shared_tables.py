"""Base of tasks whose compiled steps write to tables in shared memory."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, Literal

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from hybridtrain.errors import UserError
from hybridtrain.util.compiling import INSTALL, is_installed
from hybridtrain.util.option_types import Above0, Range, typed

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def shares_parameters(trainer: Any) -> bool:
    """Whether this process writes to the trained parameters: hogwild, or one process on a CPU."""
    requirements = getattr(trainer.strategy, "requirements", None)
    if requirements is not None:
        return bool(requirements.in_place)
    return bool(trainer.world_size == 1 and trainer.strategy.root_device.type == "cpu")


_SMALLER = "give a smaller model.dim, a larger data.min_count, data.max_words, or fewer workers"


_LARGE, _TIMES = 2**28, 100  # bytes of a table; rows for each number that the data may have


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


# ---- base of the three problems: steps and learning rates ---------------------------------------


class InPlaceModule(CompiledSteps):
    """Stepped example by example in a compiled function where workers share parameters.

    Everywhere else the mean loss of a mini-batch goes through torch, with sparse gradients and the
    user's optimizer; both are gradient descent on one objective.

    Args:
        rate: learning rate of compiled steps, for one example.
        decay: factor of the learning rate from epoch to epoch; also of the optimizer's.
        compiled: see :class:`CompiledSteps`.
        optimizer: given the parameters, returns their optimizer; for steps through torch.
    """

    @typed("model.")
    def __init__(
        self,
        rate: Above0,
        decay: Annotated[float, Range(0, 1, "(")],
        compiled: bool | Literal["auto"] = "auto",
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        super().__init__(compiled, optimizer or partial(SGD, lr=rate))
        self.rate, self.decay = rate, decay

    def check_size(self, rows: int, width: int, n_numbers: int | None = None) -> None:
        """Check that a float32 table fits into memory; one large number in the data sets its rows.

        Args:
            rows: of the table.
            width: of a row.
            n_numbers: so many different rows the data name at most; None: they may be few.

        Raises:
            UserError: if it does not fit, or is large and nearly all rows would be of no number.
        """
        n_bytes = 4 * rows * width
        what = f"tables of {rows:,} rows, one more than the largest number in the data,"
        if n_numbers is not None and n_bytes > _LARGE and rows > _TIMES * n_numbers:
            raise UserError(
                f"{what} are {n_bytes / 2**30:.1f} GiB, and the data have at most {n_numbers:,} "
                "different numbers; number them from 0 without gaps"
            )
        advice = "number them from 0 without gaps, or give fewer workers"
        check_size(n_bytes, self.workers, what, advice)

    @property
    def rate_now(self) -> float:
        """Learning rate of compiled steps in this epoch."""
        return self.rate * self.decay**self.current_epoch

    def scheduled(self, optimizer: Optimizer) -> Any:
        """The optimizer, with a rate that decays every epoch."""
        return {"optimizer": optimizer, "lr_scheduler": ExponentialLR(optimizer, self.decay)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """Step every example, or return the mean loss."""
        if not self.steps_compiled:
            return self.loss(batch)
        self.step_examples(batch)
        return None

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """Mean over the examples, with their share of the regularization."""

    @abstractmethod
    def step_examples(self, batch: Any) -> None:
        """Step the parameters in place, one example after the other."""


def array(tensor: Tensor) -> Any:
    """A numpy array over the memory of the tensor."""
    return tensor.detach().numpy()
