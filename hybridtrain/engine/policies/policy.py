"""The contract of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hybridtrain.engine.protocol.facts import Fact, Order


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of a policy on workers and server.

    ``whole_rounds``: all step equally often, and no worker computes while an update is applied,
    unless there is a ``delay``: then workers compute the next gradient meanwhile, with parameters
    of so many updates before (1: ``ReleaseThenApply``). ``extrapolates``: with a delay, of where
    the masters will be, about, when the gradient is applied. ``encodes``: with a delay, the codec
    of the movement of what workers read. ``delay_from``: with a delay, so many updates are made in
    lock-step first.
    ``turns``: one worker computes at a time, and sends ``Ready`` before each mini-batch; ``asks``:
    only before its first. ``free``: every push is an update, and its worker is released at once.
    ``everyone``: an update has one gradient of each worker, and the policy keeps no state between
    updates, so workers may complete a round without the server. ``whole_pass``: an update is a pass
    over all data; ``backs_up``: near its end, idle workers process mini-batches of others, too.
    ``holds``: gradients may be accumulated (``Accumulate``), which takes one more row.
    ``drops_late``: gradients of parameters before the last update are dropped, or only those of
    more than ``max_staleness`` updates before. ``watches_loss``: pushes carry the loss.
    ``gathers``: gradients per update, as a rule; ``later``: from which update on another number,
    and which (learning-rate schedules compute the number of updates from them).
    """

    whole_rounds: bool = False
    turns: bool = False
    holds: bool = False
    drops_late: bool = False
    max_staleness: float = 0
    watches_loss: bool = False
    gathers: int = 1
    later: tuple[int, int] | None = None
    asks: bool = False
    free: bool = False
    everyone: bool = False
    whole_pass: bool = False
    backs_up: bool = False
    delay: int = 0
    extrapolates: bool = False
    encodes: str | None = None
    delay_from: int = 0


@runtime_checkable
class Policy(Protocol):
    """A pure state machine from facts to orders, which the server executes in their order."""

    def begin(self, n_workers: int) -> Needs:
        """Reset all state for this many workers, numbered from 0.

        Raises:
            UserError: if the policy makes no sense for so many.
        """

    def on(self, fact: Fact) -> Sequence[Order]:
        """The orders that follow from one fact."""
