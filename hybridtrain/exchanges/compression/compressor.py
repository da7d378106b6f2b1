"""Encodes what one worker hands over, and keeps what rounding has left out (error feedback).

With e for what is left, Δ for a movement and Q for encoding and decoding, each exchange does::

    e <- decay * e + Δ;   send Q(e);   e <- e - Q(e)

Large parameters are encoded each by itself, small ones of one dtype as if they were one, so that
scales and unfinished chunks take no more room than what they belong to. What encoding would not
make smaller travels as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from math import prod
from typing import Any, ClassVar

import torch

from hybridtrain.exchanges.compression.codecs import Codec, working
from hybridtrain.exchanges.exchange import RESIDUALS, Offer

SMALL = 4096  # elements: below that, a parameter shares its chunks with others


class Compressor:
    """Of one worker and one optimizer.

    Args:
        codec: what encodes; ``None``: everything travels as it is.
    """

    def __init__(self, codec: Codec | None) -> None:
        self._codec = codec
        self._left: dict[int, torch.Tensor] = {}  # by the parameter's place -> (n,)

    def offer(
        self, values: Sequence[torch.Tensor | None], weight: float, fetch: bool = True
    ) -> Offer:
        """What leaves the worker.

        What has no weight is not encoded, for it would be lost; nor is what is not finite, so that
        it is judged as it is without a codec, and leaves no trace in what is kept.
        """
        given = {n: value for n, value in enumerate(values) if value is not None}
        encoded = self.encode(given) if weight > 0 else None
        return Offer(values, weight, fetch, encoded)

    def encode(self, values: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
        """(n,) uint8 for parameters by number, in this order; ``None``: they are to travel as they
        are, since there is no codec, or one of them is not finite.
        """
        if self._codec is None or not all(map(_is_finite, values.values())):
            return None
        numbers, tensors = list(values), [_dense(value) for value in values.values()]
        parts = [
            self._encoded(self._codec, {numbers[i]: tensors[i] for i in together})
            for together in _groups(tensors)
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    def _encoded(self, codec: Codec, values: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Some that travel together, all of one dtype."""
        first = next(iter(values.values()))
        flats = {number: value.flatten() for number, value in values.items()}
        shape = _shape_of(list(values.values()))
        if _travels_whole(codec, shape, first.dtype):
            return torch.cat([flat.view(torch.uint8) for flat in flats.values()])
        due = _joined([self._due(codec, number, flat) for number, flat in flats.items()])
        encoded = codec.encode(due.view(shape), first.dtype)
        if codec.error_decay is not None:
            sent = torch.empty_like(due, dtype=first.dtype)
            codec.decode(encoded, sent.view(shape))
            sizes = [len(flat) for flat in flats.values()]
            self._left.update(zip(flats, due.sub_(sent).split(sizes), strict=True))
        return encoded

    def _due(self, codec: Codec, number: int, flat: torch.Tensor) -> torch.Tensor:
        """What would travel if all could; not the value's own memory if something will be left."""
        left, decay = self._left.get(number), codec.error_decay
        if left is not None and decay is not None:
            return left.mul_(decay).add_(flat)
        return flat.to(working(flat.dtype), copy=decay is not None)

    def state(self) -> dict[int, torch.Tensor]:
        """What is left of each parameter, 1-D, by its place in the optimizer."""
        return {number: left.clone() for number, left in self._left.items()}

    def load_state(self, state: Mapping[int, torch.Tensor]) -> None:
        """Go on with what :meth:`state` has returned."""
        self._left = {number: left.clone() for number, left in state.items()}


def decode(
    codec: Codec,
    encoded: torch.Tensor,  # uint8; no part of the places
    places: Sequence[torch.Tensor],  # of the parameters that were encoded, in their order
) -> None:
    """Write what a compressor has encoded to where it belongs."""
    begin = 0
    for together in _groups(places):
        some = [places[index] for index in together]
        shape, dtype = _shape_of(some), some[0].dtype
        end = begin + bytes_of(codec, shape, dtype)
        direct = len(some) == 1 and some[0].is_contiguous()
        out = some[0] if direct else torch.empty(shape, dtype=dtype)
        if _travels_whole(codec, shape, dtype):
            out.view(-1).copy_(encoded[begin:end].clone().view(dtype))
        else:
            codec.decode(encoded[begin:end], out)
        if not direct:
            parts = out.view(-1).split([place.numel() for place in some])
            for place, part in zip(some, parts, strict=True):
                place.copy_(part.view(place.shape))
        begin = end
    assert begin == len(encoded), "worker and server know the same parameters"


def bytes_of(codec: Codec, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Encoded bytes of one parameter, or of several of one dtype that are encoded together."""
    whole = _travels_whole(codec, shape, dtype)
    return prod(shape) * dtype.itemsize if whole else codec.n_bytes(shape, dtype)


def _shape_of(together: Sequence[torch.Tensor]) -> Sequence[int]:
    """A parameter's own, if it travels alone; else that of a vector with all elements."""
    return together[0].shape if len(together) == 1 else (sum(t.numel() for t in together),)


def _groups(tensors: Iterable[torch.Tensor]) -> list[list[int]]:
    """Which of them travel together."""
    groups: dict[tuple[torch.dtype, int], list[int]] = {}
    for index, tensor in enumerate(tensors):
        alone = tensor.numel() >= SMALL
        groups.setdefault((tensor.dtype, index if alone else -1), []).append(index)
    return list(groups.values())


def _travels_whole(codec: Codec, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether nothing would be saved; complex numbers are not encoded."""
    whole = prod(shape) * dtype.itemsize
    return not dtype.is_floating_point or codec.n_bytes(shape, dtype) >= whole


def _joined(flats: list[torch.Tensor]) -> torch.Tensor:
    return flats[0] if len(flats) == 1 else torch.cat(flats)


def _dense(value: torch.Tensor) -> torch.Tensor:
    return value.to_dense() if value.is_sparse else value


def _is_finite(value: torch.Tensor | None) -> bool:
    """A sum is finite only if all its terms are."""
    if value is None:
        return True
    numbers = _dense(value)
    return math.isfinite(abs(numbers.sum().item())) or bool(numbers.isfinite().all())


# ---- the state of an exchange -------------------------------------------------------------------
# Save and restore the attributes of an exchange that count steps since the last exchange.


class Remembering:
    """``remembers``: the names of its attributes, without the ``_`` that they begin with."""

    remembers: ClassVar[tuple[str, ...]]
    compressor = Compressor(None)

    def state(self) -> dict[str, Any]:
        known = {name: copy(getattr(self, f"_{name}")) for name in self.remembers}
        return {**known, RESIDUALS: self.compressor.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name in self.remembers:
            setattr(self, f"_{name}", copy(state.get(name, getattr(self, f"_{name}"))))
        self.compressor.load_state(state.get(RESIDUALS, {}))
