"""Gradients and parameters of a worker that computes on a GPU.

The rows of shared memory are page-locked, so that the copies run beside the computation: gradients
go out in buckets on a stream of their own as backward produces them, parameters come back before
the next forward. Nothing but copies between device and host is needed: no NCCL, no peer access.

Legend: P elements of one dtype's buffer, W workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from hybridtrain.errors import UserError
from hybridtrain.exchange import Exchange, HostExchange, elements, has_later_hooks, tells_writes
from hybridtrain.memory import Packed, Store, pack
from hybridtrain.messages import Writes

BUCKET_BYTES = 4 * 2**20


class Streams(Protocol):
    """The side stream, as far as it is needed here (tests bring a fake one)."""

    def after_compute(self) -> AbstractContextManager[Any]:
        """Work inside runs on the side stream, after what the compute stream has queued so far."""
        ...

    def wait_for_copies(self) -> None:
        """Block the host until the side stream is idle."""
        ...

    def pin(self, tensor: torch.Tensor) -> None:
        """Page-lock the memory of a host tensor."""
        ...


class CudaStreams:
    """The real ones.

    Args:
        device: the worker's GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def after_compute(self) -> AbstractContextManager[Any]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def wait_for_copies(self) -> None:
        self._stream.synchronize()

    def pin(self, tensor: torch.Tensor) -> None:
        if tensor.numel() == 0:
            return
        n_bytes = tensor.numel() * tensor.element_size()
        code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), n_bytes, 0))
        if code != 0:
            raise UserError(
                f"{n_bytes / 2**20:,.0f} MiB of host memory could not be page-locked for "
                f"{self._device} (CUDA error {code}); raise the limit of locked memory "
                "(ulimit -l), use fewer workers, or a smaller model"
            )


def open_exchange(
    parameters: Sequence[torch.nn.Parameter], store: Store, worker: int, eager: bool
) -> Exchange:
    """The one for the device that the parameters lie on."""
    kind = CudaExchange if parameters[0].is_cuda else HostExchange
    return kind(parameters, store, worker, eager)


class CudaExchange:
    """Parameters that live on a GPU, rows and masters in page-locked host memory.

    Args:
        parameters: the module's, on the device, in the order of the layout's slots.
        store: the shared buffers.
        worker: whose row.
        eager: send gradients while backward runs. Only where nobody reads or changes ``.grad``
            between backward and step.
        streams: for tests.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        store: Store,
        worker: int,
        eager: bool,
        streams: Streams | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._streams = streams or CudaStreams(self._parameters[0].device)
        slots = store.layout.slots
        self._rows = [store.gradient(worker, slot) for slot in slots]  # host, page-locked
        self._sources = [store.parameter(worker, slot) for slot in slots]  # host, page-locked
        sources = store.copies[worker] if store.private_parameters else store.masters
        for flat in (*store.gradients[worker].values(), *sources.values()):
            self._streams.pin(flat)
        self._tells_writes = tells_writes(store, worker)
        self._following = list(range(len(slots)))
        self._pending: list[int] = []
        self._pending_bytes = 0
        self._sent: set[int] = set()
        self._sparse: set[int] = set()
        self._held: list[torch.Tensor] = []
        self._packed: list[Packed] = []
        self.packed: tuple[Packed, ...] = ()
        self._eager = eager
        self._watched: set[int] = set()
        for number in range(len(slots)):
            self._watch(number)
        self.refresh()

    def _watch(self, number: int) -> None:
        if not self._eager or number in self._watched or not self._parameters[number].requires_grad:
            return
        self._watched.add(number)

        def note(parameter: torch.Tensor) -> None:
            if parameter.grad is not None and parameter.grad.is_sparse:
                return  # its indices would have to be waited for
            self._pending.append(number)
            self._pending_bytes += parameter.numel() * parameter.element_size()
            if self._pending_bytes >= BUCKET_BYTES:
                self._send(self._pending)

        self._parameters[number].register_post_accumulate_grad_hook(note)

    def _send(self, numbers: list[int]) -> None:
        """Queue one bucket's copies behind the computation that has produced them."""
        with torch.no_grad(), self._streams.after_compute():
            for number in numbers:
                gradient = self._parameters[number].grad
                if gradient is not None and gradient.is_sparse and number in self._sparse:
                    self._held.append(gradient.detach().coalesce())  # until the copy is made
                    self._packed.append(pack(number, self._held[-1], self._rows[number]))
                elif gradient is not None:
                    dense = gradient.to_dense() if gradient.is_sparse else gradient
                    self._rows[number].copy_(dense, non_blocking=True)
        self._sent.update(numbers)
        self._pending, self._pending_bytes = [], 0

    def collect(self, numbers: Sequence[int]) -> tuple[int, ...]:
        own = self._parameters
        missing = [n for n in numbers if n not in self._sent or has_later_hooks(own[n])]
        self._send(sorted({*missing, *self._pending}))
        self._streams.wait_for_copies()
        self._sent.clear()
        self.packed, self._packed = tuple(self._packed), []
        self._held.clear()
        return tuple(n for n in numbers if self._parameters[n].grad is None)

    def keep_sparse(self, numbers: Iterable[int]) -> None:
        self._sparse = set(numbers)

    def follow(self, numbers: Iterable[int]) -> None:
        self._following = sorted(numbers)
        self._fingerprints = self._take_fingerprints()

    def admit(self, numbers: Iterable[int], sparse: bool) -> None:
        for number in numbers:
            self._watch(number)
        self._sparse = self._sparse | set(numbers) if sparse else self._sparse - set(numbers)
        (counts, norms), known = self._fingerprints, self._following
        self.follow({*known, *numbers})
        for place, number in enumerate(self._following):  # what was changed so far stays to be seen
            if number in known:
                before = known.index(number)
                self._fingerprints[0][place] = counts[before]
                self._fingerprints[1][place] = norms[before]

    def writes(self) -> Writes:
        """Seen by fingerprint: comparing with the host would take the bus for a whole pass."""
        (counts, norms), (counts_now, norms_now) = self._fingerprints, self._take_fingerprints()
        changed = (norms != norms_now).any(dim=1).tolist()
        changed = [a or b != c for a, b, c in zip(changed, counts, counts_now, strict=True)]
        if not self._tells_writes:
            return {}
        numbers = [n for n, yes in zip(self._following, changed, strict=True) if yes]
        return {number: elements(self._parameters[number]) for number in numbers}

    @torch.no_grad()
    def refresh(self) -> None:
        """Queue the copies; the next forward runs after them."""
        for number in self._following:
            self._parameters[number].copy_(self._sources[number], non_blocking=True)
        self._fingerprints = self._take_fingerprints()

    @torch.no_grad()
    def _take_fingerprints(self) -> tuple[list[int], torch.Tensor]:
        """Torch's count of in-place changes and, since ``.data`` evades it, norms, (followed, 2).

        The norms stay on the device: nothing waits for them here.
        """
        tensors = [self._parameters[number] for number in self._following]
        counts = [tensor._version for tensor in tensors]
        if not tensors:
            return counts, torch.empty(0, 2)
        norms = [_norms(tensors, order) for order in (1.0, 2.0)]
        return counts, torch.stack(norms, dim=1)


def _norms(tensors: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """One number per tensor, float64."""
    return torch.stack([norm.double() for norm in torch._foreach_norm(list(tensors), order)])
