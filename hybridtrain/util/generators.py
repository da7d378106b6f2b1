"""The states of random number generators: of this process's, and of one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

GENERATORS = (
    random.Random,
    np.random.Generator,
    np.random.BitGenerator,
    np.random.RandomState,
    torch.Generator,
)


def look() -> dict[str, Any]:
    """This process's RNG states."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def put(states: dict[str, Any]) -> None:
    """Set this process's RNG states."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two results of ``look`` are of the same moment."""
    return one.keys() == other.keys() and all(_equal(one[kind], other[kind]) for kind in one)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return all(map(_equal, one, other))
    return bool(torch.equal(one, other) if isinstance(one, torch.Tensor) else np.all(one == other))


def state_of(generator: Any) -> Any:
    """The state of one of ``GENERATORS``.

    Raises:
        NotImplementedError: if it has none (``random.SystemRandom``).
    """
    match generator:
        case random.Random():
            return generator.getstate()
        case torch.Generator():
            return generator.get_state()
        case np.random.RandomState():
            return generator.get_state(legacy=False)
        case np.random.Generator():
            return generator.bit_generator.state
    return generator.state


def set_state(generator: Any, state: Any) -> None:
    """Put it into one of the same class."""
    match generator:
        case random.Random():
            generator.setstate(state)
        case torch.Generator() | np.random.RandomState():
            generator.set_state(state)
        case np.random.Generator():
            generator.bit_generator.state = state
        case _:
            generator.state = state
