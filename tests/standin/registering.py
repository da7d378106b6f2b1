"""Torch is told of the stand-in: its devices, its kernels. For the rest of a process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.standin import autocast, copies, pinned, recurrent  # noqa: F401  (what is special)
from tests.standin.engine import count_devices, start_threads
from tests.standin.kernels import INSTEAD, run
from tests.standin.state import N_DEVICES, NAME

_kept: list[Any] = []  # torch keeps no reference of its own


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


def register() -> None:
    """Once in a process.

    A module's parameters stay the same objects when it is moved: for CUDA torch puts other memory
    under them, for a device type of somebody's own it would make new ones.
    """
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.UntypedStorage.clone = _clone  # type: ignore[method-assign]
    hooks, guard = _Hooks(), _Guard()
    with torch.enable_grad():
        torch.ones((), requires_grad=True).backward()  # Autograd counts devices, and finds none
    count_devices(guard, N_DEVICES)
    torch._C._acc.register_python_privateuseone_hook(hooks)
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    # After a fork torch replaces its pool of threads at the first use; Autograd's threads, one for
    # each device, would do that at the same time, and one of them would find none.
    torch.set_num_threads(torch.get_num_threads())
    start_threads()
    everything, some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    for key in ("PrivateUse1", "SparsePrivateUse1"):
        everything.fallback(run, key)
    for op in _one_kernel():
        some.impl(op, partial(run, op), "PrivateUse1")
    for op in _registered("SparseCPU"):
        some.impl(op, partial(run, op), "SparsePrivateUse1")
    autocast.register(everything, some)
    pinned.register()
    _kept.extend([hooks, guard, everything, some])


_clone_elsewhere = torch.UntypedStorage.clone


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """As a tensor: torch would ask an allocator that no device type in Python can have."""
    if storage.device.type != NAME:
        return _clone_elsewhere(storage)
    content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return content.clone().untyped_storage()


def _one_kernel() -> Iterator[Any]:
    """What torch would refuse, or compose of many kernels, for a device type that it knows not."""
    yield from INSTEAD
    yield from (op for op in _registered("CPU") if op.name().startswith("aten::_foreach_"))


def _registered(key: str) -> Iterator[Any]:
    """The operations that torch has a kernel for under a key."""
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(key):
        if name.startswith("aten::"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            yield getattr(getattr(torch.ops.aten, packet), overload or "default")
