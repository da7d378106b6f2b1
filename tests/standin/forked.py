"""A test in a process of its own: whatever it initialises ends with it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import torch._subclasses.fake_tensor  # noqa: F401  (what ``Module.to`` imports: not in each child)


def in_a_fork(body: Callable[[], object]) -> None:
    """Raises AssertionError with what the child has to say if ``body`` raises there, or it dies."""
    __tracebackhide__ = True
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _be_the_child(body, writer)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status or said:
        raise AssertionError(said or f"the test's process ended with status {status}")


def _be_the_child(body: Callable[[], object], writer: int) -> None:
    code = 1
    try:
        body()
        code = 0
    except BaseException:
        os.write(writer, traceback.format_exc().encode()[:60_000])
    finally:
        os._exit(code)
