"""All optimizers of a module, stepped with what the workers have pushed."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import torch

from hybridtrain.messages import Push
from hybridtrain.update.contribution import Contribution
from hybridtrain.update.update import Update


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
        tells a change only once.
        """
        told = [push.groups for push in pushes.values() if push.groups is not None]
        counted = {worker: push for worker, push in pushes.items() if push.weight > 0}
        update = self._updates[next(iter(pushes.values())).optimizer]
        if told:
            update.set_groups(told[0])
        if counted:
            with torch.no_grad():
                update.step(_contributions(counted), next(iter(counted.values())).clip)
        return tuple(counted)

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
