"""The contract of a correction, and the corrections that only shorten the step.

Theory of operation. A gradient is *stale* by tau if tau updates were made between the worker's read
of the parameters and the gradient's application. Under asynchronous policies the server has the
parameters that each worker read, beside the current ones, and can correct a gradient just before it
is merged. There are two families. One shortens the step: the gradient is weighted with a factor,
and the learning rate of this step is multiplied by the factors' mean (the shares sum to 1 again, as
an optimizer like Adam ignores the length of its gradient). The other changes the gradient in the
worker's row. A correction works with any policy and any optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from hybridtrain.engine.memory import Packed, Slot, Store
from hybridtrain.engine.memory.sparse_rows import indices_of, used
from hybridtrain.engine.updates.base import Contribution
from hybridtrain.engine.updates.groups import Members, numbers_of
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import Above0, Checked, Decay, NotNegative

# ---- parts of a gradient ------------------------------------------------------------------------
# The elements of a gradient in the flat buffers: stretches, or rows of sparse gradients.
# Legend: P elements of one dtype's buffer, n elements of a stretch, r rows, s sparse dimensions.

CHUNK = 256 * 1024  # elements that fit the cache

Buffers = Mapping[torch.dtype, torch.Tensor]  # dtype -> (P,)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements ``start`` to ``stop`` of a buffer, all of parameter ``number``."""

    number: int
    dtype: torch.dtype
    start: int
    stop: int

    def read(self, buffers: Buffers) -> torch.Tensor:
        """A view of them, (n,)."""
        return buffers[self.dtype][self.start : self.stop]

    def write(self, buffers: Buffers, values: torch.Tensor) -> None:
        """Write the values, unless they are the view that ``read`` has returned."""
        place = self.read(buffers)
        if place.data_ptr() != values.data_ptr():
            place.copy_(values)

    gradient = read  # of a worker's buffers


@dataclass(frozen=True, slots=True)
class RowSet:
    """The rows of parameter ``number`` in a sparse gradient."""

    number: int
    slot: Slot
    packed: Packed

    def read(self, buffers: Buffers) -> torch.Tensor:
        """A copy of them, (r, ...)."""
        return self._whole(buffers)[self.indices()]

    def write(self, buffers: Buffers, values: torch.Tensor) -> None:
        """Write the values."""
        self._whole(buffers)[self.indices()] = values

    def gradient(self, buffers: Buffers) -> torch.Tensor:
        """A view of the packed values in a worker's buffers, (r, ...)."""
        return used(self.packed, self._whole(buffers))

    def indices(self) -> tuple[torch.Tensor, ...]:
        """The indices along each sparse dimension, (r,) each."""
        return indices_of(self.packed).unbind(0)

    def _whole(self, buffers: Buffers) -> torch.Tensor:
        flat = buffers[self.slot.dtype][self.slot.offset :][: self.slot.numel]
        return self.slot.view(flat)


Part = Stretch | RowSet


def union(lists: Sequence[Sequence[Part]]) -> list[Part]:
    """The union of the lists, each element once."""
    dense = {part: None for parts in lists for part in parts if isinstance(part, Stretch)}
    whole = {part.number for part in dense}
    sparse: dict[int, list[RowSet]] = {}
    for part in (part for parts in lists for part in parts):
        if isinstance(part, RowSet) and part.number not in whole:
            sparse.setdefault(part.number, []).append(part)
    return [*dense, *(_joined(rows) for rows in sparse.values())]


def _joined(parts: Sequence[RowSet]) -> RowSet:
    first = parts[0]
    if len(parts) == 1:
        return first
    indices = torch.cat([indices_of(part.packed) for part in parts], dim=1).unique(dim=1)
    return replace(
        first, packed=replace(first.packed, indices=indices.contiguous().numpy().tobytes())
    )


_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Late:
    """One contribution before it is merged; low precision is read as float32.

    ``staleness``: in updates; ``numbers``: slot numbers of the optimizer's parameters.
    """

    contribution: Contribution
    staleness: int
    numbers: Sequence[int]
    store: Store

    @property
    def worker(self) -> int:
        """The worker's number."""
        return self.contribution.worker

    def parts(self) -> list[Part]:
        """The elements of the gradient, in portions that fit the cache."""
        absent, packed = self.contribution.absent, self.contribution.packed
        found: list[Part] = []
        for number in self.numbers:
            slot = self.store.layout.slots[number]
            if number in packed:
                found.append(RowSet(number, slot, packed[number]))
            elif number not in absent:
                stop = slot.offset + slot.numel
                found += [
                    Stretch(number, slot.dtype, start, min(start + CHUNK, stop))
                    for start in range(slot.offset, stop, CHUNK)
                ]
        return found

    def gradient(self, part: Part) -> torch.Tensor:
        """The gradient of a part, to be changed in place and given to :meth:`replace`."""
        return high(part.gradient(self.store.gradients[self.worker]))

    def replace(self, part: Part, gradient: torch.Tensor) -> None:
        """Write the part's gradient to the worker's row."""
        place = part.gradient(self.store.gradients[self.worker])
        if place.data_ptr() != gradient.data_ptr():
            place.copy_(gradient)

    def gap(self, part: Part) -> torch.Tensor:
        """The movement of the parameters since the worker read them: a new tensor."""
        now, read = part.read(self.store.masters), part.read(self.store.copies[self.worker])
        return high(now) - high(read)


