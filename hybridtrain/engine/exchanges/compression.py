"""Gradients and movements in fewer bytes: as whole numbers with a scale, or the largest elements.

A codec encodes one parameter; a compressor does so for one worker and one optimizer, and remembers
what rounding has left out (error feedback).

With e for what is left, Δ for a movement and Q for encoding and decoding, each exchange does::

    e <- decay * e + Δ;   send Q(e);   e <- e - Q(e)

Large parameters are encoded each by itself, small ones of one dtype as if they were one, so that
scales and unfinished chunks take no more room than what they belong to. What encoding would not
make smaller travels as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import torch

from hybridtrain.engine.exchanges.exchange import Offer
from hybridtrain.util.option_types import Checked, Positive, Range, Share, choose

# ---- how one parameter's gradient or movement is encoded, by name: int8, int4, topk -------------
# A parameter is cut into chunks, the last of which may be shorter; each has scales of its own, so
# that a few large elements cost only their neighbours precision. Top-k is that of SparseLoCo (Sarfi
# et al. 2025, arXiv:2508.15706): 64 of 4,096 elements, 12 bits for each place, 2 bits for each
# value.
#
# Legend: n elements of a parameter, C chunks of c elements, k elements kept of each chunk.

# ---- small whole numbers, several of them in a byte ---------------------------------------------
# Numbers are packed by planes: of n numbers in bytes for two each, the first n / 2 are the lower
# halves and the rest the upper ones. Every step is then one pass over contiguous memory.
#
# Legend: n numbers, m bytes.

PLACES = 4096  # a place in a chunk takes 12 bits


def packed_bytes(n: int, bits: int) -> int:
    """The bytes of ``n`` numbers of so many bits."""
    return -(-n * bits // 8)


def pack(
    numbers: torch.Tensor,  # (n,) uint8, each below 2 ** bits
    bits: int,  # 1, 2, 4 or 8
) -> torch.Tensor:  # (m,) uint8
    """Several numbers in each byte; missing ones at the end are 0."""
    if bits == 8:
        return numbers
    planes = 8 // bits
    m = packed_bytes(len(numbers), bits)
    padded = torch.nn.functional.pad(numbers, (0, planes * m - len(numbers))).view(planes, m)
    packed = padded[0].clone()
    for plane in range(1, planes):
        packed.bitwise_or_(padded[plane] << bits * plane)
    return packed


def unpack(
    packed: torch.Tensor,  # (m,) uint8
    n: int,
    bits: int,
) -> torch.Tensor:  # (n,) uint8
    """The inverse of :func:`pack`."""
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    planes = [(packed >> bits * plane).bitwise_and_(mask) for plane in range(8 // bits)]
    return torch.cat(planes)[:n]


def pack_places(
    places: torch.Tensor,  # (n,) int64, each below PLACES
) -> torch.Tensor:  # (m,) uint8
    """12 bits each: the lower 8 of all, then the upper 4 of all."""
    low, high = (places & 255).to(torch.uint8), (places >> 8).to(torch.uint8)
    return torch.cat([low, pack(high, 4)])


def unpack_places(
    packed: torch.Tensor,  # (m,) uint8
    n: int,
) -> torch.Tensor:  # (n,) int64
    """The inverse of :func:`pack_places`."""
    return packed[:n].long() | (unpack(packed[n:], n, 4).long() << 8)


_SLAB = 256 * 1024  # elements that are worked on together: they stay in a core's cache


@runtime_checkable
class Codec(Protocol):
    """Numbers to bytes and back."""

    @property
    def error_decay(self) -> float | None:
        """The error times this is added to the next tensor; ``None``: the error is lost."""

    def n_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of an encoded parameter of this shape and dtype."""

    def encode(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Finite numbers of ``working(dtype)``, in the parameter's shape, to (n_bytes,) uint8."""

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """(n_bytes,) uint8 to numbers in the parameter's shape and dtype, all overwritten."""


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scales and of the arithmetic, for a parameter of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Integers(Checked):
    """Whole numbers of ``bits`` bits with a scale for each chunk, rounded to nearest even.

    The error of an element is at most half the scale, which is the chunk's largest magnitude
    divided by 127 (8 bits) or 7 (4 bits).

    Args:
        bits: of an element.
        chunk: elements that share a scale.
        error_decay: the error times this is added to the next tensor; ``None``: it is lost.
    """

    bits: int
    chunk: Positive
    error_decay: Share | None

    @property
    def _levels(self) -> int:
        """Above zero, and as many below."""
        return (1 << self.bits - 1) - 1

    def n_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        n = prod(shape)
        return -(-n // self.chunk) * working(dtype).itemsize + packed_bytes(n, self.bits)

    def encode(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        flat = values.flatten()
        codes = torch.empty(len(flat), dtype=torch.uint8, device=flat.device)
        scales = []
        for part, width in _slabs(len(flat), self.chunk):
            rows = flat[part].view(-1, width)
            # Torch is fast at these: with abs, and conversion to uint8, all took twice as long.
            scale = torch.maximum(rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True))
            steps = rows / torch.where(scale.div_(self._levels) > 0, scale, 1)
            steps.round_().clamp_(-self._levels, self._levels)
            codes[part].view(torch.int8).view(-1, width).copy_(steps)
            scales.append(scale)
        codes.add_(self._levels)  # of bytes, as two's complement has it
        return torch.cat([*map(as_bytes, scales), pack(codes, self.bits)])

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        flat, n, kind = out.view(-1), out.numel(), working(out.dtype)
        n_scales = -(-n // self.chunk)
        scales = as_numbers(encoded[: n_scales * kind.itemsize], kind)
        codes = unpack(encoded[n_scales * kind.itemsize :], n, self.bits)
        for part, width in _slabs(n, self.chunk):
            rows, first = flat[part].view(-1, width), part.start // self.chunk
            steps = rows if rows.dtype == kind else torch.empty_like(rows, dtype=kind)
            steps.copy_(codes[part].view(-1, width)).sub_(self._levels)
            steps.mul_(scales[first : first + len(steps), None])
            if steps is not rows:
                rows.copy_(steps)


@dataclass(frozen=True)
class TopK(Checked):
    """The elements of largest magnitude in each 4,096: their places, and their values.

    Where fewer than k elements differ from zero, the largest takes the places that are left over.

    Args:
        density: k / 4,096, the share of the elements that is handed over.
        bits: of a value: an odd multiple of a step, the largest of which is the largest magnitude
            of the chunk, so that none becomes zero; with 32 (or ``None``) values stay as they are.
        error_decay: what is left out, times this, is added to the next tensor.
    """

    density: Annotated[float, Range(0, 1, "(")] = 1 / 64
    bits: Literal[2, 4, 8, 32] | None = 2
    error_decay: Share = 0.95

    @property
    def _coded(self) -> int | None:
        """The bits of a value, unless it stays as it is."""
        return None if self.bits == 32 else self.bits

    def _kept(self, width: int) -> int:
        """How many of a chunk."""
        return max(1, round(self.density * width))

    def _kept_of(self, n: int) -> int:
        whole, rest = divmod(n, PLACES)
        return whole * self._kept(PLACES) + (self._kept(rest) if rest else 0)

    def _sizes(self, n: int, dtype: torch.dtype) -> tuple[int, int, int]:
        """The bytes of scales, places and values."""
        kept, bits = self._kept_of(n), self._coded
        if bits is None:
            return 0, packed_bytes(kept, 12), kept * dtype.itemsize
        scales = -(-n // PLACES) * working(dtype).itemsize
        return scales, packed_bytes(kept, 12), packed_bytes(kept, bits)

    def n_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return sum(self._sizes(prod(shape), dtype))

    def encode(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        flat = values.flatten()
        found: list[tuple[torch.Tensor, torch.Tensor]] = []  # places, values: (rows, k)
        for part, width in _slabs(len(flat), PLACES):
            rows = flat[part].view(-1, width)
            places = rows.abs().topk(self._kept(width), dim=1).indices  # the largest first
            places = torch.where(rows.gather(1, places) == 0, places[:, :1], places)
            found.append((places, rows.gather(1, places)))
        packed = pack_places(torch.cat([places.flatten() for places, _ in found]))
        bits = self._coded
        if bits is None:
            return torch.cat([packed, *(as_bytes(kept.to(dtype)) for _, kept in found)])
        scales = [kept[:, :1].abs() / ((1 << bits) - 1) for _, kept in found]
        codes = [_odd_steps(v, s, bits) for (_, v), s in zip(found, scales, strict=True)]
        return torch.cat([*map(as_bytes, scales), packed, pack(torch.cat(codes), bits)])

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        flat, n, bits = out.view(-1), out.numel(), self._coded
        total = self._kept_of(n)
        scales, packed, rest = encoded.split(self._sizes(n, out.dtype))
        places = unpack_places(packed, total)
        if bits is None:
            values = as_numbers(rest, out.dtype)
        else:
            kind = working(out.dtype)
            values = unpack(rest, total, bits).to(kind).mul_(2).sub_((1 << bits) - 1)
            steps, kept = as_numbers(scales, kind), self._kept(PLACES)
            values.mul_(steps.repeat_interleave(kept)[:total])
        flat.zero_()
        begin = 0
        for part, width in _slabs(n, PLACES):
            rows = flat[part].view(-1, width)
            end = begin + len(rows) * self._kept(width)
            chosen = places[begin:end].view(len(rows), -1)
            rows.scatter_(1, chosen, values[begin:end].view(len(rows), -1).to(out.dtype))
            begin = end


def int8(chunk: Positive = PLACES, error_decay: Share | None = None) -> Integers:
    """A quarter of the bytes of float32."""
    return Integers(8, chunk, error_decay)


def int4(chunk: Positive = PLACES, error_decay: Share | None = 1.0) -> Integers:
    """An eighth."""
    return Integers(4, chunk, error_decay)


def codec_of(exchange: object) -> Codec | None:
    """The codec of an exchange; ``None``: workers hand over tensors as they are."""
    return getattr(exchange, "compress", None)


def _slabs(n: int, chunk: int) -> Iterator[tuple[slice, int]]:
    """Stretches of whole chunks, and how wide these are; a shorter chunk at the end is its own."""
    whole, step = n // chunk * chunk, max(1, _SLAB // chunk) * chunk
    for start in range(0, whole, step):
        yield slice(start, min(start + step, whole)), chunk
    if whole < n:
        yield slice(whole, n), n - whole


def _odd_steps(
    values: torch.Tensor,  # (C, k)
    scales: torch.Tensor,  # (C, 1)
    bits: int,
) -> torch.Tensor:  # (C * k,) uint8
    """Which odd multiple of the scale is the nearest: 0 is the lowest."""
    half = 1 << bits - 1
    steps = (values / torch.where(scales > 0, 2 * scales, 1)).floor_().add_(half)
    return steps.clamp_(0, 2 * half - 1).to(torch.uint8).flatten()


def as_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """The elements' memory, 1-D uint8."""
    return numbers.contiguous().flatten().view(torch.uint8)


def as_numbers(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy: bytes may begin anywhere, numbers may not."""
    return raw.clone().view(dtype)


SMALL = 4096  # elements: below that, a parameter shares its chunks with others


class Compressor:
    """Encodes the parameters of one worker's optimizer, and keeps their errors.

    Args:
        codec: encodes one tensor; ``None``: tensors travel as they are.
    """

    def __init__(self, codec: Codec | None) -> None:
        self._codec = codec
        self._residuals: dict[int, torch.Tensor] = {}  # by the parameter's place -> (n,)

    def offer(
        self, values: Sequence[torch.Tensor | None], weight: float, fetch: bool = True
    ) -> Offer:
        """The offer of these tensors, encoded.

        An offer without weight is not encoded, because its error would be lost. Tensors that are
        not finite are not, either: they are judged as without a codec, and leave no error behind.
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
            self._residuals.update(zip(flats, due.sub_(sent).split(sizes), strict=True))
        return encoded

    def _due(self, codec: Codec, number: int, flat: torch.Tensor) -> torch.Tensor:
        """The tensor and its earlier error: (n,), new memory if an error will be kept."""
        residual, decay = self._residuals.get(number), codec.error_decay
        if residual is not None and decay is not None:
            return residual.mul_(decay).add_(flat)
        return flat.to(working(flat.dtype), copy=decay is not None)

    def state(self) -> dict[int, torch.Tensor]:
        """The errors, each (n,), by the parameter's place in the optimizer."""
        return {number: residual.clone() for number, residual in self._residuals.items()}

    def load_state(self, state: Mapping[int, torch.Tensor]) -> None:
        """Go on with what :meth:`state` has returned."""
        self._residuals = {number: residual.clone() for number, residual in state.items()}


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


def _is_finite(value: torch.Tensor) -> bool:
    """A sum is finite only if all its terms are."""
    numbers = _dense(value)
    return math.isfinite(abs(numbers.sum().item())) or bool(numbers.isfinite().all())


# ---- PowerSGD: a matrix travels as the product of two with few columns --------------------------
# Vogels, Karimireddy, Jaggi, *PowerSGD*, NeurIPS 2019 (arXiv:1905.13727), algorithm 1, with the
# error feedback of algorithm 2. There all workers multiply the mean of their matrices; here each
# worker factors its own, and the server takes the mean of the products. In place of the warm start,
# which would be one more memory of each worker, every encoding makes ``iterations`` from the same
# matrix.


@dataclass(frozen=True)
class PowerSGD(Checked):
    """A tensor of more than two dimensions is a matrix with its first; a vector is not encoded.

    Args:
        rank: r, the columns of both factors, of at most as many as the matrix has rows and columns.
        iterations: of the subspace iteration, from a fixed random matrix.
        error_decay: of what is left out, which the next gradient gets.
    """

    rank: Positive = 4
    iterations: Positive = 2
    error_decay: Share = 1.0

    def _width(self, shape: Sequence[int]) -> int:
        """The columns of both factors."""
        return min(self.rank, shape[0], prod(shape[1:]))

    def n_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        if len(shape) < 2:
            return prod(shape) * dtype.itemsize
        return (shape[0] + prod(shape[1:])) * self._width(shape) * working(dtype).itemsize

    def encode(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        matrix = values.reshape(len(values), -1)  # (n, m)
        seeded = torch.Generator().manual_seed(0)
        right = torch.randn(matrix.shape[1], self._width(values.shape), generator=seeded)  # (m, r)
        right = left = right.to(matrix)
        for _ in range(self.iterations):
            left = torch.linalg.qr(matrix @ right).Q  # (n, r), orthonormal
            right = matrix.T @ left
        return torch.cat([as_bytes(left), as_bytes(right)])

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        factors = as_numbers(encoded, working(out.dtype)).view(-1, self._width(out.shape))
        left, right = factors.split((len(out), len(factors) - len(out)))
        out.copy_((left @ right.T).view(out.shape))


# ---- codecs by name -----------------------------------------------------------------------------

CodecSpec = str | Mapping[str, Any] | Codec | None  # a name, {"name": ...}, an object

CODECS: dict[str, Callable[..., Codec]] = {
    "int8": int8,
    "int4": int4,
    "topk": TopK,
    "power_sgd": PowerSGD,
}


def make_codec(given: CodecSpec) -> Codec | None:
    """A codec from its name, its name and parameters, or the object itself; ``None``: none.

    Raises:
        UserError: if the name is not known, or the parameters make no sense.
    """
    if given is None:
        return None
    return choose("exchange.compress", given, CODECS, Codec)  # type: ignore[type-abstract]
