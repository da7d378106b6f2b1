"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from hybridtrain.engine.options.schemes import SCHEMES
from hybridtrain.engine.policies.basic import (
    LockFree,
    NotTooLate,
    OnArrival,
    RoundRobin,
    WaitForAll,
    WholePass,
)
from hybridtrain.engine.policies.bounded_staleness import BoundedStaleness
from hybridtrain.engine.policies.first_k import Deadline, FirstK, Softsync
from hybridtrain.engine.policies.grace import Grace
from hybridtrain.engine.policies.pipe_sgd import PipeSGD
from hybridtrain.engine.policies.policy import Policy
from hybridtrain.engine.policies.switch import Switch
from hybridtrain.engine.policies.warm_start import WarmStart
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import Natural, NotNegative, Positive, choose, name_of

Spec = str | Mapping[str, Any] | Policy  # a name, {"name": ..., parameters}, or an object


def backup(
    k: Positive | Literal["auto"] | None = None,
    c: NotNegative | None = None,
    at_least: Positive | None = None,
) -> Policy:
    """Backup workers: the first ``k`` (null: all but one) count, or, ``auto``, those in time."""
    if k == "auto":
        return Deadline(5.0 if c is None else c, at_least)
    if c is not None or at_least is not None:
        raise UserError(f"c={c}, at_least={at_least} were given with k={k}; they need k=auto")
    return FirstK(k)


def k_async(k: Positive | None = None) -> Policy:
    """The first ``k`` workers count; a late gradient counts with the next update."""
    return FirstK(k, late="use")


def k_batch_sync(k: Positive | None = None) -> Policy:
    """The first ``k`` mini-batches count, whoever made them; the late are dropped."""
    return FirstK(k, several=True)


def k_batch_async(k: Positive | None = None) -> Policy:
    """Every ``k`` mini-batches make an update, whoever made them, and whenever."""
    return FirstK(k, late="use", several=True)


def on_arrival(max_staleness: Natural | None = None, warm_start: Positive | None = None) -> Policy:
    """Each contribution counts when it comes, unless it is too late; worker 0 may begin alone."""
    made = OnArrival() if max_staleness is None else NotTooLate(max_staleness=max_staleness)
    return made if warm_start is None else WarmStart(made, warm_start)


def switch(
    first: Spec = "hybrid",
    then: Spec = "async",
    at_update: Positive | None = None,
    patience: Positive | None = None,
    min_delta: NotNegative = 0.0,
) -> Policy:
    """One policy first, another one from an update, or a plateau of the loss (100 pushes), on."""
    if at_update is None and patience is None:
        patience = 100
    return Switch(make_policy(first), make_policy(then), at_update, patience, min_delta)


POLICIES: dict[str, Callable[..., Policy]] = {
    "synchronous": RoundRobin,
    "hybrid": WaitForAll,
    "pipe_sgd": PipeSGD,
    "backup": backup,
    "k_async": k_async,
    "k_batch_sync": k_batch_sync,
    "k_batch_async": k_batch_async,
    "softsync": Softsync,
    "ssp": BoundedStaleness,
    "async": on_arrival,
    "grace": Grace,
    "hogwild": LockFree,
    "sandblaster": WholePass,
    "switch": switch,
}
STRATEGIES = (*POLICIES, *SCHEMES)  # the names for a trainer


def check_no_scheme(what: str, given: Any) -> None:
    """Refuse the name of a strategy that is more than a policy; raises UserError."""
    if (name := name_of(given)) in SCHEMES:
        raise UserError(
            f"{what}={name} was given; {name} is a strategy, which has an exchange of its own "
            f"besides its policy; give strategy={name}, in Python Trainer(strategy={name!r})"
        )


def make_policy(given: Spec) -> Policy:
    """A policy from its name, its name and parameters, or the object itself.

    Raises:
        UserError: if the name is not known, or the parameters make no sense.
    """
    check_no_scheme("policy", given)
    return choose("policy", given, POLICIES, Policy)  # type: ignore[type-abstract]
