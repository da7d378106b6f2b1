"""A module that another process can import."""

from __future__ import annotations

from typing import Any

import torch

from tests.lightning.toys import Regression


def adam(parameters: Any) -> torch.optim.Optimizer:
    """A factory that can be pickled."""
    return torch.optim.Adam(parameters, lr=0.01)


class SpawnRegression(Regression):
    """Nothing in it but what can be pickled."""

    def __init__(self) -> None:
        super().__init__(adam)
