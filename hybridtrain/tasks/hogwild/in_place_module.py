"""Base of the three problems: steps and learning rates."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Annotated, Any, Literal

from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from hybridtrain.tasks.shared_tables import CompiledSteps, MakeOptimizer, check_size
from hybridtrain.util.option_types import Above0, Range, typed


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

    def check_size(self, rows: int, width: int) -> None:
        """Check that a float32 table fits into memory; one large number in the data sets its rows.

        Raises:
            UserError: if it does not.
        """
        advice = "number them from 0 without gaps, or give fewer workers"
        what = f"tables of {rows:,} rows, one more than the largest number in the data,"
        check_size(4 * rows * width, self.workers, what, advice)

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
