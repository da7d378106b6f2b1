"""What makes, views and copies the stand-in's memory, and what tells the host what lies there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.standin.kernels import (
    HOST_TOO,
    INSTEAD,
    ON_CPU,
    SPARSE_ON_CPU,
    SPECIAL,
    aten,
    blocks_of,
    is_dense,
    is_here,
    make,
    on_host,
)
from tests.standin.state import index_of, state, wait_for

# ---- making, viewing -----------------------------------------------------------------------------


def _strides(size: Sequence[int], memory_format: Any) -> tuple[int, ...]:
    form = torch.contiguous_format if memory_format is None else memory_format
    return torch.empty(size, device="meta", memory_format=form).stride()


def _empty(
    size: Sequence[int],
    *,
    dtype: Any = None,
    device: Any = None,
    memory_format: Any = None,
    **_: Any,
) -> torch.Tensor:
    return _empty_strided(size, _strides(size, memory_format), dtype=dtype, device=device)


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any
) -> torch.Tensor:
    return make(size, stride, dtype or torch.get_default_dtype(), _index(device))


def _resize(tensor: torch.Tensor, size: Sequence[int], *, memory_format: Any = None) -> Any:
    stride = _strides(size, memory_format)
    needed = (tensor.storage_offset() + torch.Size(size).numel()) * tensor.itemsize
    if needed > tensor.untyped_storage().nbytes():
        new = make(size, stride, tensor.dtype, tensor.device.index)
        return _set(tensor, new.untyped_storage(), 0, size, stride)
    return _set(tensor, tensor.untyped_storage(), tensor.storage_offset(), size, stride)


def _as_cpu_does(op: Any, keys: Any = ON_CPU) -> Callable[..., Any]:
    """Only shapes: the same code whatever the device."""
    return lambda *args, **kwargs: op.redispatch(keys, *args, **kwargs)


_set = _as_cpu_does(aten.set_.source_Storage_storage_offset)
_index = index_of


# ---- copying -------------------------------------------------------------------------------------


def _copy_from(
    source: torch.Tensor, destination: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Between host and device, or within a device, or between two."""
    source = source.expand_as(destination)
    indices = [tensor.device.index for tensor in (source, destination) if is_here(tensor)]
    lanes = state().lanes
    streams = {lanes.current(index) for index in indices}
    for number in streams if len(streams) > 1 else ():
        lanes.synchronise(lanes.record(number))  # both devices come first
    stream, crosses = max(streams), source.device.type != destination.device.type
    if crosses:
        return _cross(source, destination, stream, non_blocking)
    state().counts.launches += 1
    _launch_copy(source, destination, stream)
    if lanes.computes(stream):
        lanes.drain(stream)
    return destination


def _launch_copy(source: torch.Tensor, destination: torch.Tensor, stream: int) -> None:
    here, there = (on_host(t) if is_here(t) else t.detach() for t in (source, destination))

    def work() -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            there.copy_(here)

    lanes = state().lanes
    lanes.launch(stream, work, blocks_of([source]), blocks_of([destination]))


def _cross(
    source: torch.Tensor, destination: torch.Tensor, stream: int, non_blocking: bool
) -> torch.Tensor:
    """The bus. What is not page-locked, or has to be converted, holds the host up."""
    now, out = state(), is_here(source)
    now.counts.crossed(source.nbytes if out else destination.nbytes, out)
    host = destination if out else source
    alike = source.dtype == destination.dtype and source.stride() == destination.stride()
    if non_blocking and alike and now.is_locked(host):
        _spoil(on_host(destination) if is_here(destination) else destination)
        _launch_copy(source, destination, stream)
        return destination
    _launch_copy(source, destination, stream)
    now.counts.blocking += 1
    wait_for(stream)
    return destination


def _spoil(tensor: torch.Tensor) -> None:
    """Until the copy is made it holds nothing that makes sense."""
    number = tensor.is_floating_point() or tensor.is_complex()
    tensor.detach().fill_(float("nan") if number else 1 if tensor.dtype is torch.bool else 77)


def _local_scalar(tensor: torch.Tensor) -> Any:
    wait_for(state().lanes.current(tensor.device.index))
    return on_host(tensor).item()


def _record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    for block in blocks_of([tensor]):
        block.recorded.add(stream.stream_id)


def _convolution_backward(
    by_output: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *options: Any
) -> Any:
    *_, transposed, _, groups, _ = options
    bias = weight.shape[1] * groups if transposed else weight.shape[0]
    return aten.convolution_backward(by_output, x, weight, [bias], *options)


def _foreach_norm(tensors: Sequence[torch.Tensor], order: Any = 2, dtype: Any = None) -> Any:
    """One kernel where all are alike, which adds in another order than one for each tensor."""
    norm = torch.linalg.vector_norm
    alike = len({tensor.dtype for tensor in tensors}) == 1
    if not (alike and all(is_dense(tensor) for tensor in tensors)):
        return [norm(tensor, order, dtype=dtype) for tensor in tensors]
    flat = [tensor.flatten() for tensor in tensors]
    halves = [[h for h in each.tensor_split(2) if len(h)] or [each] for each in flat]
    parts = [torch.stack([norm(h, order, dtype=dtype) for h in two]) for two in halves]
    return [norm(each, order) for each in parts]


SPECIAL |= {
    aten.empty.memory_format: _empty,
    aten.empty_strided: _empty_strided,
    aten.resize_: _resize,
    aten._copy_from: _copy_from,
    aten._copy_from_and_resize: lambda source, to: _copy_from(source, _resize(to, source.shape)),
    aten._local_scalar_dense: _local_scalar,
    aten.record_stream: _record_stream,
    aten._fused_sdp_choice: lambda *_, **__: 0,  # in torch's plain operations
}
SPECIAL |= {
    op: _as_cpu_does(op)
    for op in (
        aten.as_strided.default,
        aten.view.default,
        aten._reshape_alias.default,
        aten.unfold.default,
        aten.set_.source_Storage,
        aten.set_.source_Storage_storage_offset,
        aten.set_.source_Tensor,
    )
}
SPECIAL |= {
    op: _as_cpu_does(op, SPARSE_ON_CPU)
    for op in (
        aten._sparse_coo_tensor_with_dims.default,
        aten._sparse_coo_tensor_with_dims_and_tensors.default,
        aten._indices.default,
        aten._values.default,
        aten.indices.default,
        aten.values.default,
        aten._nnz.default,
        aten.sparse_dim.default,
        aten.dense_dim.default,
        aten.is_coalesced.default,
        aten._coalesced_.default,
    )
}
INSTEAD |= {
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._efficientzerotensor.default: aten.zeros.default,
    aten.convolution_overrideable.default: aten.convolution.default,
    aten.convolution_backward_overrideable.default: _convolution_backward,
}
HOST_TOO |= {
    aten.index,
    aten.index_put,
    aten.index_put_,
    aten._index_put_impl_,
    aten._pack_padded_sequence,
    aten._pad_packed_sequence,
}
