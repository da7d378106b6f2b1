"""The update of torch's sparse optimizers: steps only the rows with a gradient.

Torch's own step builds several sparse tensors, 3 ms for 2,000 rows of 64 numbers under SparseAdam.
Here the rows are gathered into cache, stepped with the same operations and scattered back, in
portions, on all idle cores. The state is torch's, and is saved and loaded like any other. Dense
gradients are stepped by the user's optimizer object.

Legend: n rows of shape (...).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from hybridtrain.engine.memory import Rows, Store, Table
from hybridtrain.engine.memory.sparse_rows import (
    Block,
    ascending,
    is_table,
    rows_of,
    same_as_before,
    zeros_like,
)
from hybridtrain.engine.updates.base import Again, Contribution, StepInput
from hybridtrain.engine.updates.groups import slowed
from hybridtrain.engine.updates.per_tensor import PerTensorUpdate, clip_gradients
from hybridtrain.engine.updates.sparse.row_kernels import RowKernel, State
from hybridtrain.engine.updates.thread_pool import Pool

# ---- the mean of the workers' sparse gradients, over the union of their rows --------------------
# The whole mean is only needed for clipping and momentum. Otherwise it is only planned which
# workers have a gradient of a row, and a thread computes the mean of a portion, in cache, when it
# steps that portion. Rows are added in the order of the workers (unlike in torch's ``coalesce``),
# so that the bits are those of the dense sum.
#
# Legend: n rows, of shape (...); k of them with gradients of several workers; W workers.


class Touched(NamedTuple):
    """A sparse gradient: ``values`` (n, ...) of distinct ``rows`` (n,), a worker's ascending."""

    rows: Rows
    values: torch.Tensor


class More(NamedTuple):
    """Another worker's addends: its values ``at`` (k,), for the places ``to`` (k,), ascending."""

    to: Rows
    at: Rows
    values: torch.Tensor
    share: float


class RowPiece(NamedTuple):
    """Rows (n,) for which a worker is the first with a gradient: its values ``at`` (n,), or all."""

    rows: Rows
    at: Rows | None
    values: torch.Tensor
    share: float
    more: tuple[More, ...] = ()

    def mean(self, part: slice, out: torch.Tensor) -> torch.Tensor:
        """The mean of a part of the rows, at the beginning of ``out``, (n or more, ...)."""
        n = len(self.rows[part])
        if self.at is None:
            mean = torch.mul(self.values[part], self.share, out=out[:n])
        else:
            chosen = torch.from_numpy(self.at[part])
            mean = torch.index_select(self.values, 0, chosen, out=out[:n]).mul_(self.share)
        for more in self.more:
            first, last = np.searchsorted(more.to, (part.start, part.start + n))
            if last > first:
                to = torch.from_numpy(more.to[first:last] - part.start)
                added = more.values.index_select(0, torch.from_numpy(more.at[first:last]))
                mean.index_add_(0, to, added.mul_(more.share))
        return mean


def pieces_of(parts: Sequence[Touched], shares: Sequence[float]) -> list[RowPiece]:
    """Plan Σ share · gradient.

    Args:
        parts: each worker's gradient, with ascending rows.
    """
    if len(parts) == 1:
        return [RowPiece(parts[0].rows, None, parts[0].values, shares[0])]
    rows, order = ascending(np.concatenate([part.rows for part in parts]))
    again = np.flatnonzero(same_as_before(rows))
    if not len(again):
        return [
            RowPiece(part.rows, None, part.values, share)
            for part, share in zip(parts, shares, strict=True)
        ]
    first = np.searchsorted(rows, rows[again])  # the leftmost of equal ones
    return _divided(parts, shares, order[first], order[again])


