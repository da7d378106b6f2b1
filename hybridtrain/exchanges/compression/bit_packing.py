"""Small whole numbers, several of them in a byte.

Numbers are packed by planes: of n numbers in bytes for two each, the first n / 2 are the lower
halves and the rest the upper ones. Every step is then one pass over contiguous memory.

Legend: n numbers, m bytes.
"""

from __future__ import annotations

import torch

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
