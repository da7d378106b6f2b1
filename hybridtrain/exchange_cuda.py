"""Gradients and parameters of a worker that computes on a GPU.

The rows of shared memory are page-locked, so that the copies run beside the computation: gradients
go out in buckets on a lane of their own as backward produces them, parameters come back on another
before the next forward, or, if that is wanted, as it needs them. Nothing but copies between device
and host is needed: no NCCL, no peer access.

Whatever lets the server change what lies in host memory (a push, a bucket that is announced) comes
after the last copy from there has been made: :meth:`CudaExchange.writes` waits for it.

Legend: N parameters, P elements of one dtype's buffer, W workers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from hybridtrain.device import KINDS, Incoming, Lane, Outgoing, Streams
from hybridtrain.exchange import Exchange, HostExchange, elements, has_later_hooks, tells_writes
from hybridtrain.memory import Packed, Store, pack
from hybridtrain.messages import Writes

Announce = Callable[[tuple[int, ...]], None]


def open_exchange(
    parameters: Sequence[torch.nn.Parameter], store: Store, worker: int, eager: bool
) -> Exchange:
    """The one for the device that the parameters lie on."""
    device = parameters[0].device
    if device.type not in KINDS:
        return HostExchange(parameters, store, worker, eager)
    return CudaExchange(parameters, store, worker, eager, KINDS[device.type](device))


class CudaExchange:
    """Parameters that live on a GPU, rows and masters in page-locked host memory.

    Args:
        parameters: the module's, on the device, in the order of the layout's slots.
        store: the shared buffers.
        worker: whose row.
        eager: send gradients while backward runs. Only where nobody reads or changes ``.grad``
            between backward and step.
        streams: of the device.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        store: Store,
        worker: int,
        eager: bool,
        streams: Streams,
    ) -> None:
        self._parameters, self.streams = list(parameters), streams
        slots = store.layout.slots
        self._locked = _lock(streams, store, worker)
        self._rows = [store.gradient(worker, slot) for slot in slots]  # host, page-locked
        sources = [store.parameter(worker, slot) for slot in slots]  # host, page-locked
        self.incoming = Incoming(streams, self._parameters, sources)
        self._outgoing = Outgoing(streams, self._rows)
        self._tells_writes = tells_writes(store, worker)
        self._following = list(range(len(slots)))
        self._counts = [0] * len(slots)  # torch's, of changes in place
        self._norms: dict[int, torch.Tensor] = {}  # number -> (2,) float64, on the device
        self._sent: set[int] = set()
        self._sparse: set[int] = set()
        self.packed: tuple[Packed, ...] = ()
        self.adding = False
        self.announce: Announce | None = None
        self.finite: frozenset[int] = frozenset()  # looked at once they are on the host
        self._eager, self._closed = eager, False
        self._watched: set[int] = set()
        for number in range(len(slots)):
            self._watch(number)
        self.refresh()

    # ---- gradients ------------------------------------------------------------------------------

    def _watch(self, number: int) -> None:
        if not self._eager or number in self._watched or not self._parameters[number].requires_grad:
            return
        self._watched.add(number)

        def note(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if self.adding or gradient is None or gradient.is_sparse:
                return  # the indices of a sparse one would have to be waited for
            self._outgoing.add(number, gradient)
            self._sent.add(number)
            if self.announce is not None:
                self._tell(wait=False)

        self._parameters[number].register_post_accumulate_grad_hook(note)

    def _tell(self, wait: bool) -> None:
        """What has arrived in the row, or with ``wait``, all that is on its way."""
        while (bucket := self._outgoing.arrived(wait)) is not None:
            if self.announce is not None:
                self.announce(bucket.numbers)

    def collect(self, numbers: Sequence[int]) -> tuple[int, ...]:
        own, packed = self._parameters, []
        for number in numbers:
            gradient = own[number].grad
            if gradient is None:
                continue
            if gradient.is_sparse and number in self._sparse:
                packed.append(pack(number, gradient.detach(), self._rows[number]))
            elif number not in self._sent or gradient.is_sparse or has_later_hooks(own[number]):
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                self._outgoing.add(number, dense.detach())
        self._outgoing.close()
        self._tell(wait=True)
        if packed:
            self.streams.synchronise(self.streams.record(Lane.COMPUTE))
        self._sent.clear()
        self.packed = tuple(packed)
        return tuple(n for n in numbers if own[n].grad is None)

    def keep_sparse(self, numbers: Iterable[int]) -> None:
        self._sparse = set(numbers)

    # ---- parameters -----------------------------------------------------------------------------

    def follow(self, numbers: Iterable[int]) -> None:
        self._following = sorted(numbers)
        self.incoming.need_all()
        self._take_fingerprints(self._following)

    def admit(self, numbers: Iterable[int], sparse: bool) -> None:
        for number in numbers:
            self._watch(number)
        self._sparse = self._sparse | set(numbers) if sparse else self._sparse - set(numbers)
        new = sorted(set(numbers) - set(self._following))
        self._following = sorted([*self._following, *new])
        self.incoming.need_all()
        self._take_fingerprints(new)  # what was changed so far of the others stays to be seen

    def refresh(self) -> None:
        """Queue the copies; what uses the parameters runs after them."""
        if self._closed:
            return
        tells = self._tells_writes
        note = self._take_fingerprints_on_the_way if tells else self._take_counts
        self.incoming.start(self._following, note)

    def writes(self) -> Writes:
        """Seen by fingerprint: comparing with the host would take the bus for a whole pass."""
        self.incoming.settle()
        if self._closed or not self._tells_writes or not self._following:
            return {}
        tensors = [self._parameters[number] for number in self._following]
        norms = torch.stack([self._norms[number] for number in self._following])
        changed = (torch.stack(_fingerprints(tensors)) != norms).any(dim=1).tolist()
        return {
            number: elements(tensor)
            for number, tensor, yes in zip(self._following, tensors, changed, strict=True)
            if yes or tensor._version != self._counts[number]
        }

    def written_openly(self) -> bool:
        """Whether a parameter was changed by other means than ``.data``; takes no time."""
        return any(self._parameters[n]._version != self._counts[n] for n in self._following)

    def _take_fingerprints(self, numbers: list[int]) -> None:
        """Torch's count of changes in place and, since ``.data`` evades it, norms."""
        self._take_norms(numbers)
        self._take_counts(numbers)

    def _take_fingerprints_on_the_way(self, numbers: list[int]) -> None:
        """The same behind the copies; torch has counted these when they were queued."""
        self.streams.do(Lane.BACK, partial(self._take_norms, numbers))
        self._take_counts(numbers)

    def _take_norms(self, numbers: list[int]) -> None:
        """They stay on the device: nothing waits for them here."""
        taken = _fingerprints([self._parameters[number] for number in numbers])
        self._norms.update(zip(numbers, taken, strict=True))

    def _take_counts(self, numbers: list[int]) -> None:
        for number in numbers:
            self._counts[number] = self._parameters[number]._version

    def close(self) -> None:
        """Nothing is on its way any more, and the memory is as it was.

        The parameters may leave the device now: nothing is read from them or written to them.
        """
        self._closed = True
        self.incoming.settle()
        self._outgoing.close()
        self._tell(wait=True)
        for region in self._locked:
            self.streams.unlock(region)
        self._locked = []


def _lock(streams: Streams, store: Store, worker: int) -> list[torch.Tensor]:
    """Page-lock what crosses the bus, in whole pages; without it copies are slower, not wrong."""
    locked, refused, reason = [], 0, ""
    for start, stop in (store.region_of_gradients(worker), store.region_of_parameters(worker)):
        region = store.arena.tensor(start, stop - start, torch.uint8)
        if problem := streams.lock(region):
            refused, reason = refused + region.nbytes, problem
        else:
            locked.append(region)
    if refused:
        warnings.warn(
            f"{refused / 2**20:,.0f} MiB of host memory could not be page-locked for worker "
            f"{worker} ({reason}), so copies to and from its device will hold it up; raise the "
            "limit of locked memory (ulimit -l), or use fewer workers or a smaller model",
            stacklevel=2,
        )
    return locked


@torch.no_grad()
def _fingerprints(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Two norms of each, (2,) float64."""
    if not tensors:
        return ()
    columns = [_column(torch._foreach_norm(list(tensors), order)) for order in (1.0, 2.0)]
    return torch.stack(columns, dim=1).unbind()


def _column(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """One number of each, float64; few kernels where all have one dtype."""
    alike = len({norm.dtype for norm in norms}) == 1
    return torch.stack([norm if alike else norm.double() for norm in norms]).double()
