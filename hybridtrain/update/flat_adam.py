"""Adam and AdamW on flat memory: mean of the rows and update in one cache-sized pass.

Per chunk of 256 Ki elements: add the workers' rows into a scratch that stays in the cache, then let
``torch._fused_adam_``, the engine of ``Adam(fused=True)``, step the chunk. Each byte of gradient,
parameter and moment crosses the memory bus once per update. Chunks are independent, so idle cores
share them. The bits equal those of ``Adam(fused=True)`` on the mean gradient, except in the odd
elements at a parameter's end (fewer than 16): torch steps those in a scalar loop that rounds in
another order, while here the padding makes a whole vector of them.

Legend: P elements of one dtype's buffer (padding included), n elements of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hybridtrain.memory import Arena, Store
from hybridtrain.memory.arena import align
from hybridtrain.messages import Clip
from hybridtrain.update.contribution import Contribution
from hybridtrain.update.evaluation import Evaluation
from hybridtrain.update.groups import Groups, members_of, plain, slowed
from hybridtrain.update.merge import merge
from hybridtrain.update.pool import Pool
from hybridtrain.update.saved import Saved
from hybridtrain.update.update import clip_factor

CHUNK = 256 * 1024  # elements: rows, scratch, parameters and moments of a chunk fit the cache


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Whole cache lines that move by the same step count and hyper-parameters."""

    group: int
    start: int
    stop: int
    absent_in: frozenset[int]  # workers whose rows must not be read here


@dataclass(frozen=True, slots=True)
class _Task:
    """One chunk of one stretch."""

    stretch: _Stretch
    start: int
    stop: int
    step: torch.Tensor  # () fp32, the step count after this update


