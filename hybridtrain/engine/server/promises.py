"""Check a policy's orders against its declared needs (:class:`hybridtrain.engine.policies.Needs`).

Workers, data loading and the memory of a run are made for these promises: a run under a policy that
breaks one would go on and be wrong.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from hybridtrain.engine.exchanges import Requirements
from hybridtrain.engine.policies import Policy
from hybridtrain.engine.protocol.facts import (
    Accumulate,
    Apply,
    Drop,
    Fact,
    Joined,
    Left,
    Order,
    Pushed,
    Ready,
    Release,
    ReleaseThenApply,
    Waiting,
)
from hybridtrain.util.option_types import as_typed


class Promises:
    """Follows facts and orders.

    Args:
        policy: for messages.
        requirements: the promises.
    """

    def __init__(self, policy: Policy, requirements: Requirements) -> None:
        self._policy, self._requirements = policy, requirements
        self._computing: set[int] = set()  # the workers that a round waits for
        self._turn: set[int] = set()  # the workers that have begun a mini-batch

    def hear(self, fact: Fact) -> None:
        """The policy gets this fact."""
        match fact:
            case Joined(worker) | Pushed(worker):
                self._computing.add(worker)
            case Ready(worker):
                self._computing.add(worker)
                self._turn.discard(worker)
            case Waiting(worker) | Left(worker):
                self._computing.discard(worker)
                self._turn.discard(worker)

    def broken(self, order: Order, last: Container[int], ready: Container[int]) -> str | None:
        """Why this order breaks a promise, if it does.

        ``last``: workers whose contributions must not be dropped; ``ready``: that wait to begin.
        """
        needs = self._requirements
        match order:
            case ReleaseThenApply() if not needs.delay:
                return self._line(
                    order,
                    "no delay=1",
                    "workers have one row, which the update would read while they write the next "
                    "gradient to it; return Needs(whole_rounds=True, delay=1, ...)",
                )
            case Apply(workers) | ReleaseThenApply(workers) if self._lacks(workers):
                others = sorted(self._computing - {*workers})
                return self._line(
                    order,
                    "whole_rounds=True",
                    f"an update has the contributions of all that compute, also of {others}; wait "
                    "for them (each is Joined, and Waiting or Left), or leave whole_rounds out",
                )
            case Accumulate() if not needs.holds:
                return self._line(
                    order,
                    "no holds=True",
                    "there is no memory for what is put aside; return Needs(holds=True, ...)",
                )
            case Drop() if not needs.drops_late:
                return self._line(
                    order,
                    "no drops_late=True",
                    "workers do not keep what they would take back; return "
                    "Needs(drops_late=True, ...)",
                )
            case Drop(workers) if lost := [each for each in workers if each in last]:
                return self._line(
                    order,
                    "drops_late=True",
                    f"no worker would do the mini-batch of {lost} again (Pushed.last is True); "
                    "apply it",
                )
            case Release(workers) if needs.turns:
                return self._begin_turn(order, {each for each in workers if each in ready})
        return None

    def _lacks(self, workers: Iterable[int]) -> bool:
        """Whether an update in lock-step would lack the contribution of one that computes."""
        return self._requirements.whole_rounds and {*workers} != self._computing

    def _begin_turn(self, order: Order, begin: set[int]) -> str | None:
        if begin and len(begin | self._turn) > 1:
            return self._line(
                order,
                "turns=True",
                f"workers {sorted(begin | self._turn)} would compute at the same time; release "
                "one, and the next when it is Ready, Waiting or Left",
            )
        self._turn |= begin
        return None

    def held_back(self, worker: int) -> str:
        """The line for a contribution that was to be an update at once, and still waits."""
        return (
            f"policy {as_typed(self._policy)} has promised free=True in its Needs, but did not "
            f"return [Apply(({worker},)), Release(({worker},))] for Pushed({worker}); do so, or "
            "leave free out"
        )

    def _line(self, order: Order, promise: str, reason: str) -> str:
        policy = as_typed(self._policy)
        return f"policy {policy} has promised {promise} in its Needs, but ordered {order}: {reason}"
