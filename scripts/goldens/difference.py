"""Where two outcomes differ: nested mappings and lists of numbers, texts and tensors."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

_SHOWN = 60  # characters of a value


@dataclass(frozen=True)
class Difference:
    """One place where they are not equal to the bit; ``size`` where that is a number."""

    path: str
    then: str
    now: str
    size: float | None = None


def differences(then: Any, now: Any, path: str = "") -> Iterator[Difference]:
    """Every place that is not equal to the bit: also a type, a sign of zero, a missing entry."""
    if type(then) is not type(now):
        yield Difference(path, _short(then), _short(now))
    elif isinstance(then, dict):
        for key in dict.fromkeys((*then, *now)):
            inner = f"{path}/{key}" if path else str(key)
            if key in then and key in now:
                yield from differences(then[key], now[key], inner)
            else:
                sides = (_short(side[key]) if key in side else "–" for side in (then, now))
                yield Difference(inner, *sides)
    elif isinstance(then, (list, tuple)):
        if len(then) != len(now):
            yield Difference(path, f"{len(then)} entries", f"{len(now)} entries")
        for place, (one, other) in enumerate(zip(then, now, strict=False)):
            yield from differences(one, other, f"{path}[{place}]")
    elif isinstance(then, torch.Tensor):
        yield from _of_tensors(then, now, path)
    elif isinstance(then, float):
        if struct.pack("d", then) != struct.pack("d", now):
            yield Difference(path, repr(then), repr(now), abs(then - now))
    elif then != now:
        yield Difference(path, *_around(then, now))


def _of_tensors(then: torch.Tensor, now: torch.Tensor, path: str) -> Iterator[Difference]:
    kinds = [f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in (then, now)]
    if kinds[0] != kinds[1]:
        yield Difference(path, *kinds)
        return
    bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (then, now)]
    if not torch.equal(*bits):
        size = float((then.double() - now.double()).abs().max()) if then.numel() else math.nan
        yield Difference(path, kinds[0], "other bits", size)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {list(value.shape)}"
    text = " ".join(str(value).split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _around(then: Any, now: Any) -> tuple[str, str]:
    """Two texts from a little before the place where they part."""
    if not isinstance(then, str) or len(then) <= _SHOWN >= len(now):
        return _short(then), _short(now)
    alike = next(
        (n for n, (a, b) in enumerate(zip(then, now, strict=False)) if a != b),
        min(len(then), len(now)),
    )
    begin = max(0, alike - 15)
    return "…" + _short(then[begin:]), "…" + _short(now[begin:])