class Correction(Checked):
    """A correction that does nothing; subclasses override what they need."""

    prefix = "correction."

    def begin(self, store: Store) -> None:
        """Reset for training with this store.

        Raises:
            UserError: if its parameters cannot be corrected.
        """

    def factor(self, staleness: int) -> float:
        """The factor of the step, in [0, 1]."""
        return 1.0

    def correct(self, late: Late) -> None:
        """Change the gradient in its row."""

    @contextmanager
    def watch(self, merged: Sequence[Late]) -> Iterator[None]:
        """A context around the step with these contributions."""
        yield


@dataclass
class ByStaleness(Correction):
    """The learning rate divided by the staleness: alpha_0 / max(1, tau).

    Zhang, Gupta, Lian, Liu, *Staleness-aware Async-SGD for Distributed Deep Learning*, IJCAI 2016
    (arXiv:1511.05950), section 3.2. With W workers nearly every gradient is W - 1 updates late, so
    a rate that is good for one worker stays stable for any number of them.
    """

    def factor(self, staleness: int) -> float:
        return 1.0 / max(1, staleness)


@dataclass
class Polynomial(Correction):
    """The learning rate times (1 + tau) ** -exponent.

    Xie, Koyejo, Gupta, *Asynchronous Federated Optimization*, 2019 (arXiv:1903.03934), section 5.2,
    where the exponent is 0.5.

    Args:
        exponent: from 0 on; 0 changes nothing.
    """

    exponent: NotNegative = 0.5

    def factor(self, staleness: int) -> float:
        return float((1 + staleness) ** -self.exponent)


