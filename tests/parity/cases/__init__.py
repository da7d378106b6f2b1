"""All cases, by theme."""

from __future__ import annotations

from tests.parity.case import Case
from tests.parity.cases import (
    callbacks,
    loaders,
    logged,
    loops,
    manual,
    modules,
    optimizers,
    precision,
    schedulers,
    steps,
)

_FILES = (
    optimizers,
    steps,
    manual,
    schedulers,
    callbacks,
    modules,
    precision,
    loaders,
    logged,
    loops,
)
THEMES = tuple(file.THEME for file in _FILES)

CASES: dict[str, Case] = {case.id: case for theme in THEMES for case in theme.cases.values()}
