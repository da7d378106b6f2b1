"""The states of this process's random number generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


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
