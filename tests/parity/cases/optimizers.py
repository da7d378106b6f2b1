"""Every optimizer of ``torch.optim``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.parity.case import Grade, Theme
from tests.parity.toys import Net, even

THEME = Theme("optimizers", even)
add = THEME.add

SETTINGS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.01, "t0": 2},
    "Adadelta": {"lr": 0.5},
    "Adafactor": {"lr": 0.01},
    "Adagrad": {"lr": 0.05, "lr_decay": 0.01, "weight_decay": 0.01},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.003, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 0.01},
    "SGD": {"lr": 0.01},
}
FUSED = {"Adam", "AdamW"}

for name, settings in SETTINGS.items():
    add(
        name,
        partial(Net, partial(getattr(torch.optim, name), **settings)),
        expect=Grade.ROUNDING if name in FUSED else Grade.BITWISE,
        reason="the host steps with torch's fused kernel" if name in FUSED else "",
        wide=name in ("Adam", "SGD"),
    )
