"""How the flat pass keeps the optimizer's state between updates: as float32, or as bfloat16.

A bfloat16 has 8 significant bits. Rounded to nearest, a mean that moves by less than 1/512 of
itself in a step would stand still, as that of squares with beta 0.999 does. So it is rounded
*stochastically*: up with a probability of the part that is cut off, else down, which is right on
average. A chunk is widened in the cache, stepped as float32, and rounded as it is written.

The random numbers are a function of the update's number and the element's place, so they do not
depend on chunks or threads, and a resumed run or a replay draws the same. They come from *simple
tabulation* (Carter and Wegman 1979, Pǎtraşcu and Thorup 2012): two tables of lengths without a
common factor are drawn anew for every update, and element i has the XOR of its entry in each. Any
three elements have independent numbers, and one pass over the cache makes them.

Legend: n elements of a chunk, P elements of the buffer (padding included).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from hybridtrain.engine.updates.flat.chunks import Chunk
from hybridtrain.engine.updates.flat.rounding import Words, fastest_rounding
from hybridtrain.engine.updates.kernels import StepChunk
from hybridtrain.engine.updates.kernels.kernel import Tensors

_SHORTEST, _LONGEST = 2**8, 2**15  # table
_MOST_TENSORS = 4  # of an optimizer's state


class StateStorage(ABC):
    """Steps chunks whose state is kept in some dtype."""

    def scratch(self, n_tensors: int) -> int:
        """The number of (n,) temporaries, with so many state tensors."""
        return 0

    def begin(self, update: int, longest: int) -> None:
        """An update begins, after so many others, with chunks of at most ``longest`` elements."""
        return

    @abstractmethod
    def step(self, run: StepChunk, chunk: Chunk, gradient: torch.Tensor, scratch: Tensors) -> None:
        """Step the chunk with its merged gradient, (n,); ``scratch``: (n,) each."""


class Float32State(StateStorage):
    """The kernel steps the state where it lies."""

    def step(self, run: StepChunk, chunk: Chunk, gradient: torch.Tensor, scratch: Tensors) -> None:
        run(chunk.parameter, gradient, chunk.state, scratch)


class BFloat16State(StateStorage):
    """The state is widened for the step, and rounded stochastically behind it.

    Args:
        size: P.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lengths = _lengths(_MOST_TENSORS * size)
        self._tables = [np.empty(0, dtype=np.uint32) for _ in self._lengths]
        self._to_bfloat16 = fastest_rounding()
        self._drawn = -1  # the update whose numbers the tables hold

    def scratch(self, n_tensors: int) -> int:
        return n_tensors + 1  # the widened state, and random numbers

    def begin(self, update: int, longest: int) -> None:
        """Draw the update's tables, repeated so that any chunk is one slice of them."""
        repeats = [-(-longest // length) + 1 for length in self._lengths]
        sizes = [n * length for n, length in zip(repeats, self._lengths, strict=True)]
        if any(table.size < size for table, size in zip(self._tables, sizes, strict=True)):
            self._tables = [np.empty(size, dtype=np.uint32) for size in sizes]
        elif update == self._drawn:
            return
        # A counter-based generator, with the update's number in the counter.
        words = np.random.Philox(key=0, counter=update << 64).random_raw(
            sum(self._lengths) // 4 + 1
        )
        numbers, at = words.view(np.uint16), 0
        for table, length in zip(self._tables, self._lengths, strict=True):
            table.reshape(-1, length)[:] = numbers[at : at + length]
            at += length
        self._drawn = update

    def step(self, run: StepChunk, chunk: Chunk, gradient: torch.Tensor, scratch: Tensors) -> None:
        count = len(chunk.state)
        wide, noise = scratch[:count], scratch[count]
        for kept, out in zip(chunk.state, wide, strict=True):
            out.copy_(kept)
        run(chunk.parameter, gradient, wide, scratch[count + 1 :])
        for number, (kept, out) in enumerate(zip(chunk.state, wide, strict=True)):
            self._round(out, kept, number * self._size + chunk.start, _words(noise))

    def _round(self, wide: torch.Tensor, kept: torch.Tensor, place: int, scratch: Words) -> None:
        """Round a tensor, (n,), whose first element has this place in the whole state."""
        starts = [place % length for length in self._lengths]
        one, other = [t[s : s + scratch.size] for t, s in zip(self._tables, starts, strict=True)]
        out = kept.view(torch.int16).numpy().view(np.uint16)
        self._to_bfloat16(_words(wide), one, other, scratch, out)


def _words(tensor: torch.Tensor) -> Words:
    """The bits of float32 elements, (n,)."""
    return tensor.numpy().view(np.uint32)


def _lengths(elements: int) -> tuple[int, int]:
    """Two neighbouring numbers, so coprime; no pair of entries comes twice, if they may be long."""
    length = _SHORTEST
    while length < _LONGEST and length * (length - 1) < elements:
        length *= 2
    return length, length - 1


def storage_for(dtype: torch.dtype, size: int) -> StateStorage:
    """The storage of state in this dtype, in a buffer of ``size`` elements."""
    return Float32State() if dtype == torch.float32 else BFloat16State(size)
