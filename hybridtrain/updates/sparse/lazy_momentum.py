"""SGD with momentum on sparse gradients: steps only rows whose momentum is not negligible.

Theory of operation. In torch every step moves every row by its decaying momentum. Workers read
parameters in place, so these steps cannot be deferred. But the momentum of a row without gradients
decays: after about log(2⁻²⁴)/log(momentum) steps (150 for 0.9) it changes no element any more, and
the row is at rest. Its momentum is multiplied by the product of all momenta since when the row has
a gradient again, or is saved. So a step costs as much as the rows in motion. The parameters are
those of dense momentum: to the bit while the learning rate does not rise, else to rounding.

Legend: R rows of shape (...), n of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hybridtrain.memory import Rows, Table
from hybridtrain.memory.table import Block
from hybridtrain.updates.sparse.touched_rows import Touched

Scratch = Sequence[Block]  # n rows or more each
# rows (n,) -> the results for portions of them
Map = Callable[[Callable[[Scratch, slice], Any], Rows], list[Any]]

_SMALLEST = 1e-300


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
        self.all_move()

    def all_move(self) -> None:
        """The buffer is new: rows with a momentum are in motion."""
        self._gliding: Rows = self.buffer.whole.flatten(1).any(dim=1).nonzero().flatten().numpy()
        self._moves[:] = False
        self._moves[self._gliding] = True
        self._rested[:] = self._passed

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
            moved: np.ndarray[Any, np.dtype[np.bool_]]
            moved = before.ne_(after).flatten(1).any(dim=1).numpy()
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
