"""What an optimizer's closure returns, and what it asks for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A gradient came with this ``loss`` (the mean of all), or without one.

    ``repeatable``: the workers can evaluate again, at other parameters.
    """

    loss: float | None = None
    repeatable: bool = False


@dataclass(frozen=True, slots=True)
class Again:
    """The step is not over: evaluate once more, at the parameters as they are now.

    ``cleared``: the optimizer has cleared the gradients, which the next ones must not be added to.
    """

    cleared: bool
