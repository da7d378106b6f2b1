"""``scripts/hosts.py``: its table on the loopback device, and bad input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/hosts.py"


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_two_hosts_on_the_loopback_device_are_a_table() -> None:
    given = ["links=loopback", "ways=ddp,hybrid", "seconds=0.1", "repeats=1"]
    done = ran("hosts=2x1", "models=mlp-100k", *given)
    assert done.returncode == 0, done.stderr
    ddp, hybrid = ([x.strip() for x in row.split("|")] for row in done.stdout.splitlines()[2:])
    assert (ddp[4], ddp[6], hybrid[4]) == ("ddp", "1.00", "hybrid")
    # 100,000 parameters of 4 bytes, up and down: all hosts send over the one device.
    assert 0.6 < float(hybrid[7].split(",")[0]) < 1.2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param("links=fast", "links=fast was given; give free, loopback", id="link"),
        pytest.param("hosts=2", "hosts=2 was given; give 2x1", id="hosts", marks=pytest.mark.slow),
        pytest.param("models=mlp", "models=mlp was given", id="model", marks=pytest.mark.slow),
    ],
)
def test_bad_input_is_one_line_before_anything_is_started(given: str, said: str) -> None:
    done = ran(given)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert said in line