def high(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as float32 if it is of low precision, else itself."""
    return tensor.float() if tensor.dtype in _LOW else tensor


def zeros_like(buffers: dict[torch.dtype, torch.Tensor]) -> dict[torch.dtype, torch.Tensor]:
    """Zeros for each element, float32 for low precision."""
    return {dtype: torch.zeros_like(high(flat)) for dtype, flat in buffers.items()}


def check_real(store: Store, name: str) -> None:
    """Refuse complex parameters, for which elementwise corrections are not defined.

    Raises:
        UserError: naming one.
    """
    for slot in store.layout.slots:
        if slot.dtype.is_complex:
            raise UserError(
                f"correction={name} was given, but the parameter {slot.name} is of "
                f"{slot.dtype}, and it is defined for real ones; use correction=by_staleness or "
                "polynomial"
            )


# ---- delay compensation: correct a stale gradient with an estimate of the curvature -------------
# Zheng et al., *Asynchronous Stochastic Gradient Descent with Delay Compensation*, ICML 2017
# (arXiv:1609.08326): the gradient at w is about g + H (w - w_read), and for losses that are
# negative log-likelihoods the diagonal of H is E[g * g] (section 3).

_EPSILON = 1e-7  # section 5


@dataclass
class DcAsgd(Correction):
    """g + strength * g * g * (w - w_read), algorithm DC-ASGD-c. One pass over stale gradients.

    Args:
        strength: the paper's lambda, in units of 1 / loss; 0 changes nothing. The default suits
            gradients of a mean loss.
    """

    strength: NotNegative = 0.04

    def begin(self, store: Store) -> None:
        check_real(store, "dc_asgd")

    def correct(self, late: Late) -> None:
        if late.staleness == 0 or self.strength == 0:
            return
        for part in late.parts():
            gradient, gap = late.gradient(part), late.gap(part)
            gradient.addcmul_(gap.mul_(gradient), gradient, value=self.strength)
            late.replace(part, gradient)


@dataclass
class DcAsgdAdaptive(Correction):
    """The same with strength / sqrt(ms + 1e-7) for each element, algorithm DC-ASGD-a.

    ``ms`` is the moving mean of the worker's squared gradients. It begins at 0, also after loading
    a checkpoint (the default needs some 50 mini-batches), and takes one more float for each
    parameter and worker. Of sparse gradients only rows with a gradient take part.

    Args:
        strength: the paper's lambda_0; 0 changes nothing.
        decay: of the mean, in [0, 1).
    """

    strength: NotNegative = 2.0
    decay: Decay = 0.95

    def begin(self, store: Store) -> None:
        check_real(store, "dc_asgd_adaptive")
        self._squares: dict[int, dict[torch.dtype, torch.Tensor]] = {}  # worker -> dtype -> (P,)

    def correct(self, late: Late) -> None:
        squares = self._squares.setdefault(late.worker, zeros_like(late.store.masters))
        for part in late.parts():
            gradient, mean = late.gradient(part), part.read(squares)
            mean.mul_(self.decay).addcmul_(gradient, gradient, value=1 - self.decay)
            part.write(squares, mean)
            if late.staleness == 0 or self.strength == 0:
                continue
            gap = late.gap(part).mul_(gradient).div_((mean + _EPSILON).sqrt_())
            gradient.addcmul_(gap, gradient, value=self.strength)
            late.replace(part, gradient)


# ---- gap-aware: divide a stale gradient by the movement of its parameters -----------------------
# Barkai, Hakimi, Schuster, *Gap Aware Mitigation of Gradient Staleness*, ICLR 2020
# (arXiv:1909.10802): each element of a gradient is divided by G = 1 + |w - w_read| / C, where C is
# the length of a typical step of this element. If all steps have length C and one direction, G is
# 1 + tau; if they cancel, the gradient is not reduced.
#
# In the paper C is the rate times the root mean square of the momentum (SGD), or of the steps
# (Adam). Here it is always that of the steps, which is the same for SGD with a constant rate,
# follows a schedule, and works with any optimizer.


@dataclass
class GapAware(Correction):
    """Divide each element by 1 + (its gap in typical steps).

    It takes two floats for each parameter, and about three passes over them per update. The mean
    begins anew after loading a checkpoint, and is bias-corrected like Adam's moments. Of sparse
    gradients only rows with a gradient take part.

    Args:
        decay: of the mean square of the steps, in [0, 1).
        epsilon: added to C, in units of the parameters; above 0.
    """

    decay: Decay = 0.999
    epsilon: Above0 = 1e-8

    def begin(self, store: Store) -> None:
        check_real(store, "gap_aware")
        self._masters = store.masters
        self._squares = zeros_like(store.masters)
        self._known = zeros_like(store.masters)  # bias corrections, 1 - decay ** steps

    def correct(self, late: Late) -> None:
        if late.staleness == 0:
            return
        for part in late.parts():
            gradient, gap = late.gradient(part), late.gap(part)
            gradient.div_(gap.abs_().div_(self._typical_step(part)).add_(1.0))
            late.replace(part, gradient)

    def _typical_step(self, part: Part) -> torch.Tensor:
        """C of each element."""
        known = part.read(self._known).clamp(min=torch.finfo(torch.float32).tiny)
        return (part.read(self._squares) / known).sqrt_().add_(self.epsilon)

    @contextmanager
    def watch(self, merged: Sequence[Late]) -> Iterator[None]:
        parts = union([late.parts() for late in merged])
        before = [part.read(self._masters).clone() for part in parts]
        yield
        for part, old in zip(parts, before, strict=True):
            step = high(part.read(self._masters)) - high(old)
            self._learn(part, self._squares, step.square_())
            self._learn(part, self._known, torch.ones_like(step))

    def _learn(
        self, part: Part, means: dict[torch.dtype, torch.Tensor], values: torch.Tensor
    ) -> None:
        mean = part.read(means)
        part.write(means, mean.lerp_(values, 1 - self.decay))


# ---- applies the chosen correction to stale gradients before an update --------------------------


class LateGradients:
    """Applies a correction to the workers' rows.

    Args:
        correction: the correction, if any.
        age: updates since a worker read the parameters.
    """

    def __init__(
        self, correction: Correction | None = None, age: Callable[[int], int] = lambda worker: 0
    ) -> None:
        self._correction, self.age = correction, age
        self._store: Store | None = None

    def begun(self, store: Store | None) -> LateGradients:
        """Itself, from now on with this store.

        Raises:
            UserError: if these parameters cannot be corrected.
        """
        # Where all workers read the masters in place no gradient is stale.
        if self._correction is None or store is None or not store.private_parameters:
            return self
        if store is not self._store:
            self._correction.begin(store)
            self._store = store
        return self

    @property
    def active(self) -> bool:
        """Whether a correction is applied."""
        return self._store is not None

    def correct(self, contribution: Contribution, members: Members) -> float:
        """Correct the gradient in its row; returns the factor of its weight."""
        if self._correction is None or self._store is None:
            return 1.0
        age = self.age(contribution.worker)
        self._correction.correct(Late(contribution, age, numbers_of(members), self._store))
        return self._correction.factor(age)

    def watch(
        self, merged: Sequence[Contribution], members: Members
    ) -> AbstractContextManager[None]:
        """A context around the step with these contributions."""
        if self._correction is None or self._store is None:
            return nullcontext()
        numbers = numbers_of(members)
        return self._correction.watch([Late(each, 0, numbers, self._store) for each in merged])
