"""The contract of an update, and the data that it takes and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from hybridtrain.engine.exchanges.exchange import MergeRule
from hybridtrain.engine.memory import Packed, Rows
from hybridtrain.engine.protocol.events import Arrivals
from hybridtrain.engine.protocol.messages import Clip
from hybridtrain.engine.updates.groups import Groups, Members


@dataclass(frozen=True, slots=True)
class Contribution:
    """The gradient in row ``worker``, weighted by ``share`` (shares of an update sum to 1).

    The row's number is the worker's, unless each has two (:mod:`hybridtrain.engine.memory.turns`).

    ``absent``: numbers of parameters without a gradient, whose place in the row must not be read.
    ``packed``: the sparse gradients, by number. ``staleness``: updates since the worker read the
    parameters, if the update wants it. ``merged``: of all workers' gradients already.
    """

    worker: int
    share: float
    absent: frozenset[int] = frozenset()
    packed: Mapping[int, Packed] = field(default_factory=dict)
    staleness: int = 0
    merged: bool = False


class Evaluation(NamedTuple):
    """The result of a closure: the mean ``loss`` at the gradient's parameters, if known.

    ``repeatable``: the workers can evaluate again, at other parameters.
    """

    loss: float | None = None
    repeatable: bool = False


class Again(NamedTuple):
    """The step needs one more evaluation of the closure, at the parameters as they are now.

    ``cleared``: the optimizer has cleared the gradients, so the next must not be accumulated.
    """

    cleared: bool


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """An optimizer's ``state_dict()`` by slot number, so that it survives changes of the groups.

    ``others``: entries of ``state`` whose keys are no parameters; ``groups``: the hyper-parameters;
    ``own``: entries that the optimizer's class adds.
    """

    parameters: dict[int, dict[str, Any]]
    others: dict[Any, Any] = field(default_factory=dict)
    groups: tuple[dict[str, Any], ...] = ()
    own: dict[str, Any] = field(default_factory=dict)


class StepInput(NamedTuple):
    """Input of one step; ``rate``: factor of its learning rates.

    ``arrivals``: of rows that are not complete yet; the step may have to be undone. ``version``:
    the number of updates before this one.
    """

    contributions: Sequence[Contribution]
    clip: Clip | None = None
    evaluation: Evaluation = Evaluation()
    rate: float = 1.0
    arrivals: Arrivals | None = None
    version: int = 0


class Update(Protocol):
    """One optimizer on the master parameters.

    ``name``: of its class; ``members``: slot numbers of each group; ``news``: hyper-parameters that
    the last step has changed; ``under_way``: the step needs one more evaluation; ``moved``: of
    parameters, by slot number, whose last step moved only these rows; ``puts_off``: rows without a
    gradient are stepped later, at the latest in :meth:`settle`; ``wants_staleness``: contributions
    must carry it; ``sums``: contributions are added, not averaged; ``merge``: the
    user's rule, which gets contributions apart; ``trial``: by slot number, where workers are to
    evaluate the loss next, if not at the masters; ``can_undo``: takes rows that are still
    arriving; ``state_dtype``: of state tensors between steps.
    """

    name: str
    members: Members
    news: Groups | None = None
    under_way: bool = False
    moved: Mapping[int, Rows] = MappingProxyType({})
    puts_off: bool = False
    wants_staleness: bool = False
    sums: bool = False
    merge: MergeRule | None = None
    trial: Mapping[int, torch.Tensor] = MappingProxyType({})
    can_undo: bool = False
    state_dtype: torch.dtype = torch.float32

    def read(self, worker: int) -> None:
        """The worker reads the masters now, and computes its next gradient there."""
        return

    def hold(self, contribution: Contribution) -> bool:
        """Keep a contribution apart, for the next step; ``False``: it is to be added to others."""
        return False

    def step(self, given: StepInput) -> Again | None:
        """Merge the rows, clip the result, step the masters; or ask for one more evaluation."""

    def undo(self) -> None:
        """Undo the last step, whose input had ``arrivals``; called only with ``can_undo``."""
        return

    def set_groups(self, groups: Groups) -> None:
        """Set the hyper-parameters that have changed, group by group."""

    def settle(self) -> None:
        """Make the steps that were put off, before parameters or state are read."""
        return

    def state(self) -> SavedOptimizer:
        """A copy of the optimizer's state, with the shapes of torch's ``state_dict``."""

    def release_optimizer(self) -> tuple[torch.optim.Optimizer, dict[int, torch.nn.Parameter]]:
        """The optimizer with all its state, and its parameters by slot number."""

    def close(self) -> None:
        """Free what the update holds."""
        return


def clip_factor(norm: torch.Tensor, limit: float) -> float:
    """The factor that limits the gradient's norm, as in ``torch.nn.utils.clip_grad_norm_``."""
    return float(torch.clamp(limit / (norm + 1e-6), max=1.0))
