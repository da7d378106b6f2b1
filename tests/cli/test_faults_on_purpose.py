"""``faults=[...]`` on the command line."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Command, summary
from tests.cli.tiny import TINY
from tests.picking import by_default

HERE = [*TINY, "task=own", "trainer.devices=2", "hydra.run.dir=here", "test=false"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("faults", "complaint"),
    by_default(
        [
            ("[{worker:1,step:2,kind:kil}]", "did you mean kill?"),
            ("[{worker:1,step:2,kind:kill,phase:pul}]", "did you mean pull?"),
            ("[{worker:2,step:2,kind:kill}]", "there is no worker 2; there are 0 to 1"),
            ("[{worker:1,kind:kill}]", "without a step or a rate"),
            ("{worker:1,step:2,kind:kill}", "must be a list"),
            ("kill", "must be a list"),
        ],
        ("[{worker:1,step:2,kind:kil}]", "did you mean kill?"),
        ("[{worker:2,step:2,kind:kill}]", "there is no worker 2; there are 0 to 1"),
        ("kill", "must be a list"),
    ),
)
def test_bad_faults_are_one_line_before_anything_starts(
    command: Command, faults: str, complaint: str
) -> None:
    result = command(*HERE, f"faults={faults}")
    assert result.code == 2 and complaint in result.complaint


def test_a_strategy_that_cannot_be_disturbed_says_so(command: Command) -> None:
    result = command(*HERE, "strategy=ddp", "faults=[{worker:1,step:2,kind:kill}]")
    assert result.code == 2 and "strategy=hybrid, async" in result.complaint


def test_a_worker_dies_when_the_command_says_so(command: Command) -> None:
    result = command(*HERE, "faults=[{worker:1,step:2,kind:kill}]")
    assert result.code == 1 and "worker 1" in result.err and "SIGKILL" in result.err
    assert summary("here")["exit"] == 1
