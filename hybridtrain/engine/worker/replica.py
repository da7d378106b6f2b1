"""Copy a worker's gradients to its row of shared memory, and hand them over.

On a CPU the parameters are views of shared memory, so nothing comes back by copy; gradients are
copied as soon as autograd has accumulated them, while they are in the cache, or all at once before
the push where somebody may still change them. On a GPU rows and parameters cross the bus: see
:mod:`hybridtrain.engine.worker.replica_cuda`.

User code may also write to parameters itself (weight clamping). Those that *follow* the masters,
which are those that an optimizer steps, are handed over with the next push; all others (a frozen
teacher moved by hand) are the worker's own business, as they are under all-reduce.

Legend: P elements of one dtype's buffer, W workers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from hybridtrain.engine.memory import Packed, Slot, Store, open_window, pack
from hybridtrain.engine.memory.sparse_rows import flat_view
from hybridtrain.engine.memory.store import elements
from hybridtrain.engine.protocol.messages import Writes
from hybridtrain.engine.worker.device import Streams
from hybridtrain.engine.worker.row_encoder import RowEncoder
from hybridtrain.errors import UserError

LARGE = 128 * 1024  # elements: below that, one pass over many tensors costs less than this
PIECE = 64 * 1024  # elements: 256 KiB of source and of copy, of a cache of half a MiB or more


class Pieces:
    """A place for a large tensor, cut into pieces.

    Args:
        place: (n,) or of any dense shape, floating point.
    """

    def __init__(self, place: torch.Tensor) -> None:
        self._shape, self._stride = place.shape, place.stride()
        self._pieces = flat_view(place).split(PIECE)
        self._total = torch.zeros((), dtype=_wide(place.dtype))

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether its elements lie in the same order, and are of the same kind."""
        same = tensor.shape == self._shape and tensor.stride() == self._stride
        return same and tensor.dtype == self._pieces[0].dtype and not tensor.is_sparse

    @torch.no_grad()
    def copy(self, source: torch.Tensor) -> bool:
        """Copy a tensor that fits; whether its sum is finite."""
        total = self._total.zero_()
        for piece, part in zip(self._pieces, flat_view(source.detach()).split(PIECE), strict=True):
            piece.copy_(part)
            total += piece.sum(dtype=total.dtype)
        return math.isfinite(float(total))


def worth_cutting(place: torch.Tensor) -> bool:
    """Whether a tensor is so large that looking at it afterwards would cost a pass over memory."""
    return place.numel() >= LARGE and place.is_floating_point()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


