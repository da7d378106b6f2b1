"""A store with rows to fill, and what a single process would do with the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hybridtrain.engine.memory import Layout, Store
from hybridtrain.engine.protocol.messages import Clip
from hybridtrain.engine.updates import build_update
from hybridtrain.engine.updates.base import Contribution, StepInput, Update
from hybridtrain.engine.updates.groups import slowed
from hybridtrain.engine.updates.thread_pool import Pool

Make = Callable[[list[list[torch.nn.Parameter]]], torch.optim.Optimizer]
Gradients = list[list[torch.Tensor | None]]  # worker × parameter


@dataclass
class Pair:
    """The same parameters twice: as masters of an update, and under torch's own optimizer."""

    store: Store
    update: Update
    alone: list[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    shares: list[float]
    version: int = 0  # updates so far

    def gradients(self, generator: torch.Generator, scale: float = 1.0) -> Gradients:
        return [
            [
                scale * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
                for p in self.alone
            ]
            for _ in self.shares
        ]

    def step(self, gradients: Gradients, clip: Clip | None = None, rate: float = 1.0) -> None:
        """One update of the masters, and one step of torch's optimizer on the mean gradient."""
        slots = self.store.layout.slots
        contributions = []
        for worker, share in enumerate(self.shares):
            absent = {n for n, gradient in enumerate(gradients[worker]) if gradient is None}
            for number, gradient in enumerate(gradients[worker]):
                row = self.store.gradient(worker, slots[number])
                row.copy_(gradient) if gradient is not None else row.fill_(torch.nan)
            contributions.append(Contribution(worker, share, frozenset(absent)))
        with torch.no_grad():
            self.update.step(StepInput(contributions, clip, rate=rate, version=self.version))
        self.version += 1
        for number, parameter in enumerate(self.alone):
            parameter.grad = self.mean([row[number] for row in gradients])
        if clip is not None and clip.algorithm == "norm":
            torch.nn.utils.clip_grad_norm_(self.alone, clip.limit)
        elif clip is not None:
            torch.nn.utils.clip_grad_value_(self.alone, clip.limit)
        with slowed(self.optimizer.param_groups, rate):
            self.optimizer.step()

    def mean(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Σ share · gradient in the order of the workers; those without one count as zeros."""
        present = [(g, s) for g, s in zip(gradients, self.shares, strict=True) if g is not None]
        if not present:
            return None
        total = present[0][0] * present[0][1]
        for gradient, share in present[1:]:
            total.add_(gradient, alpha=share)
        return total

    def masters(self) -> list[torch.Tensor]:
        return [self.store.master(slot).clone() for slot in self.store.layout.slots]

    def assert_equal(self, rtol: float = 0.0) -> None:
        for slot, mine, theirs in zip(
            self.store.layout.slots, self.masters(), self.alone, strict=True
        ):
            torch.testing.assert_close(
                mine, theirs.detach(), rtol=rtol, atol=rtol, msg=lambda m, s=slot: f"{s.name}: {m}"
            )


def make_pair(
    make: Make,
    shapes: Sequence[Sequence[tuple[int, ...]]],
    shares: Sequence[float] = (0.5, 0.5),
    dtype: torch.dtype = torch.float32,
    lanes: int = 1,
    state_dtype: torch.dtype = torch.float32,
) -> Pair:
    """``shapes``: those of the parameters, group by group. ``make``: the optimizer over them."""
    generator = torch.Generator().manual_seed(7)
    groups = [
        [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in group]
        for group in shapes
    ]
    alone = [p for group in groups for p in group]
    store = Store(Layout.of((f"p{n}", p) for n, p in enumerate(alone)), len(shares), False)
    masters = []
    for slot, parameter in zip(store.layout.slots, alone, strict=True):
        store.master(slot).copy_(parameter.detach())
        masters.append(torch.nn.Parameter(store.master(slot)))
    remaining = iter(masters)
    mirrored = [[next(remaining) for _ in group] for group in groups]
    numbers, pool = range(len(alone)), Pool(lanes)
    update = build_update(make(mirrored), numbers, store, pool, state_dtype=state_dtype)
    return Pair(store, update, alone, make(groups), list(shares))