class FlatAdam:
    """Fused Adam over one float32 buffer.

    Args:
        optimizer: the user's ``Adam`` or ``AdamW`` over views of the masters, perhaps with state.
        numbers: the slot number of each of its parameters, group by group.
        store: the shared rows.
        pool: who does the arithmetic.
    """

    under_way = False  # a step takes one round
    news: Groups | None = None  # nor does it change hyper-parameters

    def __init__(
        self, optimizer: torch.optim.Optimizer, numbers: Sequence[int], store: Store, pool: Pool
    ) -> None:
        self.name = type(optimizer).__name__
        self.members = members_of(optimizer, numbers)
        self._optimizer = optimizer  # the state that it holds is of parameters that have left it
        self._store, self._pool, self._numbers = store, pool, tuple(numbers)
        self._groups = [dict(group) for group in plain(optimizer)]
        self._group_of = [
            index for index, group in enumerate(optimizer.param_groups) for _ in group["params"]
        ]
        self._steps = [0] * len(self._numbers)
        self._scratch = [torch.empty(CHUNK) for _ in range(pool.size)]
        self._moments = self._make_moments()
        self._load(optimizer)

    def _make_moments(self) -> dict[str, torch.Tensor]:
        """Moments for the whole buffer, (P,) each, in an arena of their own."""
        size = self._store.layout.sizes[torch.float32]
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * self._groups[0]["amsgrad"]
        stride = align(size * 4)
        self._arena = Arena.create(stride * len(names))
        return {
            name: self._arena.tensor(i * stride, size, torch.float32)
            for i, name in enumerate(names)
        }

    def _load(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over the state that the user's optimizer brings along (a resumed run)."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            state = optimizer.state.pop(parameter, None)
            if not state:
                continue
            self._steps[index] = int(state["step"])
            for name, flat in self._moments.items():
                self._moment(flat, index).copy_(state[name])

    def _moment(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        slot = self._store.layout.slots[self._numbers[index]]
        return flat.as_strided(slot.shape, slot.stride, slot.offset)

    # ---- one update -----------------------------------------------------------------------------

    def step(
        self,
        contributions: Sequence[Contribution],
        clip: Clip | None,
        evaluation: Evaluation | None = None,
        rate: float = 1.0,
    ) -> None:
        tasks = self._tasks(contributions)
        transform = self._clipping(tasks, contributions, clip)
        with slowed(self._groups, rate):
            self._pool.map(
                lambda lane, task: self._step_chunk(lane, task, contributions, transform), tasks
            )

    def _tasks(self, contributions: Sequence[Contribution]) -> list[_Task]:
        """Cut what this update touches into chunks, and count the step of each parameter once."""
        tasks: list[_Task] = []
        counts: dict[int, torch.Tensor] = {}
        for stretch, count in self._stretches(contributions):
            step = counts.setdefault(count, torch.tensor(float(count)))
            tasks += [
                _Task(stretch, start, min(start + CHUNK, stretch.stop), step)
                for start in range(stretch.start, stretch.stop, CHUNK)
            ]
        return tasks

    def _stretches(self, contributions: Sequence[Contribution]) -> list[tuple[_Stretch, int]]:
        """Join neighbours of one group with equal step counts and equal contributors."""
        found: list[tuple[_Stretch, int]] = []
        for index, number in enumerate(self._numbers):
            absent = frozenset(c.worker for c in contributions if number in c.absent)
            if len(absent) == len(contributions):
                continue
            self._steps[index] += 1
            slot, group = self._store.layout.slots[number], self._group_of[index]
            stop = slot.offset + align(slot.numel * 4) // 4
            stretch = _Stretch(group, slot.offset, stop, absent)
            if found and self._continues(found[-1], stretch, self._steps[index]):
                stretch = _Stretch(group, found.pop()[0].start, stretch.stop, absent)
            found.append((stretch, self._steps[index]))
        return found

    @staticmethod
    def _continues(last: tuple[_Stretch, int], stretch: _Stretch, count: int) -> bool:
        before, counted = last
        return (
            counted == count
            and before.group == stretch.group
            and before.absent_in == stretch.absent_in
            and before.stop == stretch.start
        )

    def _step_chunk(
        self,
        lane: int,
        task: _Task,
        contributions: Sequence[Contribution],
        transform: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        gradient = self._merged(lane, task, contributions)
        if transform is not None:
            gradient = transform(gradient)
        group, part = self._groups[task.stretch.group], slice(task.start, task.stop)
        moments = {name: [flat[part]] for name, flat in self._moments.items()}
        beta1, beta2 = group["betas"]
        decoupled = group.get("decoupled_weight_decay", False)
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        kernel(
            [self._store.masters[torch.float32][part]],
            [gradient],
            moments["exp_avg"],
            moments["exp_avg_sq"],
            moments.get("max_exp_avg_sq", []) if group["amsgrad"] else [],
            [task.step],
            amsgrad=group["amsgrad"],
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    def _merged(
        self, lane: int, task: _Task, contributions: Sequence[Contribution]
    ) -> torch.Tensor:
        """The mean gradient of the chunk, (n,); those without a gradient count as zeros."""
        part = slice(task.start, task.stop)
        present = [c for c in contributions if c.worker not in task.stretch.absent_in]
        rows = [self._store.gradients[c.worker][torch.float32][part] for c in present]
        shares = [c.share for c in present]
        return merge(rows, shares, self._scratch[lane][: task.stop - task.start])

    # ---- clipping: the global norm needs all chunks before the first may be stepped -------------

    def _clipping(
        self, tasks: list[_Task], contributions: Sequence[Contribution], clip: Clip | None
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        if clip is None or not tasks:
            return None
        limit = clip.limit
        if clip.algorithm == "value":
            return lambda gradient: gradient.clamp(-limit, limit)
        partial = self._pool.map(
            lambda lane, task: torch.linalg.vector_norm(self._merged(lane, task, contributions)),
            tasks,
        )
        factor = clip_factor(torch.linalg.vector_norm(torch.stack(partial)), limit)
        return None if factor == 1.0 else lambda gradient: gradient * factor

    # ---- state ----------------------------------------------------------------------------------

    def set_groups(self, groups: Groups) -> None:
        for own, new in zip(self._groups, groups, strict=True):
            own.update(new)

    def state(self) -> Saved:
        states = {
            self._numbers[index]: {"step": torch.tensor(float(count))}
            | {name: self._moment(flat, index).clone() for name, flat in self._moments.items()}
            for index, count in enumerate(self._steps)
            if count > 0
        }
        return Saved(states, groups=tuple(self._groups))

    def hand_over(self) -> tuple[torch.optim.Optimizer, dict[int, torch.nn.Parameter]]:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        numbered = dict(zip(self._numbers, parameters, strict=True))
        for number, state in self.state().parameters.items():
            self._optimizer.state[numbered[number]] = state
        return self._optimizer, numbered

    def close(self) -> None:
        """The moments go with the last reference."""
