"""The contract of an exchange, and of a rule that merges the gradients of workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeGuard, runtime_checkable

import torch

from hybridtrain.errors import UserError
from hybridtrain.util.option_types import as_typed

# Parameters that a worker computes with. "read": the masters, or a copy that every release renews,
# as the policy allows. "shared": the masters, which it writes to. "own": memory of its own, which
# its own optimizer moves.
Parameters = Literal["read", "shared", "own"]
RESIDUALS = "residuals"  # in an exchange's state: what compression has left out so far
OWN = (RESIDUALS, "samples", "sums")  # in it, too, and nothing that another worker could go on with


@runtime_checkable
class Exchange(Protocol):
    """Content of the workers' pushes, and the parameters that workers compute with.

    With ``parameters = "own"`` workers step parameters of their own: :class:`LocalExchange`. Where
    they hand over every step's gradient (``"read"``) or write to the masters (``"shared"``), no
    further method is needed. ``update``: how the masters move, unless the user says
    (``strategy.update``): the user's own optimizer (``"user"``), which gets the mean of the
    gradients or what a merge rule makes of them; or the mean (``"mean"``) or sum (``"sum"``) of
    what was handed over is subtracted; or ``"lbfgs"`` gets the sum of a pass. ``keeps``:
    workers continue from parameters of their own where all have handed over (else from the
    masters).
    """

    parameters: ClassVar[Parameters]
    keeps: ClassVar[bool]

    @property
    def update(self) -> str | MergeRule:
        """How the masters move."""

    @property
    def steps(self) -> int:
        """A worker's own steps behind what it hands over, as a rule."""

    def check(self, n_workers: int, whole_rounds: bool) -> None:
        """Raises ``UserError`` if it makes no sense for so many workers under such a policy."""

    def worker_steps(self, factory: StepFactory) -> Any:
        """Choose how workers step."""


@runtime_checkable
class LocalExchange(Exchange, Protocol):
    """Steps of one optimizer in a worker with parameters of its own (``"own"``).

    Each worker has a copy for each optimizer, which remembers what it needs. One that cannot do
    with any number of parameters may have ``check_tensors(n_tensors)``, which raises
    ``UserError``.
    """

    @property
    def has_unsent(self) -> bool:
        """Whether the worker has made steps that a later hand-over is to bring."""

    def step(self, local: Local) -> Leaving:
        """A backward has ended, and the user's optimizer is to step; ``None``: nothing leaves."""

    def skip(self, local: Local) -> Leaving:
        """The others make a step for which this worker has no data."""

    def take(self, local: Local, newest: Sequence[torch.Tensor]) -> Leaving:
        """The server has let the worker go on, with these masters; perhaps something follows."""

    def flush(self, local: Local) -> Leaving:
        """Hand over the steps since the last exchange: an epoch or training ends, or all
        free-running workers meet. ``None``: there has been no step since.
        """

    def state(self) -> dict[str, Any]:
        """The worker's state for a checkpoint, also between two exchanges.

        The part that is of no use to another worker lies under the names of ``OWN``.
        """

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


# ---- what an exchange sees, and what it returns -------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offer:
    """The tensors that a worker hands over.

    ``values``: one for each parameter of the optimizer, in its shape, or ``None`` where there is
    nothing; ``weight``: what it counts for, in samples; ``fetch``: the worker wants the newest
    masters back (else it only hears that it may go on); ``encoded``: what travels instead of the
    values, (n,) uint8, if something does (:mod:`hybridtrain.engine.exchanges.compression`);
    ``samples``: used since the last offer, if that is another number; ``later``: computing goes on,
    until the exchange awaits the answer; ``loss``: the mean over these samples, else the last
    mini-batch's.
    """

    values: Sequence[torch.Tensor | None]
    weight: float
    fetch: bool = True
    encoded: torch.Tensor | None = None
    samples: float | None = None
    later: bool = False
    loss: float | None = None

    @property
    def only_fetches(self) -> bool:
        """Whether nothing of what was computed since the last offer is in it."""
        return self.samples is None and all(value is None for value in self.values)


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for the answer to an earlier ``Offer(later=True)``; then ``take`` gets the masters."""


Leaving = Offer | Await | None  # ``None``: computing goes on


def evaluates(exchange: Exchange) -> bool:
    """Whether workers never step, but evaluate the whole loss where the update asks for it."""
    return bool(getattr(exchange, "evaluates", False))


class Local(Protocol):
    """An exchange's view of one worker, for one of its optimizers; lists are in one order."""

    parameters: list[torch.Tensor]  # the worker's own
    fresh: bool  # the masters do not change while this worker computes
    worker: int  # its number
    workers: int  # how many train
    ends: bool  # where all meet: training has ended, or the epoch has

    @property
    def masters(self) -> Sequence[torch.Tensor]:
        """As this worker has read them last; not to be written to."""

    @property
    def gradients(self) -> Sequence[torch.Tensor | None]:
        """The gradients of the mini-batches since the last step."""

    @property
    def samples(self) -> float:
        """The number of samples in these gradients."""

    @property
    def loss(self) -> float:
        """The mean over these samples, where the exchange evaluates the loss."""

    @property
    def rate(self) -> float:
        """The largest learning rate of the user's optimizer, as it is now."""

    def step(self) -> None:
        """The user's optimizer steps the worker's own parameters."""

    def moved(self, places: Sequence[int] | None = None) -> list[torch.Tensor]:
        """The masters, as this worker has read them last, minus its own parameters.

        Of these places of the lists, or of all. For the next offer, whose memory may hold them.
        """