def _divided(
    parts: Sequence[Touched],
    shares: Sequence[float],
    to: Rows,  # (k,) places in the workers' concatenated rows
    at: Rows,  # (k,) places of the addends; both ascend with the row numbers
) -> list[RowPiece]:
    """Split the plan by workers."""
    ends = np.cumsum([len(part.rows) for part in parts])
    owner, adder = np.searchsorted(ends, to, "right"), np.searchsorted(ends, at, "right")
    starts = [0, *ends.tolist()]
    pieces = []
    for w, (part, share) in enumerate(zip(parts, shares, strict=True)):
        own = _without(len(part.rows), at[adder == w] - starts[w])
        more = []
        for other in range(w + 1, len(parts)):
            chosen = np.flatnonzero((owner == w) & (adder == other))
            if len(chosen):
                places, theirs = to[chosen] - starts[w], at[chosen] - starts[other]
                places = places if own is None else np.searchsorted(own, places)
                more.append(More(places, theirs, parts[other].values, shares[other]))
        rows = part.rows if own is None else part.rows[own]
        pieces.append(RowPiece(rows, own, part.values, share, tuple(more)))
    return pieces


def _without(n: int, gone: Rows) -> Rows | None:
    """The places of n rows without ``gone``; ``None``: all."""
    if not len(gone):
        return None
    kept = np.ones(n, dtype=bool)
    kept[gone] = False
    return np.flatnonzero(kept)


