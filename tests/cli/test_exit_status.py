"""Whatever a command raises, it comes to a status and a line for its summary."""

from __future__ import annotations

import pytest

from hybridtrain.cli.exit_status import FAILED, guarded
from hybridtrain.engine.worlds.worker_exit import WorkerDied
from hybridtrain.hosts.relay import ServerLost


@pytest.mark.parametrize(
    "error",
    [ValueError("a"), GeneratorExit("a"), BaseExceptionGroup("a", [KeyboardInterrupt()])],
    ids=lambda error: type(error).__name__,
)
def test_any_exception_becomes_a_failed_exit_status_with_its_text(error: BaseException) -> None:
    def action() -> None:
        raise error

    outcome = guarded(action, [])  # type: ignore[arg-type]
    assert outcome.exit == FAILED
    assert outcome.error is not None and outcome.error.startswith(f"{type(error).__name__}: a")


@pytest.mark.parametrize("error", [WorkerDied("it is lost"), ServerLost("it is lost")])
def test_the_loss_of_a_worker_or_of_the_server_is_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    def action() -> None:
        raise error

    outcome = guarded(action, [])  # type: ignore[arg-type]
    assert (outcome.exit, outcome.error) == (FAILED, "it is lost")
    assert capsys.readouterr().err == "hybridtrain: it is lost\n"
