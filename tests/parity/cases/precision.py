"""Numbers of other widths."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.parity.case import Grade, Theme
from tests.parity.cases.manual import Gan, Manual
from tests.parity.cases.optimizers import FUSED, adam
from tests.parity.cases.steps import LooksBeforeStep, clip
from tests.parity.toys import Net, even, regression, sgd

THEME = Theme("precision", even)
add = partial(THEME.add, expect=Grade.BITWISE)


def wide(batch: int) -> dict[str, Any]:
    """Data in float64."""
    data = regression(48, dtype=torch.float64)
    loader = DataLoader(data, batch_size=batch, shuffle=True)
    return {"train_dataloaders": loader, "val_dataloaders": DataLoader(data, batch_size=batch)}


add("32-true", Net, trainer={"precision": "32-true"})
add("64-true", Net, data=wide, trainer={"precision": "64-true"}, wide=True)
add(
    "64-true, Adam",
    partial(Net, adam),
    data=wide,
    trainer={"precision": "64-true", "max_epochs": 10},
    rtol=1e-10,
)
add("bf16-mixed", Net, trainer={"precision": "bf16-mixed"}, rtol=1e-2, wide=True)
add("bf16-mixed with clipping", Net, trainer={"precision": "bf16-mixed"} | clip(0.05, "norm"))
add("bf16-mixed, gradients read", LooksBeforeStep, trainer={"precision": "bf16-mixed"})
add("bf16-mixed, manual", Manual, trainer={"precision": "bf16-mixed"})
add("bf16-true", Net, trainer={"precision": "bf16-true"}, rtol=3e-2)

CUDA = {"gpu": True, "expect": Grade.ROUNDING, "limit_s": 120.0}
for precision in ("32-true", "bf16-mixed", "16-mixed"):
    tolerance = {"rtol": 1e-4 if precision == "32-true" else 1e-2}
    mine: dict[str, Any] = CUDA | tolerance | {"trainer": {"precision": precision}}
    THEME.add(f"{precision} on CUDA", partial(Net, adam), reason=FUSED, **mine)
    THEME.add(f"{precision} on CUDA, gradients read", LooksBeforeStep, **mine)
    THEME.add(f"{precision} on CUDA, GAN", Gan, **mine)
    clipped = mine | {"trainer": {"precision": precision} | clip(0.05, "norm")}
    THEME.add(f"{precision} on CUDA, clipped", partial(Net, sgd), **clipped)
