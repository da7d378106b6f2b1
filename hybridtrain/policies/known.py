"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from hybridtrain.errors import UserError
from hybridtrain.policies.asynchronous import OnArrival
from hybridtrain.policies.hybrid import All
from hybridtrain.policies.policy import Policy

POLICIES: dict[str, Callable[[], Policy]] = {"hybrid": All, "async": OnArrival}


def make_policy(policy: str | Policy) -> Policy:
    """A policy from its name, or the object itself.

    Raises:
        UserError: if the name is not known.
    """
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        close = get_close_matches(policy, POLICIES, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UserError(
            f"policy={policy!r} was given{hint}; known are {', '.join(sorted(POLICIES))}, or an "
            "object of hybridtrain.policies.Policy"
        )
    return POLICIES[policy]()
