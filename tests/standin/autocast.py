"""Mixed precision on the stand-in: what multiplies matrices does it in the narrow dtype."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tests.standin.kernels import aten
from tests.standin.state import NAME

_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
NARROW = (
    aten.linear.default,
    aten.matmul.default,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.conv1d.default,
    aten.conv2d.default,
)


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.dtype is torch.float32 and tensor.device.type == NAME
    return tensor.to(torch.get_autocast_dtype(NAME)) if wide else tensor


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_KEY):
        args, kwargs = tree_map_only(torch.Tensor, _narrow, (args, kwargs))
        return op(*args, **kwargs)


def register(everything: Any, some: Any) -> None:
    """By a library for all operations, and one for aten's."""
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for op in NARROW:
        some.impl(op, partial(_run, op), "AutocastPrivateUse1")
