"""What steps the masters, as the server has it, in a worker: borrowed, and given up again.

The state lies where all can map it (:mod:`hybridtrain.updates.flat.lent_state`); the
hyper-parameters are those of the worker's own optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hybridtrain.memory import Arena, Store
from hybridtrain.memory.lending import LentState
from hybridtrain.protocol.messages import Clip, Push
from hybridtrain.updates.contribution import Contribution
from hybridtrain.updates.flat.lent_state import LentFlatUpdate, borrow
from hybridtrain.updates.groups import Groups

Found = Callable[[int], tuple[LentState, dict[int, Arena]] | None]
Stepped = Callable[[], Sequence[tuple[torch.optim.Optimizer, tuple[int, ...]]]]


class BorrowedUpdate:
    """Of the module's only optimizer.

    Args:
        store: the shared rows.
        stepped: the optimizers, each with the slot numbers of its parameters.
        found: where the state of one lies.
    """

    def __init__(self, store: Store, stepped: Stepped, found: Found) -> None:
        self.never = False  # it is not to be had
        self._store, self._stepped, self._found = store, stepped, found
        self._lent: LentFlatUpdate | None = None
        self._begun = False  # the server has made a step

    def begin(self) -> None:
        """The server has got other optimizers."""
        self._lent, self._begun, self.never = None, False, False

    def server_steps(self) -> None:
        """The server makes this step, and what the first one keeps is there behind it."""
        self._begun = True

    def give_up(self) -> None:
        """What the server lends may be another from now on."""
        self._lent = None

    @property
    def is_here(self) -> bool:
        """Whether it need not be asked for."""
        return self._lent is not None

    def ready(self) -> bool:
        """Whether it is here, once it has been asked for."""
        if self._lent is None and self._begun and not self.never:
            now = self._stepped()
            state = self._found(0) if len(now) == 1 else None
            self._lent = None if state is None else borrow(*now[0], self._store, *state)
            self.never = self._lent is None
        return self._lent is not None

    @property
    def lent(self) -> LentFlatUpdate:
        """It is ready."""
        assert self._lent is not None, "it is ready"
        return self._lent

    def takes(self, groups: Groups | None) -> bool:
        """Whether the state is the same with these hyper-parameters; they are known then."""
        return groups is None or self.lent.set_groups(groups)

    @torch.no_grad()
    def step(self, contributions: Sequence[Contribution], clip: Clip | None) -> None:
        """As the server would, denormal numbers included."""
        torch.set_flush_denormal(False)
        try:
            self.lent.update.step(contributions, clip)
        finally:
            torch.set_flush_denormal(True)


def is_usual(push: Push) -> bool:
    """Whether it is a whole gradient, and nothing else is to be said."""
    number, weight, samples = push.optimizer, push.weight, push.samples
    plain = Push(number, weight, groups=push.groups, clip=push.clip, samples=samples)
    return weight > 0 and push == plain
