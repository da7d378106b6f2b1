"""Whatever a command raises, it comes to a status and a line for its summary."""

from __future__ import annotations

import pytest

from hybridtrain.cli.exit_status import FAILED, guarded


@pytest.mark.parametrize(
    "error",
    [ValueError("a"), GeneratorExit("a"), BaseExceptionGroup("a", [KeyboardInterrupt()])],
    ids=lambda error: type(error).__name__,
)
def test_whatever_is_raised_is_an_outcome(error: BaseException) -> None:
    def action() -> None:
        raise error

    outcome = guarded(action, [])  # type: ignore[arg-type]
    assert outcome.exit == FAILED
    assert outcome.error is not None and outcome.error.startswith(f"{type(error).__name__}: a")