class Replica(Protocol):
    """The worker's side of one optimizer step."""

    packed: tuple[Packed, ...] = ()  # the sparse gradients that were collected last
    adding: bool = False  # what backward makes only adds up: nothing is to leave yet
    finite: frozenset[int] = frozenset()  # of the others: those that are known to be finite
    encoder: RowEncoder | None = None  # of gradients
    streams: Streams | None = None  # of the device
    encoded: int | None = None  # bytes at the row's front that stand for all collected last
    _sparse: Collection[int] = frozenset()  # whose sparse gradients stay sparse
    _parameters: Sequence[torch.nn.Parameter]

    @property
    def meanwhile(self) -> Callable[[], float | None] | None:
        """To be called while the worker awaits its release."""
        return None

    def adds(self, adding: bool) -> None:
        """Whether the next backward only adds up: nothing is to leave yet."""
        self.adding = adding

    def collect(self, numbers: Sequence[int], as_they_are: bool = False) -> tuple[int, ...]:
        """Bring these parameters' gradients to the row; returns the numbers that have none.

        ``as_they_are``: they are not encoded, whatever the exchange says.
        """
        self.encoded = None
        if self.encoder is not None and not as_they_are:
            self.encoded = self.encoder.encode(numbers, self._sparse)
        if self.encoded is None:
            return self.collect_whole(numbers)
        absent = tuple(n for n in numbers if self._parameters[n].grad is None)
        self.finite, self.packed = frozenset(numbers).difference(absent), ()
        return absent

    def collect_whole(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """As :meth:`collect`, without encoding."""

    def keep_sparse(self, numbers: Iterable[int]) -> None:
        """Sparse gradients of these, and of no others, stay sparse. At first, none does."""
        self._sparse = set(numbers)

    def leave_out(self, numbers: Iterable[int]) -> None:
        """These gradients do not count: forget which of them lie in the row already."""
        return

    @torch.no_grad()
    def take_means(self, gradients: list[torch.Tensor], means: list[torch.Tensor]) -> None:
        """Copy what the server has left in shared memory, which may change at the next push."""
        if gradients:
            torch._foreach_copy_(gradients, means)

    def follow(self, numbers: Iterable[int]) -> None:
        """These parameters follow the masters from now on, and no others. At first, all do."""

    def admit(self, numbers: Iterable[int], sparse: bool) -> None:
        """These follow as well: an optimizer has got them in mid-run (unfrozen layers).

        ``sparse``: it takes sparse gradients.
        """

    def writes(self) -> Writes:
        """Parameters that user code has changed since the last refresh, of those that follow."""

    def written(self, alike: bool) -> Writes:
        """Writes to send before the next push.

        ``alike``: all workers have made them since they met. Else a cheap look may miss some.
        """

    def apart(self) -> Writes:
        """Parameters changed by user code, also frozen ones, which do not follow the masters."""
        return self.writes()

    def unsent(self) -> Writes:
        """Writes behind the last exchange of an epoch, if no push will have them."""
        return {}

    def refresh(self, keep: bool = False) -> None:
        """The masters have moved: bring what follows up to date. Comes after ``writes``.

        ``keep``: parameters of the worker's own come back with :meth:`put_back`.
        """

    @property
    def shows_masters(self) -> bool:
        """Whether the module has the masters in place of what the worker computes with."""
        return False

    def show_masters(self) -> None:
        """Nobody trains now: the module has the masters, until :meth:`put_back`."""
        return

    def read_behind(self, number: int) -> list[torch.Tensor]:
        """If an update behind, copies of this parameter as the worker computes with it, and as it
        will with the next release where that is not the master."""
        return []

    def resume(self, read: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Training continues an update behind; the buffers in host memory have what was read.

        Args:
            read: by number, what :meth:`read_behind` has returned.
        """
        self.writes()
        self.refresh()

    def hold_masters(self) -> None:
        """Newer masters are about to be read, which the worker has not computed with."""
        return

    def put_back(self) -> None:
        """Training continues: the module has the worker's own parameters again."""
        return

    def forget(self) -> None:
        """Training begins with the masters."""
        return

    def changed(self) -> list[int]:
        """Own parameters that are not the masters, by number."""
        return []

    def close(self) -> None:
        """There will be no further step."""


Leads = Callable[[], bool]  # whether a worker speaks for all now


def tells_writes(store: Store, worker: int, leads: Leads | None) -> Leads:
    """Whether the server wants to know what this worker's user code has written.

    In lock-step all write alike, and worker 0 speaks for all, as its parameters are those that
    all-reduce would have saved; while it is lost another one ``leads``.
    """
    if store.private_parameters:
        return lambda: True
    return leads or (lambda: worker == 0)


def written_behind(names: Sequence[str]) -> UserError:
    """The error for parameters that user code has written to, where an update would be lost."""
    return UserError(
        f"user code has written to parameters ({', '.join(names)}) in the middle of an epoch, "
        "where they are one update behind (pipe_sgd), so that update would be lost; write where an "
        "epoch begins or ends, leave it to the optimizer, or use strategy=hybrid"
    )


def has_later_hooks(parameter: torch.Tensor) -> bool:
    """Whether a hook of the user's runs behind ours: an eager copy would miss what it changes."""
    hooks: Any = parameter._post_accumulate_grad_hooks
    return hooks is not None and len(hooks) > 1


# Elements from which on a gradient is copied as soon as autograd has made it. Smaller ones stay in
# the cache until the step, and are then copied together.
EAGER = 32 * 1024


class HostReplica(Replica):
    """Parameters that live in shared memory.

    Args:
        parameters: the module's, in the order of the layout's slots.
        store: the shared buffers.
        worker: whose row.
        eager: copy each gradient the moment autograd has accumulated it. Only where nobody reads
            or changes ``.grad`` between backward and step.
        encoder: encodes gradients; then none is copied eagerly.
        leads: whether this worker speaks for all now; ``None``: worker 0 does.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        store: Store,
        worker: int,
        eager: bool,
        encoder: RowEncoder | None = None,
        leads: Leads | None = None,
    ) -> None:
        self._parameters = list(parameters)
        slots, self._turns = store.layout.slots, store.turns
        self._rows_of = [  # of each turn, each in its parameter's shape
            [store.gradient(row, slot) for slot in slots] for row in store.rows_of(worker)
        ]
        self._windows = [open_window(store, worker, buffer) for buffer in store.buffers]
        self._copied: set[int] = set()
        self._seen: set[int] = set()  # of these: were found to be finite on the way
        self._turn()
        self._tells_writes = tells_writes(store, worker, leads)
        self._number_of, self._slots = {slot: n for n, slot in enumerate(slots)}, list(slots)
        self._following = list(slots)
        self._own: dict[Slot, torch.Tensor] = {}  # of no optimizer, where there are turns
        self._views = [self._window.view(slot) for slot in slots]
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.data = view
        self._made_dense: set[int] = set()
        self._worker = worker
        self.encoder, self._eager = encoder, eager and encoder is None
        self._watched: set[int] = set()
        for number in range(len(slots) if self._eager else 0):
            self._watch(number)

    def _turn(self) -> None:
        """Read, and write to, what this turn says."""
        turns = self._turns
        if turns is not None:
            turns.take()
            self._copied.clear()  # to the other row
            self._seen.clear()
        self._rows = self._rows_of[0 if turns is None else turns.row]
        self._window = self._windows[0 if turns is None else turns.read]
        self._shows = False

    def _watch(self, number: int) -> None:
        small = self._rows[number].numel() < EAGER
        if small or number in self._watched or not self._parameters[number].requires_grad:
            return
        self._watched.add(number)
        copied, seen = self._copied, self._seen

        def copy(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            if not (self.adding or parameter.grad.is_sparse or has_later_hooks(parameter)):
                self._rows[number].copy_(parameter.grad)
                copied.add(number)

        def copy_and_look(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            seen.discard(number)
            pieces = pieces_of[0 if self._turns is None else self._turns.row]
            if self.adding or has_later_hooks(parameter) or not pieces.fits(parameter.grad):
                copy(parameter)
                return
            copied.add(number)
            if pieces.copy(parameter.grad):
                seen.add(number)

        pieces_of = [Pieces(rows[number]) for rows in self._rows_of]
        take = copy_and_look if worth_cutting(self._rows[number]) else copy
        self._parameters[number].register_post_accumulate_grad_hook(take)

    def collect_whole(self, numbers: Sequence[int]) -> tuple[int, ...]:
        absent, rows, gradients, packed = [], [], [], []
        seen = self._seen.intersection(numbers)
        for number in numbers:
            gradient, row = self._parameters[number].grad, self._rows[number]
            if gradient is None:
                absent.append(number)
            elif gradient.is_sparse and number in self._sparse:
                packed.append(pack(number, gradient.detach(), row))
            elif gradient.is_sparse:
                self._warn_of_dense(number)
                row.copy_(gradient.to_dense())
            elif number not in self._copied:
                rows.append(row)
                gradients.append(gradient)
                seen.discard(number)
        if rows:
            torch._foreach_copy_(rows, gradients)
        self._copied.clear()
        self._seen.clear()
        self.finite, self.packed = frozenset(seen.difference(absent)), tuple(packed)
        return tuple(absent)

    def leave_out(self, numbers: Iterable[int]) -> None:
        self._copied.difference_update(numbers)
        self._seen.difference_update(numbers)

    def _warn_of_dense(self, number: int) -> None:
        """Say once what could be spared; worker 0 does, for all."""
        if self._worker != 0 or number in self._made_dense:
            return
        self._made_dense.add(number)
        warnings.warn(
            f"a parameter of shape {tuple(self._rows[number].shape)} has a sparse gradient, which "
            "is made dense at every step because its optimizer takes only dense ones; give it one "
            "of its own (torch.optim.SparseAdam, or SGD or Adagrad without weight_decay), or use "
            "sparse=False",
            stacklevel=2,
        )

    def follow(self, numbers: Iterable[int]) -> None:
        chosen = set(numbers)
        self._following = [slot for slot, number in self._number_of.items() if number in chosen]
        for window in self._windows:
            window.follow(self._following)
        for slot, number in self._number_of.items() if self._turns is not None else ():
            if number not in chosen:
                self._own.setdefault(slot, self._views[number].clone())
            elif (own := self._own.pop(slot, None)) is not None:
                self._window.view(slot).copy_(own)  # it may have been moved by hand
        self._look_through()

    def _look_through(self) -> None:
        """The module's parameters are views of the window; those of no optimizer are its own."""
        for number, (parameter, slot) in enumerate(
            zip(self._parameters, self._number_of, strict=True)
        ):
            view = self._own[slot] if slot in self._own else self._window.view(slot)
            if view.data_ptr() != self._views[number].data_ptr():
                self._views[number] = parameter.data = view

    def admit(self, numbers: Iterable[int], sparse: bool) -> None:
        for number in numbers if self._eager else ():
            self._watch(number)
        known = set(self._sparse)
        self._sparse = known | set(numbers) if sparse else known - set(numbers)
        known = {self._number_of[slot] for slot in self._following}
        self.follow(known.union(numbers))

    def _reattach(self) -> None:
        """Where user code has given ``.data`` another tensor, that is a write like any other."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.data)
                parameter.data = view

    def written(self, alike: bool) -> Writes:
        return self.writes() if alike or self._window.written(self._following) else {}

    def writes(self) -> Writes:
        self._reattach()
        changed = self._window.written(self._following)
        if changed and self._turns is not None and self._turns.behind:
            raise written_behind([slot.name for slot in changed])
        if not self._tells_writes():
            return {}
        return {self._number_of[slot]: elements(self._window.view(slot)) for slot in changed}

    def apart(self) -> Writes:
        self._reattach()
        written = set(self._window.written([slot for slot in self._slots if slot not in self._own]))
        written.update(
            slot for slot, own in self._own.items() if not torch.equal(own, self._window.view(slot))
        )
        return {
            number: elements(self._views[number])
            for slot, number in self._number_of.items()
            if slot in written
        }

    def refresh(self, keep: bool = False) -> None:
        window = self._window
        # With turns nothing of the worker's own is on a page beside what follows.
        window.refresh(self._following if self._turns is None else self._slots)
        self._turn()
        if self._window is not window:
            self._look_through()
            self._window.refresh(self._slots)

    @property
    def shows_masters(self) -> bool:
        return self._shows

    def show_masters(self) -> None:
        if self._turns is not None and self._turns.behind:
            self._window, self._shows = self._windows[self._turns.MASTERS], True
            self._look_through()

    def put_back(self) -> None:
        if self._shows:
            self.writes()
            self.refresh()

    def read_behind(self, number: int) -> list[torch.Tensor]:
        held = [] if self._turns is None else self._turns.held()
        return [self._windows[buffer].view(self._slots[number]).clone() for buffer in held]

    def close(self) -> None:
        """Nothing is held."""