class StepFactory(Protocol):
    """Each method sets up one kind of worker steps, and returns what makes them, if anything."""

    def hand_over_gradients(self, codec: Any) -> Any:
        """Each step's gradient goes to the server, encoded by the codec, if there is one."""

    def write_to_masters(self, private_state: bool) -> Any:
        """Workers step the masters, with optimizer state that all share, or each its own."""

    def step_own_parameters(self, exchange: LocalExchange) -> Any:
        """Workers step parameters of their own; the exchange says when something leaves."""


# ---- the contract of a merge rule: how the gradients of an update's workers become one ----------
# Without a rule it is their mean, weighted by samples. A rule sees each worker's gradients apart,
# so it can take a coordinate-wise median, or leave out a worker whose gradients are far from the
# others.


@dataclass(frozen=True, slots=True)
class WorkerGradients:
    """One worker's part of an update.

    Args:
        worker: its number.
        weight: its share of the update's samples, in (0, 1].
        staleness: updates made since the worker read the parameters.
        gradients: one for each parameter of the optimizer, group by group, in the parameter's shape
            and dtype; ``None``: this worker has none. They may be overwritten.
    """

    worker: int
    weight: float
    staleness: int
    gradients: Sequence[torch.Tensor | None]


@runtime_checkable
class MergeRule(Protocol):
    """Merges the gradients of the workers of one update; the optimizer then steps with the result.

    ``least``: with fewer workers a run does not begin, or ends. An epoch's last update may have
    fewer contributions than workers: if they are fewer than ``least``, their mean is taken.
    """

    least: ClassVar[int]

    def merge(self, parts: Sequence[WorkerGradients]) -> Sequence[torch.Tensor | None]:
        """One gradient for each parameter, in its shape; ``None``: the parameter stays as it is."""


def by_parameter(
    parts: Sequence[WorkerGradients], merge: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor | None]:
    """Merge each parameter by itself: ``merge`` gets the gradients of the workers that have one,
    (W, *shape); a parameter without any stays as it is.
    """
    columns = zip(*(part.gradients for part in parts), strict=True)
    present = ([each for each in column if each is not None] for column in columns)
    return [merge(torch.stack(each)) if each else None for each in present]


def merged(
    rule: MergeRule, parts: Sequence[WorkerGradients], parameters: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Apply the rule; returns one gradient for each of the ``parameters``.

    Raises:
        UserError: if it returns anything else than gradients in the parameters' shapes.
    """
    name = type(rule).__name__
    returned: Any = rule.merge(parts)
    if not isinstance(returned, Iterable):
        raise UserError(
            f"update={name}: merge() returned {type(returned).__name__}; return a list with a "
            "gradient, or None, for each parameter"
        )
    made = list(returned)
    if len(made) != len(parameters):
        raise UserError(
            f"update={name}: merge() returned {len(made)} gradients for {len(parameters)} "
            "parameters; return one for each, or None where the parameter is to stay as it is"
        )
    for number, (gradient, parameter) in enumerate(zip(made, parameters, strict=True)):
        if gradient is not None and getattr(gradient, "shape", None) != parameter.shape:
            got = getattr(gradient, "shape", type(gradient).__name__)
            raise UserError(
                f"update={name}: merge() returned {got} for parameter {number}, which has shape "
                f"{tuple(parameter.shape)}; return a tensor of that shape, or None"
            )
    return made


def merges(rule: MergeRule | None, contributions: int) -> TypeGuard[MergeRule]:
    """Whether the rule merges an update of so many contributions; if not, their mean is taken."""
    if rule is None or contributions >= rule.least:
        return rule is not None
    warnings.warn(
        f"update={as_typed(rule)} merges at least {rule.least} contributions; an update at "
        f"the end of an epoch has {contributions}, and is their mean",
        stacklevel=2,
    )
    return False


def check_rule(rule: MergeRule, policy: object, gathers: int, holds: bool) -> None:
    """See that updates have separate contributions, and enough of them.

    Args:
        policy: for the message.
        gathers: contributions that make an update, as a rule.
        holds: whether the policy puts contributions aside, as one sum.

    Raises:
        UserError: if not.
    """
    name, given = as_typed(rule), as_typed(policy)
    if holds:
        raise UserError(
            f"update={name} was given with policy={given}, which puts contributions aside as one "
            "sum, and the rule merges separate ones; use policy=hybrid or backup"
        )
    if gathers < rule.least:
        raise UserError(
            f"update={name} was given with policy={given}, where {gathers} contributions make an "
            f"update, but it merges at least {rule.least}; use policy=hybrid with at least "
            f"{rule.least} workers, or update=user"
        )
