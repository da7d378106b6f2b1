"""Elementwise optimizers on flat memory: gradient mean and step in one cache-sized pass.

Per chunk: add the workers' rows in a scratch buffer that stays in the cache, then step the chunk
with the optimizer's kernel (:mod:`hybridtrain.engine.updates.kernels`). Each byte of gradient,
parameter and state crosses the memory bus once per update. Idle cores share the independent chunks.
The bits equal those of torch's optimizer on the mean gradient, except in the last elements of a
parameter (fewer than 16): torch steps those in a scalar loop that may round differently, while here
padding completes the vector.

Chunks and their views are planned once per set of absent gradients and cached, so that the Python
cost of a step does not depend on the number of parameters.

Legend: P elements of the buffer (padding included), n elements of a chunk.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from hybridtrain.engine.memory import Store
from hybridtrain.engine.memory.arena import align
from hybridtrain.engine.memory.counters import ChunkProgress
from hybridtrain.engine.memory.limits import check_available
from hybridtrain.engine.protocol.events import Arrivals, NotArrived
from hybridtrain.engine.protocol.messages import Clip
from hybridtrain.engine.updates.base import SavedOptimizer, StepInput, Update, clip_factor
from hybridtrain.engine.updates.flat.chunks import (
    Absent,
    Chunk,
    ChunkPlan,
    NormPiece,
    StepCountGroup,
    StepCountGroups,
    Undo,
    make_plan,
    pieces,
    present_in,
    scalar,
    total,
)
from hybridtrain.engine.updates.flat.state_storage import StateStorage, storage_for
from hybridtrain.engine.updates.groups import Groups, members_of, plain, slowed
from hybridtrain.engine.updates.kernels import Figures, Kernel, StepChunk, scalar_dtype
from hybridtrain.engine.updates.mean import merge
from hybridtrain.engine.updates.thread_pool import Pool
from hybridtrain.errors import UserError

# gradient (n,), scratch (n,) -> clipped gradient
Transform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

T = TypeVar("T")
R = TypeVar("R")

_ALONE = 256 * 1024  # elements below which one thread is as fast as two
_LARGE = 2**25  # elements of a buffer whose norm is computed in longer pieces, with fewer calls
_PLANS = 16  # cached at most: nets that skip layers at random need ever new ones


def private(count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """``count`` tensors of zeros, each (numel,), in one mapping.

    Raises:
        UserError: if the machine has not enough memory.
    """
    if not count * numel:
        return [torch.zeros(numel, dtype=dtype) for _ in range(count)]
    stride = align(numel * dtype.itemsize)
    memory = _mapped(count * stride)
    found = [
        torch.frombuffer(memory, dtype=dtype, count=numel, offset=place * stride)
        for place in range(count)
    ]
    for each in found:
        each.zero_()  # touches the pages now, not during a step
    return found


def _mapped(n_bytes: int) -> mmap.mmap:
    try:
        check_available(n_bytes)
        memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise UserError(
            f"{n_bytes / 2**20:,.0f} MiB of host memory were asked for an optimizer's state, but "
            f"the system refused them ({error.strerror}); use an optimizer that keeps less, "
            "a smaller model, or a machine with more memory"
        ) from error
    with suppress(OSError, AttributeError):  # no huge pages, or not Linux
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class FlatUpdate(Update):
    """One elementwise optimizer on one float32 buffer.

    Args:
        optimizer: the user's, over views of the masters, perhaps with state.
        numbers: the slot number of each of its parameters, group by group.
        store: the shared rows.
        pool: the threads that step.
        kernel: steps a chunk.
        state_dtype: float32, or bfloat16 for state of half the size, rounded stochastically.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        numbers: Sequence[int],
        store: Store,
        pool: Pool,
        kernel: Kernel,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.name, self.can_undo = type(optimizer).__name__, True
        self.members = members_of(optimizer, numbers)
        self._optimizer = optimizer  # its own state is that of parameters that have left it
        self._store, self._pool, self._numbers = store, pool, tuple(numbers)
        self._kernel, self.state_dtype = kernel, state_dtype
        size = store.layout.sizes[torch.float32]
        self._storage: StateStorage = storage_for(state_dtype, size)
        large = size >= _LARGE
        self._piece = kernel.chunk * (8 if large else 1)  # of a norm: independent of the threads
        self._longest = kernel.chunk * max(1, pool.size // 2)  # chunk
        self._groups = [dict(group) for group in plain(optimizer)]
        self._plans: dict[Absent | None, ChunkPlan] = {}
        self._pieces: dict[int, list[NormPiece]] = {}  # by id of a plan, made for its first norm
        self._scratch: list[dict[int, tuple[torch.Tensor, ...]]] = [{} for _ in range(pool.size)]
        self.flats: dict[str, torch.Tensor] = {}  # (P,) each
        self._undo: Undo | None = None
        self._make_flats()
        self.count_groups = StepCountGroups(self._taken_over(optimizer))

    def _make_flats(self) -> None:
        """Allocate the state tensors that the groups need, (P,) each."""
        needed = {name: None for group in self._groups for name in self._kernel.names(group)}
        size = self._store.layout.sizes[torch.float32]
        missing = [name for name in needed if name not in self.flats]
        made = private(len(missing), size, self.state_dtype)
        self.flats |= dict(zip(missing, made, strict=True))

    def is_settled(self, count_group: StepCountGroup) -> bool:
        """Whether the state of these parameters exists, or none is kept."""
        return count_group.begun or not self._kernel.keeps(self._groups[count_group.group])

    def use(self, flats: Mapping[str, torch.Tensor]) -> None:
        """Use these state tensors from now on."""
        self.flats = dict(flats)
        self._forget_plans()

    def _taken_over(self, optimizer: torch.optim.Optimizer) -> list[tuple[int, Figures, bool]]:
        """Copy the state of the user's optimizer (a resumed run) to the flat tensors."""
        found: list[tuple[int, Figures, bool]] = []
        dtype = scalar_dtype()
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                state = optimizer.state.pop(parameter, None) or {}
                kept = {name: value for name, value in state.items() if value is not None}
                for name in self._kernel.names(group):
                    if name in kept:
                        # Torch's momentum of sparse gradients is sparse.
                        self._part(name, len(found)).copy_(kept[name].to_dense())
                names = self._kernel.figures
                figures = {name: scalar(kept.get(name, 0.0), dtype) for name in names}
                found.append((number, figures, bool(kept)))
        return found

    def _part(self, name: str, index: int) -> torch.Tensor:
        """A parameter's view of a state tensor, in its shape."""
        slot = self._store.layout.slots[self._numbers[index]]
        return self.flats[name].as_strided(slot.shape, slot.stride, slot.offset)

    # ---- one update -----------------------------------------------------------------------------

    def step(self, given: StepInput) -> None:
        contributions = given.contributions
        assert not any(c.packed for c in contributions), "sparse gradients need another update"
        plan = self._plan([each.absent for each in contributions])
        if not plan.chunks:
            return
        mean = _Mean([c.worker for c in contributions], [c.share for c in contributions])
        transform = self._clipping(plan, mean, given.clip)
        keep = None if given.arrivals is None else self._keeping(plan)
        with slowed(self._groups, given.rate) if given.rate != 1.0 else nullcontext():
            steps = [self._begin(count_group) for count_group in plan.count_groups]
        self._storage.begin(given.version, min(plan.size, self._chunk_for(plan.size)))
        watched = self._store.progress.watched
        told = ChunkProgress(self._store.progress, plan.stops) if watched else None
        work = partial(self._step_chunk, mean, transform, steps, told)
        if keep is not None and given.arrivals is not None:
            self._step_early(plan, given.arrivals, keep, work)
            return
        # The last chunks of the norm are still in the cache.
        self._map(plan, work, plan.backwards if transform and not watched else plan.chunks)

    def _keeping(self, plan: ChunkPlan) -> Undo:
        if self._undo is None:
            size = self._store.layout.sizes[torch.float32]
            try:
                masters = private(1, size, torch.float32)
                self._undo = Undo(masters + private(len(self.flats), size, self.state_dtype))
            except UserError as error:  # not enough memory: begin when all rows are here
                self.can_undo = False
                raise NotArrived from error
        self._undo.begin(plan.count_groups)
        return self._undo

    def _step_early(
        self, plan: ChunkPlan, arrivals: Arrivals, kept: Undo, work: Callable[[int, Chunk], None]
    ) -> None:
        """Step each chunk when its rows are here."""

        def step(lane: int, chunk: Chunk) -> None:
            arrivals.wait(chunk.start + chunk.size)
            kept.keep(chunk)
            work(lane, chunk)

        try:
            self._map(plan, step, plan.chunks)
        except NotArrived:
            self.undo()
            raise

    def undo(self) -> None:
        assert self._undo is not None, "only early steps are undone"
        self._undo.undo()
        self._store.progress.undone()

    def _map(self, plan: ChunkPlan, work: Callable[[int, T], R], tasks: list[T]) -> list[R]:
        """On one thread if small: waking another takes as long as some ten thousand elements."""
        if plan.size <= _ALONE:
            return [work(0, task) for task in tasks]
        return self._pool.map(work, tasks)

    def _begin(self, count_group: StepCountGroup) -> StepChunk:
        """Count its step; the first one initialises its state."""
        group, first = self._groups[count_group.group], not count_group.begun
        if first:
            for name, value in self._kernel.start(group).items():
                if name in count_group.figures:
                    count_group.figures[name].fill_(value)
                else:
                    for index in count_group.members:
                        self._part(name, index).fill_(value)
        count_group.begin(count_group.begun or self._kernel.keeps(group))
        return self._kernel.prepare(group, count_group.figures, first)

    def _step_chunk(
        self,
        mean: _Mean,
        transform: Transform | None,
        steps: Sequence[StepChunk],
        told: ChunkProgress | None,
        lane: int,
        chunk: Chunk,
    ) -> None:
        scratch = self._scratch_of(lane, chunk.size)
        gradient = mean.of(chunk, scratch[0])
        if transform is not None:
            gradient = transform(gradient, scratch[0])
        self._storage.step(steps[chunk.count_group], chunk, gradient, scratch[1:])
        if told is not None:
            told.ended(chunk.number)

    def _scratch_of(self, lane: int, size: int) -> tuple[torch.Tensor, ...]:
        """A lane's temporaries, (n,) each; the first is for the merged gradient."""
        known = self._scratch[lane]
        if size not in known:
            room = max(self._longest, self._piece)
            count = 1 + self._kernel.scratch + self._storage.scratch(len(self.flats))
            largest = known.get(0) or tuple(
                [torch.empty(room, dtype=torch.float32) for _ in range(count)]
            )
            known[0] = largest
            known[size] = tuple([each[:size] for each in largest])
        return known[size]

    # ---- plans ----------------------------------------------------------------------------------

    def _plan(self, absent: list[frozenset[int]]) -> ChunkPlan:
        key = tuple(absent) if any(absent) else None
        if (plan := self._plans.get(key)) is None:
            plan = self._make_plan(key or ())
            self._plans[key] = plan
        return plan

    def _make_plan(self, absent: tuple[frozenset[int], ...]) -> ChunkPlan:
        present = [present_in(absent, number) for number in self._numbers]
        moving = [index for index, some in enumerate(present) if some is None or some]
        if self.count_groups.part(moving) or len(self._plans) >= _PLANS:
            self._forget_plans()
        places = [(self._numbers[i], self.count_groups.of[i], present[i]) for i in moving]
        state = {
            count_group: tuple(
                [self.flats[n] for n in self._kernel.names(self._groups[count_group.group])]
            )
            for count_group in {self.count_groups.of[index] for index in moving}
        }
        size = sum(self._store.layout.slots[number].numel for number, _, _ in places)
        return make_plan(places, self._store, state, self._chunk_for(size))

    def _forget_plans(self) -> None:
        self._plans.clear()
        self._pieces.clear()
        self._scratch = [{} for _ in self._scratch]

    def _chunk_for(self, size: int) -> int:
        """Elements of a chunk, in an update of ``size`` elements.

        Threads contend for the GIL at each kernel call, so many threads need longer calls. (AdamW,
        170 M elements, 16 threads: 34 ms with 512 Ki, 69 with 128 Ki, 277 with 32 Ki; two threads:
        no difference.)
        """
        return max(self._kernel.chunk, min(self._longest, size // (2 * self._pool.size)))

    # ---- clipping: the global norm is computed before the first chunk is stepped -----------------

    def _clipping(self, plan: ChunkPlan, mean: _Mean, clip: Clip | None) -> Transform | None:
        if clip is None:
            return None
        limit = clip.limit
        if clip.algorithm == "value":
            return lambda gradient, out: torch.clamp(gradient, -limit, limit, out=out)
        factor = clip_factor(self._norm(plan, mean), limit)
        return None if factor == 1.0 else lambda gradient, out: torch.mul(gradient, factor, out=out)

    def _norm(self, plan: ChunkPlan, mean: _Mean) -> torch.Tensor:
        """The norm of the mean gradient, ()."""
        if id(plan) not in self._pieces:
            self._pieces[id(plan)] = pieces(plan.places, self._store, self._piece)
        found = self._pieces[id(plan)]

        def norms(lane: int, piece: NormPiece) -> list[torch.Tensor]:
            return piece.norms(mean.of, lane, self._scratch_of(lane, piece.size)[0])

        return total(found, self._map(plan, norms, found))

    # ---- groups and state -----------------------------------------------------------------------

    def changes_no_state(self, groups: Groups) -> bool:
        """Whether these hyper-parameters need the same state tensors."""
        names = self._kernel.names
        pairs = zip(self._groups, groups, strict=True)
        return all(names(own) == names({**own, **new}) for own, new in pairs)

    def set_groups(self, groups: Groups) -> None:
        before = [self._kernel.names(group) for group in self._groups]
        for own, new in zip(self._groups, groups, strict=True):
            own.update(new)
        if before != [self._kernel.names(group) for group in self._groups]:
            self._make_flats()  # for example momentum, which was 0 before
            self._undo = None
            self._forget_plans()

    def state(self) -> SavedOptimizer:
        states = {}
        for index, count_group in enumerate(self.count_groups.of):
            if count_group.begun:
                kept = {name: figure.clone() for name, figure in count_group.figures.items()}
                for name in self._kernel.names(self._groups[count_group.group]):
                    kept[name] = self._part(name, index).to(torch.float32, copy=True)
                states[self._numbers[index]] = kept
        return SavedOptimizer(states, groups=tuple(self._groups))

    def release_optimizer(self) -> tuple[torch.optim.Optimizer, dict[int, torch.nn.Parameter]]:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        numbered = dict(zip(self._numbers, parameters, strict=True))
        for number, state in self.state().parameters.items():
            self._optimizer.state[numbered[number]] = state
        for own, current in zip(self._optimizer.param_groups, self._groups, strict=True):
            own.update(current)
        return self._optimizer, numbered


@dataclass(frozen=True, slots=True)
class _Mean:
    """Computes the mean of these workers' rows, chunk by chunk."""

    workers: list[int]
    shares: list[float]

    def of(self, chunk: Chunk | NormPiece, out: torch.Tensor) -> torch.Tensor:
        """The mean of a chunk, (n,): in ``out``, or a lone row itself; absent gradients are 0."""
        if chunk.present is None:
            return merge([chunk.rows[worker] for worker in self.workers], self.shares, out)
        rows = [chunk.rows[self.workers[place]] for place in chunk.present]
        return merge(rows, [self.shares[place] for place in chunk.present], out)
