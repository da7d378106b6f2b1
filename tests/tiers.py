"""Which tests run by default: each property once, in five minutes of two cores.

What is left out is ``wide``. CI runs it, too: nothing that a test holds leaves CI.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

# Processes and whole commands: of each of these files the first test runs by default.
FILES_BY_THEIR_FIRST_TEST = (
    *("tests/cli/", "tests/foreign/", "tests/fuzzing/", "tests/packaging/", "tests/plan/"),
    *("tests/report/", "tests/simulate/", "tests/standin/", "tests/tasks/"),
    *("tests/lightning/devices/", "tests/lightning/hosts/", "tests/worlds/hosts/"),
)
# One property over strategies, workers, options: of each test the first case runs by default.
TESTS_BY_THEIR_FIRST_CASE = (
    *("tests/lightning/", "tests/parity/", "tests/recording/", "tests/training/"),
    *("tests/worker/", "tests/worlds/"),
)


def mark_wide(items: Iterable[pytest.Item]) -> None:
    """Mark all but these tests and cases ``wide``; slow tests and those for GPUs stay apart."""
    begun: set[str] = set()
    for item in items:
        if any(item.get_closest_marker(name) for name in ("slow", "gpu")):
            item.own_markers[:] = [each for each in item.own_markers if each.name != "wide"]
            continue
        if item.get_closest_marker("wide"):
            continue
        path, _, name = item.nodeid.partition("::")
        if path.startswith(FILES_BY_THEIR_FIRST_TEST):
            part = path
        elif path.startswith(TESTS_BY_THEIR_FIRST_CASE):
            part = f"{path}::{name.partition('[')[0]}"
        else:
            continue
        if part in begun:
            item.add_marker(pytest.mark.wide)
        begun.add(part)
