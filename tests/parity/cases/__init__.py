"""All cases, by theme."""

from __future__ import annotations

from tests.parity.case import Case
from tests.parity.cases import manual, modules, optimizers, precision, schedulers, steps

THEMES = tuple(m.THEME for m in (optimizers, steps, manual, schedulers, modules, precision))

CASES: dict[str, Case] = {case.id: case for theme in THEMES for case in theme.cases.values()}

# Cases whose feature is still being built; must be empty in the end.
PENDING: frozenset[str] = frozenset(
    {
        "modules/BatchNorm",
        "modules/BatchNorm while accumulating",
        "modules/a buffer that is not saved",
        "modules/a queue in a buffer",
        "optimizers/a hook reads the optimizer's state",
    }
)
