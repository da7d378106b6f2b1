"""What a user may give to a strategy, checked."""

from __future__ import annotations

from collections.abc import Callable

from hybridtrain.errors import UserError
from hybridtrain.policies import All, OnArrival, Policy

POLICIES: dict[str, Callable[[], Policy]] = {"hybrid": All, "async": OnArrival}


def make_policy(policy: str | Policy) -> Policy:
    """A policy from its name, or the object itself."""
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise UserError(
            f"policy={policy!r} was given; known are {', '.join(sorted(POLICIES))}, or an object "
            "of hybridtrain.policies.Policy"
        )
    return POLICIES[policy]()


def positive(name: str, value: int) -> int:
    """The value, if it is a whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name}={value!r} was given; it must be a whole number from 1 on")
    return value


def sample_key(key: str | int | None) -> str | int | None:
    """The value, if a batch can be asked for it."""
    if isinstance(key, bool) or not isinstance(key, str | int | None):
        raise UserError(
            f"num_samples_key={key!r} was given; it must be a key, an attribute's name or a whole "
            "number (the place in the batch)"
        )
    return key
