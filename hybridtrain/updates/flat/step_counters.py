"""Step counts, shared by parameters that have always been stepped together.

Torch counts the steps of each parameter. Nearly always all of a parameter group have the same
count, so it is kept once per *count group*. A step without gradients for some of a group splits it
permanently.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from hybridtrain.updates.kernels import Figures


@dataclass(eq=False, slots=True)
class StepCountGroup:
    """Parameters of one parameter group, by their index in the optimizer."""

    group: int
    members: list[int]
    figures: Figures
    begun: bool = False  # its members have state

    def split_off(self, leaving: Collection[int]) -> StepCountGroup:
        """Move these members to a new group."""
        self.members = [index for index in self.members if index not in leaving]
        figures = {name: figure.clone() for name, figure in self.figures.items()}
        return StepCountGroup(self.group, sorted(leaving), figures, self.begun)


class StepCountGroups:
    """The count groups of an optimizer.

    Args:
        begun: each parameter's group, its figures, and whether it has state.
    """

    def __init__(self, begun: Iterable[tuple[int, Figures, bool]]) -> None:
        self.of: list[StepCountGroup] = []  # by parameter
        known: dict[object, StepCountGroup] = {}
        for index, (group, figures, kept) in enumerate(begun):
            key = group, kept, tuple((f.dtype, f.item()) for f in figures.values())
            count_group = known.setdefault(key, StepCountGroup(group, [], figures, kept))
            count_group.members.append(index)
            self.of.append(count_group)

    @property
    def all(self) -> list[StepCountGroup]:
        """All count groups, in the order of their first parameters."""
        return list(dict.fromkeys(self.of))

    def take_over(self, groups: Iterable[StepCountGroup]) -> None:
        """Replace all count groups."""
        for group in groups:
            for index in group.members:
                self.of[index] = group

    def part(self, moving: Collection[int]) -> bool:
        """Split groups of which only some members are stepped; whether any was split."""
        leaving: dict[StepCountGroup, list[int]] = {}
        for index in moving:
            leaving.setdefault(self.of[index], []).append(index)
        split = {c: set(some) for c, some in leaving.items() if len(some) < len(c.members)}
        for count_group, some in split.items():
            fresh = count_group.split_off(some)
            for index in fresh.members:
                self.of[index] = fresh
        return bool(split)


def scalar(value: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A new figure, (); a saved one keeps its precision."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().cpu().clone()
    return torch.tensor(float(value), dtype=dtype)
