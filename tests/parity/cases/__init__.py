"""All cases, by theme."""

from __future__ import annotations

from tests.parity.case import Case
from tests.parity.cases import manual, optimizers, schedulers, steps

THEMES = (optimizers.THEME, steps.THEME, manual.THEME, schedulers.THEME)

CASES: dict[str, Case] = {case.id: case for theme in THEMES for case in theme.cases.values()}

# Cases whose feature is still being built; must be empty in the end.
PENDING: frozenset[str] = frozenset()
