"""Stochastic rounding of float32 to bfloat16, on their bits: by numpy or compiled, with equal bits.

Both add a random number below 2**16 to a value's 32 bits, and keep the upper 16: a carry out of the
lower 16 rounds up, in magnitude. Infinity stays what it is, and so does the NaN that processors
make. The random number is the XOR of an entry of each of two tables. Where numba is installed
(extra ``sparse``), one pass does it, in a third of the time.

Legend: n elements.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from hybridtrain.errors import UserError
from hybridtrain.util.compiling import compiled

Words = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]  # (n,)
Halves = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]  # (n,)
# bits of the values, which may be overwritten; entries of the tables; a temporary; the result
Round = Callable[[Words, Words, Words, Words, Halves], None]


def round_by_numpy(bits: Words, one: Words, other: Words, scratch: Words, out: Halves) -> None:
    """In three passes."""
    np.bitwise_xor(one, other, out=scratch)
    np.add(bits, scratch, out=bits)
    np.right_shift(bits, 16, out=out, casting="unsafe")


def round_in_one_pass(bits: Words, one: Words, other: Words, scratch: Words, out: Halves) -> None:
    """To be compiled."""
    for place in range(out.size):
        out[place] = (bits[place] + (one[place] ^ other[place])) >> np.uint32(16)


@cache
def fastest_rounding() -> Round:
    """The compiled pass where there is numba, compiled now; else numpy."""
    try:
        found = compiled(round_in_one_pass)
    except UserError:
        return round_by_numpy
    words = np.zeros(16, dtype=np.uint32)
    found(words, words, words, words, np.zeros(16, dtype=np.uint16))
    return found
