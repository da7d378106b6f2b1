"""Gradients and parameters of a worker that computes on a GPU.

The rows of shared memory are page-locked, so that the copies run beside the computation: gradients
go out in buckets on a lane of their own as backward produces them, parameters come back on another
before the next forward: what the server has stepped already while it steps the rest, and what is
left with the release. (Where the update is made while workers compute:
:mod:`hybridtrain.engine.worker.replica_staged`.) Nothing but copies between device and host is
needed: no NCCL, no peer access.

Whatever lets the server change what lies in host memory (a push) comes after the last copy from
there has been made: :meth:`CudaReplica.writes` waits for it.

Legend: N parameters, P elements of one dtype's buffer, W workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from hybridtrain.engine.memory import Store, pack
from hybridtrain.engine.memory.layout import Slot
from hybridtrain.engine.memory.store import elements
from hybridtrain.engine.protocol.messages import Writes
from hybridtrain.engine.worker.device import (
    Incoming,
    Lane,
    Outgoing,
    PageLocked,
    Streams,
    part_bytes,
)
from hybridtrain.engine.worker.replica import (
    Leads,
    Replica,
    has_later_hooks,
    tells_writes,
    written_behind,
)
from hybridtrain.engine.worker.row_encoder import RowEncoder

# How often a worker looks how far an update is: before it begins, and while it runs.
_NOT_BEGUN_S, STEPPING_S = 1e-3, 2e-4


class CudaReplica(Replica):
    """Parameters that live on a GPU, rows and masters in page-locked host memory.

    Args:
        parameters: the module's, on the device, in the order of the layout's slots.
        store: the shared buffers.
        worker: whose row.
        eager: send gradients while backward runs. Only where nobody reads or changes ``.grad``
            between backward and step.
        streams: of the device.
        encoder: encodes gradients on the device; then none is sent eagerly.
        leads: whether this worker speaks for all now; ``None``: worker 0 does.
    """

    streams: Streams

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        store: Store,
        worker: int,
        eager: bool,
        streams: Streams,
        encoder: RowEncoder | None = None,
        leads: Leads | None = None,
    ) -> None:
        self._parameters, self.streams = list(parameters), streams
        slots = store.layout.slots
        self._locked = PageLocked(streams, store, worker)
        self._slots, self._turns, self._shows = slots, store.turns, False
        self._rows_of = [  # of each turn; host, page-locked
            [store.gradient(row, slot) for slot in slots] for row in store.rows_of(worker)
        ]
        self._outgoing_of = [Outgoing(streams, rows) for rows in self._rows_of]
        self._rows, self._outgoing = self._rows_of[0], self._outgoing_of[0]
        self._sources_of = {  # of each buffer; host, page-locked
            buffer: [store.parameter(worker, slot, buffer) for slot in slots]
            for buffer in store.buffers
        }
        self.incoming = Incoming(streams, self._parameters, self._sources)
        self._tells_writes = tells_writes(store, worker, leads)
        self._following = list(range(len(slots)))
        self._counts = [0] * len(slots)  # torch's, of changes in place
        self._norms: dict[int, torch.Tensor] = {}  # () float64 each, on the device
        self._means_taken: Any = None  # a mark
        self._sent: set[int] = set()
        self._known_finite: set[int] = set()  # whose gradients lie in the row, finite
        self.encoder = encoder
        self._eager, self._closed = eager and encoder is None, False
        self._watch_progress(store)
        self._watched: set[int] = set()
        for number in range(len(slots)):
            self._watch(number)
        self.refresh()

    def _watch_progress(self, store: Store) -> None:
        """Parameters are to be copied while an update steps the rest, if they are many."""
        n_bytes = sum(p.nbytes for p in self._parameters)
        self._part_bytes = part_bytes(n_bytes)
        # Elsewhere the masters move while workers compute, or a copy follows them in the server.
        in_place = not store.copies and not store.lock_free
        takes_parts = in_place and n_bytes >= 2 * self._part_bytes  # or none is worth a copy
        self._progress = store.progress if takes_parts else None
        self._stops = [_stop_in_masters(slot) for slot in self._slots]
        self._taken: set[int] = set()  # copied before the release of the update ``_taken_of``
        self._taken_of = self._whole_of = self._update_number()
        if self._progress is not None:
            self._progress.watch()

    @property
    def _sources(self) -> list[torch.Tensor]:
        """What the worker's parameters are, in host memory."""
        turns, sources_of = self._turns, self._sources_of
        if turns is None:
            return sources_of[0]
        return sources_of[turns.read if turns.read in sources_of else turns.MASTERS]

    def _turn(self) -> bool:
        """Write to the row of this turn from now on; returns whether it is another one."""
        before = self._rows
        if self._turns is not None:
            self._turns.take()
            self._rows = self._rows_of[self._turns.row]
            self._outgoing = self._outgoing_of[self._turns.row]
        if moved := self._rows is not before:
            self._sent.clear()
            self._known_finite.clear()
        return moved

    # ---- gradients ------------------------------------------------------------------------------

    def _watch(self, number: int) -> None:
        if not self._eager or number in self._watched or not self._parameters[number].requires_grad:
            return
        self._watched.add(number)

        def note(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if self.adding or gradient is None or has_later_hooks(parameter):
                return
            if gradient.is_sparse:
                return  # its indices would have to be waited for
            self._outgoing.add(number, gradient)
            self._sent.add(number)
            self._known_finite.discard(number)

        self._parameters[number].register_post_accumulate_grad_hook(note)

    def _settle_gradients(self) -> None:
        """All that are on their way have arrived in the row."""
        while (bucket := self._outgoing.arrived()) is not None:
            self._known_finite.difference_update(bucket.numbers)  # an earlier copy was another
            self._known_finite.update(self._outgoing.finite(bucket))

    def collect(self, numbers: Sequence[int], as_they_are: bool = False) -> tuple[int, ...]:
        if self._means_taken is not None:  # what is pushed lets the server write other means
            self.streams.synchronise(self._means_taken)
            self._means_taken = None
        return super().collect(numbers, as_they_are)

    @property
    def meanwhile(self) -> Callable[[], float | None]:
        return self.take_stepped

    def collect_whole(self, numbers: Sequence[int]) -> tuple[int, ...]:
        own, packed = self._parameters, []
        for number in numbers:
            gradient = own[number].grad
            if gradient is None:
                continue
            if gradient.is_sparse and number in self._sparse:
                packed.append(pack(number, gradient.detach(), self._rows[number]))
            elif number not in self._sent or gradient.is_sparse:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                self._known_finite.discard(number)
                self._outgoing.add(number, dense.detach())
        self._outgoing.close()
        self._fetch_next()
        self._settle_gradients()
        if packed:
            self.streams.synchronise(self.streams.record(Lane.COMPUTE))
        self._sent.clear()
        absent = tuple(n for n in numbers if own[n].grad is None)
        self.finite, self.packed = frozenset(self._known_finite.difference(absent)), tuple(packed)
        self._known_finite.clear()
        return absent

    def leave_out(self, numbers: Iterable[int]) -> None:
        self._outgoing.close()
        self._settle_gradients()
        self._sent.difference_update(numbers)
        self._known_finite.difference_update(numbers)

    def take_means(self, gradients: list[torch.Tensor], means: list[torch.Tensor]) -> None:
        self.streams.copy(Lane.COMPUTE, gradients, means)
        self._means_taken = self.streams.record(Lane.COMPUTE)

    # ---- parameters -----------------------------------------------------------------------------

    def follow(self, numbers: Iterable[int]) -> None:
        self._following = sorted(numbers)
        self._taken.clear()
        self._take_norms(self._following)
        self._take_counts(self._following)

    def admit(self, numbers: Iterable[int], sparse: bool) -> None:
        for number in numbers:
            self._watch(number)
        known = set(self._sparse)
        self._sparse = known | set(numbers) if sparse else known - set(numbers)
        new = sorted(set(numbers) - set(self._following))
        self._following = sorted([*self._following, *new])
        # Their norms are those before training: writes to them while they were frozen are found.
        self._take_norms([number for number in new if number not in self._norms])

    def _fetch_next(self) -> None:
        """Queue the copies of all that the next release will bring, if that is known by now."""

    def refresh(self, keep: bool = False) -> None:
        """Queue the copies; what uses the parameters runs after them."""
        if not self._closed:
            self._turn()
            self._take_released()

    def _take_released(self) -> None:
        self._shows = False
        self._whole_of = self._update_number()
        taken = self._taken if self._whole_of == self._taken_of else set()
        self._copy([n for n in self._following if n not in taken])
        self.incoming.hold_compute()
        self._taken.clear()

    def take_stepped(self) -> float | None:
        """Queue the copies of what the update under way has stepped so far, if they are many.

        Only while this worker waits for its release, so that nothing reads its parameters. Returns
        after how many seconds there may be more, or ``None``: not before the release.
        """
        if self._progress is None or self._closed:
            return None
        number, elements = self._progress.read()
        if not self._awaits_update:
            return None
        if number == self._whole_of:
            return _NOT_BEGUN_S
        if number != self._taken_of:
            self._taken_of = number
            self._taken.clear()
        rest = [n for n in self._following if n not in self._taken]
        new = [n for n in rest if self._stops[n] <= elements]
        if sum(self._parameters[n].nbytes for n in new) >= self._part_bytes:
            self._take(new)
            self._taken.update(new)
        return STEPPING_S if len(new) < len(rest) else None

    @property
    def _awaits_update(self) -> bool:
        """Whether the update whose progress has just been read is one that this worker awaits."""
        return True

    def _take(self, numbers: list[int]) -> None:
        self._copy(numbers)

    def _update_number(self) -> int:
        """The number of the update that was begun last."""
        return self._progress.read().number if self._progress is not None else 0

    def _copy(self, numbers: list[int], sources: Sequence[torch.Tensor] | None = None) -> None:
        looks = self._tells_writes() or self._turns is not None
        note = self._take_fingerprints_on_the_way if looks else self._take_counts
        self.incoming.copy(numbers, note, self._sources if sources is None else sources)

    def written(self, alike: bool) -> Writes:
        counts = self._counts
        seen = any(self._parameters[n]._version != counts[n] for n in self._following)
        return self.writes() if alike or seen else {}

    def writes(self) -> Writes:
        behind = self._turns is not None and self._turns.behind
        changed = self._changed(self._following if behind or self._tells_writes() else ())
        if changed and behind:
            raise written_behind([self._slots[number].name for number in changed])
        return changed

    def apart(self) -> Writes:
        return self._changed(range(len(self._parameters)))

    def _changed(self, numbers: Sequence[int]) -> Writes:
        """Seen by fingerprint: comparing with the host would take the bus for a whole pass.

        A worker that has not spoken for all has no norms; there torch's counts have to do.
        """
        self._settle()
        if self._closed or not numbers:
            return {}
        known = [number for number in numbers if number in self._norms]
        norms = _norms([self._parameters[number] for number in known])
        moved = _differ([self._norms[number] for number in known], norms) if known else []
        changed = {number for number, yes in zip(known, moved, strict=True) if yes}
        counted = set(numbers).difference(known if self._shows else ())  # swapped in and out again
        return {
            number: elements(self._parameters[number])
            for number in numbers
            if number in changed
            or (number in counted and self._parameters[number]._version != self._counts[number])
        }

    def _settle(self) -> None:
        """The host waits for all copies to the device; afterwards their sources may change."""
        self.incoming.settle()

    def _take_fingerprints_on_the_way(self, numbers: Sequence[int]) -> None:
        """Torch's count of changes in place and, since ``.data`` evades it, norms.

        The norms behind the copies; torch has counted these when they were queued.
        """
        self.streams.do(Lane.BACK, partial(self._take_norms, numbers))
        self._take_counts(numbers)

    def _take_norms(self, numbers: Sequence[int]) -> None:
        """They stay on the device: nothing waits for them here."""
        taken = _norms([self._parameters[number] for number in numbers])
        self._norms.update(zip(numbers, taken, strict=True))

    def _take_counts(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._counts[number] = self._parameters[number]._version

    # ---- where an update is made while workers compute ------------------------------------------

    @property
    def shows_masters(self) -> bool:
        return self._shows

    def show_masters(self) -> None:
        if self._turns is not None and self._turns.behind and not self._shows:
            self._copy(self._following, self._sources_of[self._turns.MASTERS])
            self.incoming.hold_compute()
            self._shows = True

    def put_back(self) -> None:
        if self._shows:
            self.writes()
            self.refresh()

    def read_behind(self, number: int) -> list[torch.Tensor]:
        held = [] if self._turns is None else self._turns.held()
        return [self._sources_of[buffer][number].clone() for buffer in held]

    def close(self) -> None:
        """Nothing is on its way any more, and the memory is as it was.

        The parameters may leave the device now: nothing is read from them or written to them.
        """
        self._closed = True
        self._settle()
        self._outgoing.close()
        self._settle_gradients()
        self._locked.release()
        for outgoing in self._outgoing_of:
            outgoing.release()


def _stop_in_masters(slot: Slot) -> float:
    """Where it ends in the float32 masters; never, if it is of another dtype."""
    return slot.offset + slot.numel if slot.dtype == torch.float32 else math.inf


@torch.no_grad()
def _norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The norm of each, on the device, summed in float64 so that one element's change shows.

    Torch takes norms of like tensors in a few kernels, and else one by one, which rounds otherwise.
    So that a parameter's norms do not depend on which others they are taken with, like ones are
    taken together.
    """
    like: dict[tuple[torch.dtype, int], list[int]] = {}
    for place, tensor in enumerate(tensors):
        alone = 0 if _is_dense(tensor) else 1 + place
        like.setdefault((tensor.dtype, alone), []).append(place)
    found: dict[int, torch.Tensor] = {}
    for places in like.values():
        group = [_measurable(tensors[place]) for place in places]
        found.update(zip(places, torch._foreach_norm(group, 2.0, torch.float64), strict=True))
    return [found[place] for place in range(len(tensors))]


@torch.no_grad()
def _differ(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> list[bool]:
    """Which norms are not the same; the host waits for the answer."""
    moved = torch._foreach_sub(list(after), list(before))
    return (torch.stack(moved) != 0).tolist()


def _measurable(tensor: torch.Tensor) -> torch.Tensor:
    """As real numbers that have a norm: a frozen base may be quantised to int8."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.is_floating_point() else tensor.sum(dtype=torch.float64)  # no copy


def _is_dense(tensor: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wide = formats.get(tensor.dim(), torch.contiguous_format)
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=wide)
