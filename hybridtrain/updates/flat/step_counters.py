"""Parameters that have always moved together, and so share all figures that are kept per parameter.

Torch counts the steps of each parameter. Nearly always all of a group have the same count, so it is
kept once per *count group*. When a step leaves out some of a group (they got no gradient) it
splits, for good: groups only ever become smaller.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from hybridtrain.updates.kernels import Figures


@dataclass(eq=False, slots=True)
class StepCountGroup:
    """Parameters of one group, by their place in the optimizer."""

    group: int
    members: list[int]
    figures: Figures
    begun: bool = False  # something is kept for its members

    def split_off(self, leaving: Collection[int]) -> StepCountGroup:
        """A group of its own for these."""
        self.members = [index for index in self.members if index not in leaving]
        figures = {name: figure.clone() for name, figure in self.figures.items()}
        return StepCountGroup(self.group, sorted(leaving), figures, self.begun)


class StepCountGroups:
    """All parameters of an optimizer.

    Args:
        begun: each parameter's group, its figures, and whether something is kept for it.
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
        """Each once, in the order of their first parameters."""
        return list(dict.fromkeys(self.of))

    def take_over(self, groups: Iterable[StepCountGroup]) -> None:
        """These are all there are."""
        for group in groups:
            for index in group.members:
                self.of[index] = group

    def part(self, moving: Collection[int]) -> bool:
        """See that all of a group move, or none; whether any had to be split."""
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
    """A figure of one's own, (); one that has been saved keeps its precision."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().cpu().clone()
    return torch.tensor(float(value), dtype=dtype)
