"""All optimizers of a module, stepped with what the workers have pushed."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from hybridtrain.errors import UserError
from hybridtrain.messages import Push
from hybridtrain.update.contribution import Contribution
from hybridtrain.update.update import Update


class OptimizerFailed(UserError):
    """An optimizer's own code raised; ``__cause__`` is what it raised."""


class Optimizers:
    """The module's optimizers, by number.

    Args:
        updates: in the order in which ``configure_optimizers`` has returned them.
    """

    def __init__(self, updates: Sequence[Update] = ()) -> None:
        self._updates = list(updates)

    def objection(self, worker: int, push: Push) -> str | None:
        """Why this push cannot be served, if so."""
        number = push.optimizer
        if not 0 <= number < len(self._updates):
            return f"worker {worker} steps optimizer {number}, but {len(self._updates)} are known"
        n_groups = self._updates[number].n_groups
        if push.groups is not None and len(push.groups) != n_groups:
            return (
                f"optimizer {number} has {len(push.groups)} parameter groups now, but had "
                f"{n_groups} when training began; add_param_group during training is not "
                "supported: give the optimizer all groups in configure_optimizers, and let a group "
                "rest with lr=0"
            )
        return None

    def step(self, pushes: Mapping[int, Push]) -> tuple[int, ...]:
        """Apply one round's pushes, all for one optimizer; returns the workers that counted.

        Those that abstain have no share, but the hyper-parameters they tell do count: a worker
        tells a change only once. A single veto leaves the step out.
        """
        told = [push.groups for push in pushes.values() if push.groups is not None]
        vetoed = any(push.veto for push in pushes.values())
        counted = {w: push for w, push in pushes.items() if push.weight > 0 and not vetoed}
        number = next(iter(pushes.values())).optimizer
        with torch.no_grad(), self._naming(number):
            if told:
                self._updates[number].set_groups(told[0])
            if counted:
                clip = next(iter(counted.values())).clip
                self._updates[number].step(_contributions(counted), clip)
        return tuple(counted)

    @contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        """Say which optimizer it was that has raised."""
        try:
            yield
        except Exception as error:
            who = f"optimizer {number} ({self._updates[number].name})"
            error.add_note(f"This happened in the process that holds the parameters, in {who}.")
            raise OptimizerFailed(f"{who} raised {type(error).__name__}: {error}") from error

    def dump(self) -> bytes:
        """Each optimizer's state per parameter, as ``torch.save`` writes it."""
        buffer = io.BytesIO()
        torch.save([update.state() for update in self._updates], buffer)
        return buffer.getvalue()


def _contributions(pushes: Mapping[int, Push]) -> list[Contribution]:
    """Everybody's share by samples, or one row for all where gradients are averaged already."""
    if all(push.averaged for push in pushes.values()):
        worker, push = next(iter(pushes.items()))
        return [Contribution(worker, 1.0, frozenset(push.absent))]
    total = sum(push.weight for push in pushes.values())
    return [
        Contribution(worker, push.weight / total, frozenset(push.absent))
        for worker, push in pushes.items()
    ]
