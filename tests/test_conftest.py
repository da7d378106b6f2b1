"""What every test starts from holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.conftest import CAME_BACK, pytest_runtest_call


@pytest.mark.parametrize("raises", [False, True])
def test_a_forked_child_does_not_come_back_into_pytest(
    raises: bool, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    if (pid := called(request.node, raises)) == 0:
        os._exit(1)  # the child came back
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == CAME_BACK
    assert ("ValueError: in the child" in capfd.readouterr().err) == raises


def called(item: pytest.Item, raises: bool) -> int:
    """Fork as the body of a test does, inside the hook: the child returns, or raises."""

    @contextmanager
    def hook() -> Iterator[None]:
        yield from pytest_runtest_call(item)

    with hook():
        if (pid := os.fork()) == 0 and raises:
            raise ValueError("in the child")
    return pid
