"""Standard streams that are closed, full, or read by nobody: training goes on, its end is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridtrain.cli.explain import explain
from hybridtrain.memory.arena import Arena
from tests.cli.conftest import summary
from tests.cli.tiny import TINY
from tests.picking import by_default

RUN = [sys.executable, "-m", "hybridtrain", *TINY, "trainer.devices=2", "hydra.run.dir=run"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


def shell(script: str) -> subprocess.CompletedProcess[str]:
    """``"$@"`` is the command."""
    line = ["bash", "-c", script, "-", *RUN]
    return subprocess.run(
        line, capture_output=True, text=True, env=ENVIRONMENT, timeout=100, check=False
    )


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "status", "line"),
    by_default(
        [
            ('"$@" >&- 2>&- <&-', 0, ""),
            ('"$@" >&-', 0, ""),
            ('"$@" 2>&-', 0, ""),
            ('"$@" <&-', 0, ""),
            ('"$@" 2>/dev/full', 0, ""),
            ('"$@" >/dev/full', 1, "the summary could not be printed (No space left on device)"),
            ('"$@" | head -1 >&2; exit ${PIPESTATUS[0]}', 141, ""),
        ],
        ('"$@" >&- 2>&- <&-', 0, ""),
    ),
)
def test_a_run_does_not_depend_on_who_listens(script: str, status: int, line: str) -> None:
    done = shell(script)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
    assert line in done.stderr and "Error executing job" not in done.stderr
    assert summary("run")["updates"] == 12 and list(Path("run/checkpoints").iterdir())


def test_closed_streams_take_nothing_that_is_opened_later(tmp_path: Path) -> None:
    code = (
        "from hybridtrain.util.arguments import hold_standard_streams as hold; hold()\n"
        f"file = open({str(tmp_path / 'x')!r}, 'w'); assert file.fileno() > 2\n"
        "print('said'); input if input else 0; import sys; print('said', file=sys.stderr)"
    )
    line = ["bash", "-c", '"$@" >&- 2>&- <&-', "-", sys.executable, "-c", code]
    assert subprocess.run(line, env=ENVIRONMENT, timeout=60, check=False).returncode == 0
    assert (tmp_path / "x").read_bytes() == b""


def test_a_working_directory_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hybridtrain.cli.entry import main

    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        assert main(["task=digits"]) == 2
    finally:
        os.chdir(tmp_path)
    assert "the working directory has been deleted" in capsys.readouterr().err


def test_a_disk_without_inodes_is_named_though_the_system_names_no_file() -> None:
    def run_job() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError) as error:
        run_job()
    line = explain(error.value, [])
    assert line is not None and "None" not in line and "(a file in it: No space left" in line


def test_a_limit_of_file_sizes_is_named_with_the_way_out() -> None:
    script = (
        "import resource\nfrom hybridtrain.memory.arena import Arena\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "try: Arena.create(1 << 17)\nexcept ValueError as error: print(error)"
    )
    line = [sys.executable, "-c", script]
    done = subprocess.run(line, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert done.stdout.startswith("0.1 MiB of shared host memory") and "ulimit -f" in done.stdout
    Arena.create(1 << 17)
