"""A worker's handle on the server's optimizer state, valid until the server next changes it.

The state lies in shared memory (:mod:`hybridtrain.engine.updates.flat.lent_state`); the
hyper-parameters are those of the worker's own optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch

from hybridtrain.engine.memory import Arena, Store
from hybridtrain.engine.memory.arena import LentState
from hybridtrain.engine.protocol.messages import Changes, Clip, GradientPush, Push
from hybridtrain.engine.updates.base import Contribution, StepInput
from hybridtrain.engine.updates.flat.lent_state import LentFlatUpdate, borrow
from hybridtrain.engine.updates.groups import Groups, plain

Found = Callable[[int], tuple[LentState, dict[int, Arena]] | None]
SteppedOptimizers = Callable[[], Sequence[tuple[torch.optim.Optimizer, tuple[int, ...]]]]


class BorrowedUpdate:
    """The flat update of the module's only optimizer.

    Args:
        store: the shared rows.
        stepped: returns the optimizers, each with the slot numbers of its parameters.
        found: requests the places of an optimizer's state.
    """

    def __init__(self, store: Store, stepped: SteppedOptimizers, found: Found) -> None:
        self.never = False  # the server does not lend it
        self._store, self._stepped, self._found = store, stepped, found
        self._lent: LentFlatUpdate | None = None
        self._begun = False  # the server has made a step

    def begin(self) -> None:
        """The server has new optimizers."""
        self._lent, self._begun, self.never = None, False, False

    def server_steps(self) -> None:
        """The server makes this step; the state exists after its first one."""
        self._begun = True

    def give_up(self) -> None:
        """The server may replace the state: request it again."""
        self._lent = None

    @property
    def is_here(self) -> bool:
        """Whether the state is mapped."""
        return self._lent is not None

    def ready(self) -> bool:
        """Fetch the state if necessary; False if it cannot be shared."""
        if self._lent is None and self._begun and not self.never:
            now = self._stepped()
            state = self._found(0) if len(now) == 1 else None
            self._lent = None if state is None else borrow(*now[0], self._store, *state)
            self.never = self._lent is None
        return self._lent is not None

    @property
    def lent(self) -> LentFlatUpdate:
        """The mapped update, after ``ready``."""
        assert self._lent is not None, "it is ready"
        return self._lent

    def takes(self, groups: Groups | None) -> bool:
        """Set these hyper-parameters; False if they need another state."""
        return groups is None or self.lent.set_groups(groups)

    def groups(self) -> Groups:
        """The hyper-parameters of this worker's optimizer."""
        (optimizer, _), *_ = self._stepped()
        return plain(optimizer)

    @torch.no_grad()
    def step(self, contributions: Sequence[Contribution], clip: Clip | None) -> None:
        """Step as the server does, with denormal numbers."""
        torch.set_flush_denormal(False)
        try:
            self.lent.update.step(StepInput(contributions, clip))
        finally:
            torch.set_flush_denormal(True)


def is_plain(push: Push) -> TypeGuard[GradientPush]:
    """Whether the push is a whole gradient without anything else for the server."""
    if not isinstance(push, GradientPush):
        return False
    number, weight, changes = push.optimizer, push.weight, Changes(push.changes.groups)
    plain = GradientPush(number, weight, changes=changes, samples=push.samples, clip=push.clip)
    return weight > 0 and push == plain
