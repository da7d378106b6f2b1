"""The user's own optimizer object on the masters: the general case, for any optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hybridtrain.engine.exchanges.exchange import MergeRule, WorkerGradients, merged, merges
from hybridtrain.engine.memory import Rows, Store, unpack
from hybridtrain.engine.protocol.messages import Clip
from hybridtrain.engine.updates.base import (
    Again,
    Contribution,
    Evaluation,
    SavedOptimizer,
    StepInput,
    Update,
    clip_factor,
)
from hybridtrain.engine.updates.groups import (
    Groups,
    differences,
    is_torchs,
    members_of,
    plain,
    puts_off,
    slowed,
    steps_rows,
)
from hybridtrain.engine.updates.kernels.choice import step_of
from hybridtrain.engine.updates.mean import merge_mixed
from hybridtrain.util.turn_taking import Asked, TurnTaking


class PerTensorUpdate(Update):
    """Steps an optimizer whose parameters are views of the masters.

    Args:
        optimizer: over views of the masters, in host memory.
        numbers: the slot number of each of its parameters, group by group.
        store: the shared rows.
        merge: makes one gradient of the workers'; ``None``: their weighted mean.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        numbers: Sequence[int],
        store: Store,
        merge: MergeRule | None = None,
    ) -> None:
        self.merge = merge
        self.wants_staleness = self.wants_staleness or merge is not None
        self.name = type(optimizer).__name__
        self.sums: bool = getattr(optimizer, "sums", False)
        self.news: Groups | None = None
        self.members = members_of(optimizer, numbers)
        self._optimizer = optimizer
        self._numbers = tuple(numbers)
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        slots = [store.layout.slots[number] for number in self._numbers]
        self._rows = [
            [store.gradient(row, slot) for slot in slots] for row in range(len(store.gradients))
        ]  # W (and the held one) × parameters, each in the parameter's shape
        self._means: dict[int, torch.Tensor] = {}
        self._keeps_figures_in_groups = not is_torchs(optimizer)
        self._steps_rows = steps_rows(optimizer)
        self.puts_off = puts_off(optimizer)

    def step(self, given: StepInput) -> Again | None:
        for parameter, gradient in zip(
            self._parameters, self._gradients(given.contributions), strict=True
        ):
            parameter.grad = gradient
        clip_gradients([p.grad for p in self._parameters if p.grad is not None], given.clip)
        before = plain(self._optimizer) if self._keeps_figures_in_groups else ()
        with slowed(self._optimizer.param_groups, given.rate):
            again = self._advance(given.evaluation)
        if self._steps_rows:
            self.moved = self._touched()
        if self._keeps_figures_in_groups:
            self.news = differences(before, plain(self._optimizer))
        return again

    def _advance(self, evaluation: Evaluation) -> Again | None:
        step_of(self._optimizer)(self._optimizer)
        return None

    def _touched(self) -> dict[int, Rows]:
        """The rows of the sparse gradients of this step."""
        both = zip(self._numbers, self._parameters, strict=True)
        found = {number: p.grad for number, p in both if p.grad is not None and p.grad.is_sparse}
        return {number: gradient.indices()[0].numpy() for number, gradient in found.items()}

    def _gradients(self, contributions: Sequence[Contribution]) -> Iterable[torch.Tensor | None]:
        apart = not any(each.merged for each in contributions)
        if apart and merges(self.merge, len(contributions)):
            parts = [self._part(each) for each in contributions]
            return merged(self.merge, parts, self._parameters)
        return (self._mean(index, contributions) for index in range(len(self._parameters)))

    def _part(self, of: Contribution) -> WorkerGradients:
        """Copies, dense and in the parameters' dtypes."""
        found = (self._gradient(index, of) for index in range(len(self._parameters)))
        gradients = [
            None if gradient is None else gradient.to_dense().to(parameter.dtype, copy=True)
            for gradient, parameter in zip(found, self._parameters, strict=True)
        ]
        return WorkerGradients(of.worker, of.share, of.staleness, gradients)

    def _gradient(self, index: int, contribution: Contribution) -> torch.Tensor | None:
        number, place = self._numbers[index], self._rows[contribution.worker][index]
        if number in contribution.absent:
            return None
        packed = contribution.packed.get(number)
        return place if packed is None else unpack(packed, place)

    def _mean(self, index: int, contributions: Sequence[Contribution]) -> torch.Tensor | None:
        found = [(self._gradient(index, each), each.share) for each in contributions]
        parts = [(gradient, share) for gradient, share in found if gradient is not None]
        if not parts:
            return None
        gradients, shares = zip(*parts, strict=True)
        return merge_mixed(gradients, shares, lambda: self._gradient_memory(index))

    def _gradient_memory(self, index: int) -> torch.Tensor:
        """Memory for the merged gradient."""
        if index not in self._means:
            self._means[index] = torch.zeros_like(self._parameters[index])
        return self._means[index]

    # ---- groups and state -----------------------------------------------------------------------

    def set_groups(self, groups: Groups) -> None:
        for own, new in zip(self._optimizer.param_groups, groups, strict=True):
            own.update(new)

    def settle(self) -> None:
        if self.puts_off:
            catching_up: Any = self._optimizer
            catching_up.catch_up()

    def state(self) -> SavedOptimizer:
        self.settle()
        whole = dict(self._optimizer.state_dict())
        groups = [
            {k: v for k, v in group.items() if k != "params"}
            for group in whole.pop("param_groups", [])
        ]
        state: Mapping[Any, Any] = whole.pop("state", {})
        indexed = {k: v for k, v in state.items() if isinstance(k, int)}
        return SavedOptimizer(
            {self._numbers[index]: value for index, value in indexed.items()},
            {k: v for k, v in state.items() if k not in indexed},
            tuple(groups),
            whole,
        )

    def release_optimizer(self) -> tuple[torch.optim.Optimizer, dict[int, torch.nn.Parameter]]:
        self.settle()
        return self._optimizer, dict(zip(self._numbers, self._parameters, strict=True))


def clip_gradients(found: Sequence[torch.Tensor], clip: Clip | None) -> None:
    """Clip the gradients in place, by their common norm or by value."""
    gradients = [g._values() if g.is_sparse else g for g in found]
    if clip is None or not gradients:
        return
    if clip.algorithm == "value":
        torch._foreach_clamp_min_(gradients, -clip.limit)
        torch._foreach_clamp_max_(gradients, clip.limit)
        return
    factor = clip_factor(torch.nn.utils.get_total_norm(gradients), clip.limit)
    torch._foreach_mul_(gradients, factor)


# ---- optimizers that call their closure several times per step: L-BFGS, SAM, a user's own -------
# Theory of operation. ``optimizer.step(closure)`` runs on a thread that takes turns with the
# server. The closure's first call returns the gradients that the workers have just pushed, if the
# parameters have not moved since; each further call suspends the step until the workers have
# evaluated at the current parameters. Losses are averaged like gradients, so the optimizer sees the
# same numbers as in a single process.


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

        step_of(self._optimizer)(self._optimizer, closure)

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
