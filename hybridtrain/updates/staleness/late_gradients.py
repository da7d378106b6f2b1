"""Late gradients on their way into an update: corrected, if that is wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from hybridtrain.memory import Store
from hybridtrain.updates.contribution import Contribution
from hybridtrain.updates.groups import Members
from hybridtrain.updates.staleness.correction import Correction, Late


class LateGradients:
    """Applies a correction to the workers' rows.

    Args:
        correction: what is to be done, or nothing.
        age: updates since a worker has read the parameters.
    """

    def __init__(
        self, correction: Correction | None = None, age: Callable[[int], int] = lambda worker: 0
    ) -> None:
        self._correction, self._age = correction, age
        self._store: Store | None = None

    def begun(self, store: Store | None) -> LateGradients:
        """Itself; from now on these are the rows, the masters, and what the workers have read.

        Raises:
            UserError: if these parameters cannot be corrected.
        """
        # Where all read the masters in place nothing is ever late.
        late = self._correction is not None and store is not None and store.private_parameters
        if late and store is not self._store:
            assert self._correction is not None and store is not None
            self._correction.begin(store)
            self._store = store
        return self

    def staleness(self, worker: int) -> int:
        """Updates since the worker has read the parameters."""
        return self._age(worker)

    @property
    def active(self) -> bool:
        """Whether contributions count for more or less than they weigh."""
        return self._correction is not None and self._store is not None

    def correct(self, contribution: Contribution, members: Members) -> float:
        """Change the gradient in its row; returns the factor that it counts with."""
        if self._correction is None or self._store is None:
            return 1.0
        age = self._age(contribution.worker)
        self._correction.correct(Late(contribution, age, _numbers(members), self._store))
        return self._correction.factor(age)

    def watch(
        self, merged: Sequence[Contribution], members: Members
    ) -> AbstractContextManager[None]:
        """Around the step that is made of these contributions."""
        if self._correction is None or self._store is None:
            return nullcontext()
        numbers = _numbers(members)
        return self._correction.watch([Late(each, 0, numbers, self._store) for each in merged])


def _numbers(members: Members) -> list[int]:
    return [number for group in members for number in group]
