"""An optimizer that workers step themselves, without a lock, on shared state (Hogwild!).

Theory of operation. An optimizer creates a parameter's state in its first step. So the server steps
with the first gradient of a parameter, and moves the new state to memory that the workers map. From
then on each worker steps with its own optimizer object on that memory (Niu et al. 2011,
arXiv:1106.5730). The server still adds parameters and replaces state, in the same memory. It also
counts the steps, and gives every worker its own number: two workers that increment a shared counter
at the same time would count once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from hybridtrain.engine.memory import Store
from hybridtrain.engine.memory.arena import SharedState, TensorPlace
from hybridtrain.engine.updates.base import Again, StepInput
from hybridtrain.engine.updates.per_tensor import PerTensorUpdate
from hybridtrain.errors import UserError

STEP = "step"  # torch's name for the number of steps of a parameter
_INSTEAD = "use SGD, Adam, AdamW, Adagrad or RMSprop, or strategy=async"


class SharedStateOptimizer(PerTensorUpdate):
    """The user's optimizer over the masters, with its state in memory that workers map.

    Args:
        optimizer: over views of the masters, perhaps with state.
        numbers: the slot number of each of its parameters, group by group.
        store: the shared rows.

    Raises:
        UserError: if its state cannot be shared without a lock.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, numbers: Sequence[int], store: Store
    ) -> None:
        super().__init__(optimizer, numbers, store)
        assert store.step_counts is not None, "a store without a lock counts the workers' steps"
        self._lending, self._steps = store.lending, store.step_counts
        self._counts = dict.fromkeys(self._numbers, 0)
        self._made = self._steps.told
        self._steps.look()
        self._begun: set[int] = set()  # numbers of parameters whose state is complete
        self.lent = SharedState()
        self._lend()

    def step(self, given: StepInput) -> Again | None:
        self.settle()
        again = super().step(given)
        if self.news is not None:
            raise UserError(
                f"{self._who} keeps figures in its parameter groups that it changes by itself "
                f"({', '.join(sorted({k for group in self.news for k in group}))}); {_INSTEAD}"
            )
        self._made += 1
        absent = [each.absent for each in given.contributions]
        self._begun |= set(self._numbers) - frozenset.intersection(*absent)
        self._lend()
        return again

    def number_step(self, absent: Collection[int]) -> int | dict[int, int]:
        """Count a step that a worker makes, of all parameters but the ``absent``.

        Returns the counts before: one number if all are equal, else by slot number.
        """
        before = dict(self._counts)
        for number in before.keys() - set(absent) if absent else before:
            self._counts[number] += 1
        self._made += 1
        if absent and self.lent.offset is not None:
            self.lent = replace(self.lent, generation=self._lending.next_generation(), offset=None)
        counts = set(before.values())
        return counts.pop() if len(counts) == 1 else before

    @property
    def _offset(self) -> int | None:
        counts = set(self._counts.values())
        return counts.pop() - self._made if len(counts) == 1 else None

    # ---- what is lent ---------------------------------------------------------------------------

    @property
    def _who(self) -> str:
        return f"optimizer {self.name} was given to workers that step it without a lock, but it"

    def _lend(self) -> None:
        """Move new state tensors to memory that workers can map."""
        self._check_keys()
        steps: dict[int, Any] = {}
        plain: dict[int, dict[str, Any]] = {number: {} for number in self._begun}
        found: list[tuple[int, str, torch.Tensor]] = []
        for number, state in self._states():
            plain[number] = {}
            for key, value in state.items():
                if key == STEP:
                    steps[number] = value
                    self._counts[number] = int(value) - self._steps.ahead
                elif isinstance(value, torch.Tensor):
                    self._check_tensor(number, key, value)
                    found.append((number, key, value))
                elif value is None or isinstance(value, bool | str):
                    plain[number][key] = value
                else:
                    self._refuse(key, f"a {type(value).__name__}")
        places = self._placed(found)
        old, offset = self.lent, self._offset
        known = (old.places, old.steps.keys(), old.plain, old.offset)
        if (places, steps.keys(), plain, offset) != known:
            self.lent = SharedState(self._lending.next_generation(), places, steps, plain, offset)

    def _placed(
        self, found: Sequence[tuple[int, str, torch.Tensor]]
    ) -> dict[int, dict[str, TensorPlace]]:
        """The place of each tensor, after new ones have been moved."""
        known = {(n, key): self._known_place(n, key, tensor) for n, key, tensor in found}
        fresh = [(n, key, tensor) for n, key, tensor in found if known[n, key] is None]
        if fresh:
            made = self._lending.put([tensor for _, _, tensor in fresh])
            known |= {(n, key): place for (n, key, _), place in zip(fresh, made, strict=True)}
        placed: dict[int, dict[str, TensorPlace]] = {}
        states = dict(self._states())
        for (number, key), place in known.items():
            assert place is not None, "all have been placed"
            placed.setdefault(number, {})[key] = place
            states[number][key] = place.view(self._lending.arenas)
        return placed

    def _known_place(self, number: int, key: str, tensor: torch.Tensor) -> TensorPlace | None:
        """The tensor's place, if it has one; a tensor that replaces a lent one is copied there."""
        if (place := self._lending.place_of(tensor)) is not None:
            return place
        place = self.lent.places.get(number, {}).get(key)
        if place is None or (place.dtype, place.shape) != (tensor.dtype, tuple(tensor.shape)):
            return None
        place.view(self._lending.arenas).copy_(tensor)
        return place

    def _check_keys(self) -> None:
        own = {id(parameter) for parameter in self._parameters}
        for key in self._optimizer.state:
            if id(key) not in own:
                raise UserError(f"{self._who} keeps state that is of no parameter; {_INSTEAD}")

    def _check_tensor(self, number: int, key: str, value: torch.Tensor) -> None:
        scalar = value.ndim == 0 and self._parameters[self._numbers.index(number)].ndim > 0
        if scalar or value.layout != torch.strided:
            self._refuse(key, "a figure of all steps so far" if scalar else "a sparse tensor")

    def _refuse(self, key: str, what: str) -> None:
        raise UserError(
            f"{self._who} keeps {key!r} for a parameter, {what}, which they cannot share; "
            f"{_INSTEAD}"
        )

    def _states(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Number and state of each parameter that has one."""
        for number, parameter in zip(self._numbers, self._parameters, strict=True):
            if state := self._optimizer.state.get(parameter):
                yield number, state

    def settle(self) -> None:
        """Write the number of steps, those of workers included, to the optimizer's state."""
        self._steps.look()
        for number, state in self._states():
            count, made = state.get(STEP), self._counts[number] + self._steps.ahead
            if isinstance(count, torch.Tensor):
                count.fill_(made)
            elif count is not None:
                state[STEP] = type(count)(made)
        super().settle()
