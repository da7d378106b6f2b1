"""The contract of an update, and what all kinds of it share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from hybridtrain.memory import Rows
from hybridtrain.protocol.messages import Clip
from hybridtrain.updates.contribution import Contribution
from hybridtrain.updates.evaluation import Again, Evaluation
from hybridtrain.updates.groups import Groups, Members
from hybridtrain.updates.saved import Saved


class Update(Protocol):
    """One optimizer on the master parameters.

    ``name`` is that of its class, ``members`` who belongs to which of its groups, ``news`` which
    hyper-parameters its last step has changed by itself; ``under_way``: it waits for one more
    evaluation to end its step. ``moved``: of which parameters, by slot number, its last step has
    moved only these rows; ``puts_off``: rows that have no gradient are behind until :meth:`settle`;
    ``wants_staleness``: contributions are to tell theirs; ``sums``: they add
    up, where else they are averaged.
    """

    name: str
    members: Members
    news: Groups | None
    under_way: bool
    moved: Mapping[int, Rows]
    puts_off: bool
    wants_staleness: bool
    sums: bool

    def read(self, worker: int) -> None:
        """The worker reads the masters as they are now; its next gradient is computed there."""
        ...

    def step(
        self,
        contributions: Sequence[Contribution],
        clip: Clip | None,
        evaluation: Evaluation | None = None,
        rate: float = 1.0,
    ) -> Again | None:
        """Merge the rows, clip the result, step the masters; or ask for one more evaluation.

        ``rate``: what this step's learning rates are multiplied with.
        """
        ...

    def set_groups(self, groups: Groups) -> None:
        """Take new hyper-parameters: for each group, those that have changed."""
        ...

    def settle(self) -> None:
        """Do what was put off, before anybody looks."""
        ...

    def state(self) -> Saved:
        """A copy of the optimizer's state, each parameter's shaped as ``torch`` would save it."""
        ...

    def hand_over(self) -> tuple[torch.optim.Optimizer, dict[int, torch.nn.Parameter]]:
        """The optimizer with all its state, and its parameters by slot number."""
        ...

    def close(self) -> None:
        """It is not needed any more."""
        ...


def clip_factor(norm: torch.Tensor, limit: float) -> float:
    """What the gradient is multiplied with so that its norm is at most ``limit``.

    The formula of ``torch.nn.utils.clip_grad_norm_``, its 1e-6 included.
    """
    return float(torch.clamp(limit / (norm + 1e-6), max=1.0))
