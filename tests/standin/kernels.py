"""What the stand-in computes: torch's own CPU kernels, on its memory, on its streams.

Whatever torch has not got for this device type comes to :func:`run`, which sees that all tensors
lie on one device, as CUDA's kernels do, and launches the CPU's kernel on the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.standin.memory import Block, extent, view
from tests.standin.state import NAME, index_of, lanes, state, wait_for

aten = torch.ops.aten

ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
SPARSE_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCPU)
SPECIAL: dict[Any, Callable[..., Any]] = {}  # operation -> what is done instead
INSTEAD: dict[Any, Any] = {}  # operation -> another one, with a kernel of the CPU's
HOST_TOO: set[Any] = set()  # operations that take tensors of the host on purpose


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        lanes()  # has a look at what was freed
        special = SPECIAL.get(op) or SPECIAL.get(op.overloadpacket)
        return launch(op, args, kwargs) if special is None else special(*args, **kwargs)


# ---- tensors as the host's kernels see them ------------------------------------------------------


def is_here(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.device.type == NAME


def block_of(tensor: torch.Tensor) -> Block | None:
    """``None`` where there is no memory at all."""
    address = tensor.untyped_storage().data_ptr()
    return state().memory.used[address] if address else None


def blocks_of(tensors: Iterable[torch.Tensor]) -> list[Block]:
    found = [block_of(part) for each in tensors if is_here(each) for part in _parts(each)]
    return [block for block in found if block is not None]


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)


def _sparse(
    like: torch.Tensor, part: Callable[[torch.Tensor], torch.Tensor], place: str
) -> torch.Tensor:
    """The same, of other parts."""
    parts = map(part, _parts(like))
    return torch.sparse_coo_tensor(
        *parts, like.shape, device=place, is_coalesced=like.is_coalesced(), check_invariants=False
    )


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, for kernels of the CPU; kept as long as this lives."""
    if tensor.is_sparse:
        return _sparse(tensor, on_host, "cpu")
    block = block_of(tensor)
    if block is None:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return torch.empty(0, dtype=tensor.dtype).set_(
        block.content.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def make(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, index: int
) -> torch.Tensor:
    """A new one; nobody has written to it."""
    now = state()
    return now.memory.empty(shape, stride, dtype, (index, now.lanes.current(index)))


# ---- launching -----------------------------------------------------------------------------------


def launch(op: Any, args: Any, kwargs: Any) -> Any:
    """A kernel of the CPU's on the current stream."""
    now, leaves = state(), tree_leaves((args, kwargs))
    mine = {id(leaf): leaf for leaf in leaves if is_here(leaf)}
    index = _common_index(op, leaves)
    stream = now.lanes.current(index)
    aliases = {key: on_host(tensor) for key, tensor in mine.items()}
    own = {id(aliases[key]): tensor for key, tensor in mine.items()}
    args, kwargs = tree_map_only(
        (torch.Tensor, torch.device), lambda leaf: _to_host(leaf, aliases), (args, kwargs)
    )
    args = _numbers_as_tensors(op, args)
    written = _written(op, args, kwargs, own)
    results: list[Any] = []

    def work() -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad(), _dice(op, index):
            results.append(INSTEAD.get(op, op)(*args, **kwargs))

    read = [tensor for tensor in mine.values() if all(tensor is not each for each in written)]
    now.counts.launches += 1
    now.lanes.launch(stream, work, blocks_of(read), blocks_of(written))
    returns = op._schema.returns
    known = written and len(returns) <= len(written) and all(each.numel() for each in written)
    if known and not now.lanes.computes(stream):
        return written[0] if returns else None  # done when its turn comes
    now.lanes.drain(stream)
    for each in written:
        _grow(each, aliases[id(each)])
    if not all(isinstance(leaf, torch.Tensor | None) for leaf in tree_leaves(results[0])):
        wait_for(stream)  # the host is told a number
    return tree_map_only(torch.Tensor, lambda each: _bring(each, index, own), results[0])


def _grow(tensor: torch.Tensor, alias: torch.Tensor) -> None:
    """The kernel has found that the result needs another shape."""
    if tensor.is_sparse:
        new = _sparse(alias, lambda part: _bring(part, tensor.device.index, {}), str(tensor.device))
        aten.copy_sparse_to_sparse_.default.redispatch(SPARSE_ON_CPU, tensor, new)
    elif tensor.shape != alias.shape:
        tensor.resize_(alias.shape)
        on_host(tensor).copy_(alias)


def _numbers_as_tensors(op: Any, args: Sequence[Any]) -> list[Any]:
    """Torch shows a tensor that stands for a number as that number, and does not take it back."""
    wanted = [argument.type.kind() == "TensorType" for argument in op._schema.arguments]
    return [
        torch.tensor(value) if wants and isinstance(value, int | float) else value
        for value, wants in zip(args, wanted, strict=False)
    ]


def _to_host(leaf: Any, aliases: dict[int, torch.Tensor]) -> Any:
    return torch.device("cpu") if isinstance(leaf, torch.device) else aliases.get(id(leaf), leaf)


def _written(op: Any, args: Any, kwargs: Any, own: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """The arguments that the operation changes."""
    found = []
    for number, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += [own[id(each)] for each in tree_leaves(value) if id(each) in own]
    return found


def _bring(tensor: torch.Tensor, index: int, own: dict[int, torch.Tensor]) -> torch.Tensor:
    """A result: an argument, a view of one, or new."""
    if (same := own.get(id(tensor))) is not None:
        return same
    if tensor.is_sparse:
        return _sparse(tensor, lambda part: _bring(part, index, own), f"{NAME}:{index}")
    start = tensor.untyped_storage().data_ptr()
    for each in (part for whole in own.values() for part in _parts(whole)):
        if start and each.untyped_storage().data_ptr() == start and each.dtype == tensor.dtype:
            return view(each, tensor.shape, tensor.stride(), tensor.storage_offset())
    dense = tensor if is_dense(tensor) else tensor.contiguous()
    new = make(dense.shape, dense.stride(), dense.dtype, index)
    on_host(new).copy_(dense)
    now = state().lanes
    now.used(now.current(index), blocks_of([new]))
    return new


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side, each at a place of its own."""
    return extent(tensor.shape, tensor.stride()) == tensor.numel()


def _common_index(op: Any, leaves: Sequence[Any]) -> int:
    """Where the operation runs; raises RuntimeError where that is not one device, as CUDA does."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    places = {tensor.device for tensor in tensors if is_here(tensor)}
    if op.overloadpacket not in HOST_TOO:  # a number of the host may take part anywhere
        places |= {tensor.device for tensor in tensors if not is_here(tensor) and tensor.ndim}
    if len(places) > 1:
        one, other, *_ = sorted(map(str, places))
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{one} and {other}! (when checking arguments of {op})"
        )
    if not places:
        places = {leaf for leaf in leaves if isinstance(leaf, torch.device)}
    return index_of(*places)


@contextmanager
def _dice(op: Any, index: int) -> Iterator[None]:
    """Random numbers are the device's own."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        yield
        return
    before, generator = torch.get_rng_state(), state().generators[index]
    torch.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(before)