class Merger:
    """Merges the sparse gradients of one parameter, in reused memory."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def merge(self, parts: Sequence[Touched], shares: Sequence[float]) -> Touched:
        """Σ share · gradient; a lone gradient with share 1 is returned itself.

        Args:
            parts: each with ascending rows.
        """
        if len(parts) == 1 and shares[0] == 1.0:
            return parts[0]
        pieces = pieces_of(parts, shares)
        rows = np.concatenate([piece.rows for piece in pieces])
        self._sums = room(self._sums, len(rows), parts[0].values)
        end = 0
        for piece in pieces:
            start, end = end, end + len(piece.rows)
            piece.mean(slice(0, len(piece.rows)), self._sums[start:end])
        return Touched(rows, self._sums[:end])


def room(memory: torch.Tensor | None, n: int, like: torch.Tensor) -> torch.Tensor:
    """The memory, or a new one, for n rows of this shape: (n or more, ...)."""
    if memory is not None and len(memory) >= n and memory.dtype == like.dtype:
        return memory
    return torch.empty((n + n // 2, *like.shape[1:]), dtype=like.dtype)


# ---- SGD with momentum --------------------------------------------------------------------------
# SGD with momentum on sparse gradients: steps only rows whose momentum is not negligible. Theory of
# operation. In torch every step moves every row by its decaying momentum. Workers read parameters
# in place, so these steps cannot be deferred. But the momentum of a row without gradients decays:
# after about log(2⁻²⁴)/log(momentum) steps (150 for 0.9) it changes no element any more, and the
# row is at rest. Its momentum is multiplied by the product of all momenta since when the row has a
# gradient again, or is saved. So a step costs as much as the rows in motion. A row rests if the
# largest rate so far would not change it; where the rate rises above that, all rows with a momentum
# are in motion again. The parameters are those of dense momentum: to the bit while the rate does
# not rise, else to rounding.
#
# Legend: R rows of shape (...), n of them.

Scratch = Sequence[Block]  # n rows or more each
# rows (n,) -> the results for portions of them
Map = Callable[[Callable[[Scratch, slice], Any], Rows], list[Any]]

_SMALLEST = 1e-300
_NONE: Rows = np.empty(0, np.int64)


class LazyMomentum:
    """The momentum of one parameter.

    Args:
        parameter: its rows.
        buffer: their momenta, perhaps of earlier steps.
    """

    def __init__(self, parameter: Table, buffer: Table) -> None:
        self.buffer = buffer
        self._parameter = parameter
        self._moves = np.zeros(parameter.n_rows, dtype=bool)
        self._passed = 0.0  # the logarithm of the product of all momenta so far
        self._rested = np.zeros(parameter.n_rows)  # its value when the row came to rest
        self._largest = 0.0  # rate, for which a row at rest does not move
        self._gliding: Rows = _NONE  # rows in motion

    def step(self, touched: Touched, group: Mapping[str, Any], first: bool, over: Map) -> Rows:
        """One step; returns the rows in motion.

        Args:
            touched: the gradient; its values may be changed.
            first: the momentum is initialised with this gradient.
            over: runs a function over portions of rows.
        """
        rows, g = touched.rows, touched.values
        if group.get("maximize"):
            g.neg_()
        self._set_off(float(group["lr"]))
        in_motion = self._moves[rows]
        missed = np.where(in_motion, 1.0, np.exp(self._passed - self._rested[rows]))
        self._passed += math.log(max(float(group["momentum"]), _SMALLEST))
        self._moves[rows] = False
        others = self._gliding[self._moves[self._gliding]]
        others = self._step_lazily(others, group, over)
        factors = torch.from_numpy(missed).to(g.dtype).view(-1, *[1] * (g.ndim - 1))
        self._push(rows, g, factors, group, first, over)
        self._moves[rows] = True
        self._gliding = np.concatenate([others, rows])
        return self._gliding

    def _set_off(self, rate: float) -> None:
        """Under a rate that has risen, rows with a momentum are in motion."""
        if rate <= self._largest:
            return
        self._largest = 2 * rate if self._largest else rate  # a warm-up looks seldom
        self.catch_up()
        self._gliding = _in_rows(self.buffer.whole).any(dim=1).nonzero().flatten().numpy()
        self._moves[:] = False
        self._moves[self._gliding] = True

    def _step_lazily(self, rows: Rows, group: Mapping[str, Any], over: Map) -> Rows:
        """Move rows without a gradient; returns those still in motion."""
        rate, momentum, nesterov = -float(group["lr"]), group["momentum"], group["nesterov"]

        def advance(scratch: Scratch, part: slice) -> np.ndarray[Any, np.dtype[np.bool_]]:
            own = rows[part]
            speed = self.buffer.take(own, scratch[0]).mul_(momentum)
            self.buffer.put(own, scratch[0])
            before = self._parameter.take(own, scratch[1])
            speed = speed.mul_(momentum) if nesterov else speed
            after = torch.add(before, speed, alpha=rate, out=scratch[2].tensor[: len(own)])
            self._parameter.put(own, scratch[2])
            if rate > -self._largest:
                after = torch.add(before, speed, alpha=-self._largest, out=after)
            moved: np.ndarray[Any, np.dtype[np.bool_]]
            moved = _in_rows(before.ne_(after)).any(dim=1).numpy()
            return moved

        if not len(rows):
            return rows
        moved = np.concatenate(over(advance, rows))
        stopped = rows[~moved]
        self._moves[stopped] = False
        self._rested[stopped] = self._passed
        return rows[moved]

    def _push(
        self,
        rows: Rows,
        g: torch.Tensor,  # (n, ...)
        missed: torch.Tensor,  # (n, 1...)
        group: Mapping[str, Any],
        first: bool,
        over: Map,
    ) -> None:
        """Move rows that have a gradient."""
        rate, momentum, nesterov = -float(group["lr"]), group["momentum"], group["nesterov"]
        fresh = 1.0 if first else 1 - group["dampening"]

        def push(scratch: Scratch, part: slice) -> None:
            own, gradient = rows[part], g[part]
            speed = self.buffer.take(own, scratch[0]).mul_(missed[part]).mul_(momentum)
            speed.add_(gradient, alpha=fresh)
            self.buffer.put(own, scratch[0])
            if nesterov:
                speed = gradient.add_(speed, alpha=momentum)
            self._parameter.take(own, scratch[1]).add_(speed, alpha=rate)
            self._parameter.put(own, scratch[1])

        if len(rows):
            over(push, rows)

    def catch_up(self) -> None:
        """Decay the momenta of rows at rest, as dense momentum would have."""
        factors = np.where(self._moves, 1.0, np.exp(self._passed - self._rested))
        whole = self.buffer.whole
        whole.mul_(torch.from_numpy(factors).to(whole.dtype).view(-1, *[1] * (whole.ndim - 1)))
        self._rested[:] = self._passed


_PORTION = 64 * 1024  # elements: 4 tensors of this size fit the cache, and repay waking a thread
_TEMPORARIES = 4  # three for a kernel, and the gradient
_MOMENTUM = "momentum_buffer"
_DTYPES = (torch.float32, torch.float64)


class _Brought(NamedTuple):
    """The sparse gradients of one parameter, and their shares."""

    parts: Sequence[Touched]
    shares: Sequence[float]


class ByRow(PerTensorUpdate):
    """Steps an optimizer whose parameters are views of the masters.

    Args:
        optimizer: over views of the masters, in host memory.
        numbers: the slot number of each of its parameters, group by group.
        store: the shared rows.
        pool: the threads that step.
        kernel: steps rows.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        numbers: Sequence[int],
        store: Store,
        pool: Pool,
        kernel: RowKernel,
    ) -> None:
        super().__init__(optimizer, numbers, store)
        self._pool, self._kernel = pool, kernel
        groups = optimizer.param_groups
        self._group_of = [group for group in groups for _ in group["params"]]
        self._mergers: dict[int, Merger] = {}  # all by place in the optimizer
        self._tables: dict[tuple[int, str], Table] = {}
        self._lazy: dict[int, LazyMomentum] = {}
        self._scratch: list[dict[Any, Scratch]] = [{} for _ in range(pool.size)]

    def step(self, given: StepInput) -> Again | None:
        contributions, clip = given.contributions, given.clip
        brought = self._brought(contributions)
        self.moved = moved = {self._numbers[index]: _NONE for index in self._mergers}
        if not self._mergers:
            return super().step(given)
        for index, parameter in enumerate(self._parameters):
            parameter.grad = None if index in brought else self._mean(index, contributions)
        dense = {i: p.grad for i, p in enumerate(self._parameters) if p.grad is not None}
        if clip is not None:
            brought = {index: self._merged(index, each) for index, each in brought.items()}
            sparse = [each.parts[0].values for each in brought.values()]
            clip_gradients([*dense.values(), *sparse], clip)
        with slowed(self._optimizer.param_groups, given.rate):
            for index in dense:
                moved.pop(self._numbers[index], None)
                if index in self._lazy:
                    self._lazy.pop(index).catch_up()
            if dense:
                self._optimizer.step()
            for index, each in brought.items():
                moved[self._numbers[index]] = self._step_rows(index, each)
        return None

    # ---- which rows -----------------------------------------------------------------------------

    def _brought(self, contributions: Sequence[Contribution]) -> dict[int, _Brought]:
        """The gradients, by index, of parameters whose gradients are all sparse."""
        numbers = {number for each in contributions for number in each.packed}
        found = {}
        for index, number in enumerate(self._numbers):
            if number in numbers and self._is_sparse(index, number, contributions):
                self._mergers.setdefault(index, Merger())
                found[index] = self._brought_of(index, number, contributions)
        return found

    def _is_sparse(self, index: int, number: int, contributions: Sequence[Contribution]) -> bool:
        parameter = self._parameters[index]
        if not is_table(parameter) or parameter.dtype not in _DTYPES:
            return False
        if self._group_of[index].get("weight_decay"):  # torch raises the error
            return False
        return all(
            number in each.packed and each.packed[number].sparse_dim == 1
            for each in contributions
            if number not in each.absent
        )

    def _brought_of(
        self, index: int, number: int, contributions: Sequence[Contribution]
    ) -> _Brought:
        present = [each for each in contributions if number in each.packed]
        parts = []
        for each in present:
            packed, place = each.packed[number], self._rows[each.worker][index]
            parts.append(Touched(rows_of(packed), place[: packed.n_rows]))
        return _Brought(parts, [each.share for each in present])

    def _merged(self, index: int, brought: _Brought) -> _Brought:
        """The mean, as one contribution."""
        return _Brought([self._mergers[index].merge(brought.parts, brought.shares)], [1.0])

    # ---- stepping them --------------------------------------------------------------------------

    def _step_rows(self, index: int, brought: _Brought) -> Rows:
        """Step the rows that have a gradient; returns those that moved."""
        group, parameter = self._group_of[index], self._parameters[index]
        state: State = self._optimizer.state[parameter]
        if group.get("momentum"):
            return self._push(index, self._merged(index, brought).parts[0], state)
        make = partial(zeros_like, parameter.detach())
        if not state:
            self._kernel.begin(group, state, make)
        run = self._kernel.prepare(group, state)
        tables = [self._table(index, "", parameter)]
        tables += [self._table(index, name, state[name]) for name in self._kernel.names]

        def step(scratch: Scratch, piece: RowPiece, part: slice) -> None:
            run(piece.rows[part], piece.mean(part, scratch[-1].tensor), tables, scratch)

        pieces, size = pieces_of(brought.parts, brought.shares), _portion(parameter)
        tasks = [(piece, part) for piece in pieces for part in _slices(len(piece.rows), size)]
        self._over(step, tasks, parameter)
        if not state:
            del self._optimizer.state[parameter]  # torch keeps none for plain SGD
        return np.concatenate([piece.rows for piece in pieces])

    def _push(self, index: int, touched: Touched, state: State) -> Rows:
        """SGD with momentum."""
        group, parameter = self._group_of[index], self._parameters[index]
        buffer = state.get(_MOMENTUM)
        first = buffer is None
        if buffer is None or buffer.is_sparse or not buffer.is_contiguous():
            state[_MOMENTUM] = zeros_like(parameter.detach())
            if buffer is not None:
                state[_MOMENTUM].add_(buffer)
        lazy = self._lazy.get(index)
        if lazy is None or lazy.buffer.whole is not state[_MOMENTUM]:
            tables = self._table(index, "", parameter), Table(state[_MOMENTUM])
            lazy = self._lazy[index] = LazyMomentum(*tables)

        def over(function: Callable[[Scratch, slice], Any], rows: Rows) -> list[Any]:
            parts = _slices(len(rows), _portion(parameter))
            return self._over(function, [(part,) for part in parts], parameter)

        return lazy.step(touched, group, first, over)

    def _table(self, index: int, name: str, whole: torch.Tensor) -> Table:
        known = self._tables.get((index, name))
        if known is None or known.whole is not whole:
            known = self._tables[index, name] = Table(whole)
        return known

    def _over(
        self,
        function: Callable[..., Any],
        tasks: Sequence[tuple[Any, ...]],
        like: torch.Tensor,  # the parameter, (R, ...)
    ) -> list[Any]:
        """Map ``function(scratch, *task)`` over tasks, each of a portion of rows."""

        def run(lane: int, task: tuple[Any, ...]) -> Any:
            known, key = self._scratch[lane], (like.dtype, like.shape[1:])
            if key not in known:
                known[key] = [Block(_portion(like), like) for _ in range(_TEMPORARIES)]
            return function(known[key], *task)

        return self._pool.map(run, tasks)

    # ---- state ----------------------------------------------------------------------------------

    def settle(self) -> None:
        for lazy in self._lazy.values():
            lazy.catch_up()


def _portion(like: torch.Tensor) -> int:
    """Rows of a portion."""
    return max(1, _PORTION // max(1, like[0].numel()))


def _slices(n: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, n, size)]


def _in_rows(values: torch.Tensor) -> torch.Tensor:
    """(n_rows, n), also of a parameter with one element a row."""
    return values.unsqueeze(-1).flatten(1)
