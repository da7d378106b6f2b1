"""Optimizers that call their closure several times per step: L-BFGS, SAM, a user's own.

Theory of operation. ``optimizer.step(closure)`` runs on a thread that takes turns with the server.
The closure's first call returns the gradients that the workers have just pushed, if the parameters
have not moved since; each further call suspends the step until the workers have evaluated at the
current parameters. Losses are averaged like gradients, so the optimizer sees the same numbers as in
a single process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from hybridtrain.memory import Store
from hybridtrain.updates.base import Again, Contribution, Evaluation
from hybridtrain.updates.optimizer_traits import is_torchs
from hybridtrain.updates.per_tensor import PerTensorUpdate
from hybridtrain.util.turn_taking import Asked, TurnTaking


class ClosureOptimizer(PerTensorUpdate):
    """Runs ``optimizer.step(closure)`` over several rounds.

    Args:
        optimizer: over views of the masters, in host memory.
        numbers: the slot number of each of its parameters, group by group.
        store: the shared rows.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, numbers: Sequence[int], store: Store
    ) -> None:
        super().__init__(optimizer, numbers, store)
        self._turns = TurnTaking()
        self.under_way = False
        self._before: list[torch.Tensor] = []
        # L-BFGS calls its closure first; others may move the parameters before.
        self._may_move_first = not is_torchs(optimizer)

    def _mean(self, index: int, contributions: Sequence[Contribution]) -> torch.Tensor | None:
        """A copy: the optimizer may keep one evaluation's gradient beside the next."""
        gradient = super()._mean(index, contributions)
        lone = len(contributions) == 1  # then it may be the worker's row
        return gradient.clone() if lone and gradient is not None else gradient

    def _gradient_memory(self, index: int) -> torch.Tensor:
        if not self.under_way:
            return super()._gradient_memory(index)
        return torch.empty_like(self._parameters[index])

    def _advance(self, evaluation: Evaluation) -> Again | None:
        if self.under_way:
            turn = self._turns.answer(evaluation)
        else:
            turn = self._turns.start(partial(self._run, evaluation))
        self.under_way = isinstance(turn, Asked)
        if isinstance(turn, Asked):
            return Again(cleared=turn.question)
        if turn.error is not None:
            raise turn.error
        return None

    # ---- on the other thread --------------------------------------------------------------------

    def _run(self, evaluation: Evaluation) -> None:
        """One complete step of the user's optimizer."""
        before = self._remember() if self._may_move_first else []
        fresh = evaluation.loss is not None

        def closure() -> torch.Tensor | None:
            nonlocal fresh
            used, fresh = fresh, False
            if not evaluation.repeatable or (used and self._unmoved(before)):
                return _as_tensor(evaluation.loss)
            answer: Evaluation = self._turns.ask(self._cleared())
            return _as_tensor(answer.loss)

        self._optimizer.step(closure)  # type: ignore[arg-type]

    def _remember(self) -> list[torch.Tensor]:
        """A copy of the parameters, in reused memory."""
        self._before = self._before or [torch.empty_like(p) for p in self._parameters]
        if self._before:  # Lightning's mock optimizer has no parameters
            torch._foreach_copy_(self._before, self._parameters)
        return self._before

    def _unmoved(self, before: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, before, self._parameters))

    def _cleared(self) -> bool:
        return not any(p.grad is not None and bool(p.grad.any()) for p in self._parameters)

    def close(self) -> None:
        self._turns.close()


def _as_tensor(loss: float | None) -> torch.Tensor | None:
    return None if loss is None else torch.tensor(loss, dtype=torch.float64)
