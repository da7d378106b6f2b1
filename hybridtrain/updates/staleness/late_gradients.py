"""Applies the chosen correction to stale gradients before an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from hybridtrain.memory import Store
from hybridtrain.updates.base import Contribution
from hybridtrain.updates.groups import Members, numbers_of
from hybridtrain.updates.staleness.correction import Correction, Late


class LateGradients:
    """Applies a correction to the workers' rows.

    Args:
        correction: the correction, if any.
        age: updates since a worker read the parameters.
    """

    def __init__(
        self, correction: Correction | None = None, age: Callable[[int], int] = lambda worker: 0
    ) -> None:
        self._correction, self.age = correction, age
        self._store: Store | None = None

    def begun(self, store: Store | None) -> LateGradients:
        """Itself, from now on with this store.

        Raises:
            UserError: if these parameters cannot be corrected.
        """
        # Where all workers read the masters in place no gradient is stale.
        if self._correction is None or store is None or not store.private_parameters:
            return self
        if store is not self._store:
            self._correction.begin(store)
            self._store = store
        return self

    @property
    def active(self) -> bool:
        """Whether a correction is applied."""
        return self._store is not None

    def correct(self, contribution: Contribution, members: Members) -> float:
        """Correct the gradient in its row; returns the factor of its weight."""
        if self._correction is None or self._store is None:
            return 1.0
        age = self.age(contribution.worker)
        self._correction.correct(Late(contribution, age, numbers_of(members), self._store))
        return self._correction.factor(age)

    def watch(
        self, merged: Sequence[Contribution], members: Members
    ) -> AbstractContextManager[None]:
        """A context around the step with these contributions."""
        if self._correction is None or self._store is None:
            return nullcontext()
        numbers = numbers_of(members)
        return self._correction.watch([Late(each, 0, numbers, self._store) for each in merged])
