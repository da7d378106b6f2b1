"""Numbers of other widths."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.parity.case import Grade, Theme
from tests.parity.cases.manual import Gan, Manual, unused
from tests.parity.cases.optimizers import FUSED, adam
from tests.parity.cases.steps import LooksBeforeStep, clip
from tests.parity.toys import IN_ORDER, Net, even, in_float64, sgd

THEME = Theme("precision", even)
add = partial(THEME.add, expect=Grade.BITWISE)


# Converted weights come home as they were trained, also under one device; DDP casts them back.
HOME: dict[str, Any] = {"ignore": ("module.*",)}

add("32-true", Net, trainer={"precision": "32-true"})
add("64-true", Net, data=in_float64, trainer={"precision": "64-true"}, **HOME)
add(
    "64-true, Adam",
    partial(Net, adam),
    data=in_float64,
    trainer={"precision": "64-true", "max_epochs": 10},
    rtol=1e-10,
    reason=FUSED,
    **HOME | {"expect": Grade.BITWISE},
)
add("bf16-mixed", Net, trainer={"precision": "bf16-mixed"}, rtol=1e-2, wide=True)
add("bf16-mixed with clipping", Net, trainer={"precision": "bf16-mixed"} | clip(0.05, "norm"))
add("bf16-mixed, gradients read", LooksBeforeStep, trainer={"precision": "bf16-mixed"})
add("bf16-mixed, manual", Manual, trainer={"precision": "bf16-mixed"})
add("bf16-true", Net, trainer={"precision": "bf16-true"}, rtol=3e-2, **HOME)

CUDA = {"gpu": True, "expect": Grade.ROUNDING, "limit_s": 120.0}
# 16-mixed: a CPU would compute with bf16, so on the stand-in one worker is the reference, which
# must see the same samples.
for precision in ("32-true", "bf16-mixed", "16-mixed"):
    options: dict[str, Any] = {"precision": precision} | (
        IN_ORDER if precision == "16-mixed" else {}
    )
    mine: dict[str, Any] = CUDA | {"rtol": 1e-4 if precision == "32-true" else 1e-2}
    mine |= {"trainer": options, "on_cpu": precision != "16-mixed"}
    THEME.add(f"{precision} on CUDA", partial(Net, adam), reason=FUSED, **mine)
    THEME.add(f"{precision} on CUDA, gradients read", LooksBeforeStep, **mine)
    THEME.add(f"{precision} on CUDA, GAN", Gan, **mine, **unused)
    clipped = mine | {"trainer": options | clip(0.05, "norm")}
    THEME.add(f"{precision} on CUDA, clipped", partial(Net, sgd), **clipped)
