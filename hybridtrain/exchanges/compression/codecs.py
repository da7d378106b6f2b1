"""How one parameter's gradient or movement is encoded, by name: ``int8``, ``int4``, ``topk``.

A parameter is cut into chunks, the last of which may be shorter; each has scales of its own, so
that a few large elements cost only their neighbours precision. Top-k is that of SparseLoCo (Sarfi
et al. 2025, arXiv:2508.15706): 64 of 4,096 elements, 12 bits for each place, 2 bits for each value.

Legend: n elements of a parameter, C chunks of c elements, k elements kept of each chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal, Protocol, runtime_checkable

import torch

from hybridtrain.util.option_types import Checked, Positive, Range, Share

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
        """What is left out now is added to the next movement, times this; ``None``: it is lost."""
        ...

    def n_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of an encoded parameter of this shape and dtype."""
        ...

    def encode(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Finite numbers of ``working(dtype)``, in the parameter's shape, to (n_bytes,) uint8."""
        ...

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """(n_bytes,) uint8 to numbers in the parameter's shape and dtype, all overwritten."""
        ...


def working(dtype: torch.dtype) -> torch.dtype:
    """What is reckoned in, scales included, for a parameter of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Integers(Checked):
    """Whole numbers of ``bits`` bits with a scale for each chunk, rounded to nearest even.

    The error of an element is at most half the scale, which is the chunk's largest magnitude
    divided by 127 (8 bits) or 7 (4 bits).
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
            scale = rows.abs().amax(1, keepdim=True).div_(self._levels)
            steps = rows / torch.where(scale > 0, scale, 1)
            steps.round_().clamp_(-self._levels, self._levels).add_(self._levels)
            codes[part].view(-1, width).copy_(steps)
            scales.append(scale)
        return torch.cat([*map(as_bytes, scales), pack(codes, self.bits)])

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        flat, n, kind = out.view(-1), out.numel(), working(out.dtype)
        n_scales = -(-n // self.chunk)
        scales = as_numbers(encoded[: n_scales * kind.itemsize], kind)
        codes = unpack(encoded[n_scales * kind.itemsize :], n, self.bits)
        for part, width in _slabs(n, self.chunk):
            steps = codes[part].view(-1, width).to(kind).sub_(self._levels)
            first = part.start // self.chunk
            steps.mul_(scales[first : first + len(steps), None])
            flat[part].view(-1, width).copy_(steps)


@dataclass(frozen=True)
class TopK(Checked):
    """The elements of largest magnitude in each 4,096: their places, and their values.

    Values have ``bits`` bits: an odd multiple of a step, the largest of which is the largest
    magnitude of the chunk, so that none becomes zero; with 32 (or ``None``) they stay as they are.
    Where fewer than k elements differ from zero, the largest takes the places that are left over.
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
    """What encodes that which workers hand over, if anything does."""
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
