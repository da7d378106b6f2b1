"""A disk that is really full: a small one of our own, where the system lets us make it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridtrain.util.files import fault_of
from tests.cli.conftest import summary
from tests.cli.tiny import TINY

UNSHARE = ["unshare", "--mount", "--map-root-user"]
SCRIPT = """
mount -t tmpfs -o size=400k tmpfs disk
"$@"
status=$?
cp -r disk/run copy
exit $status
"""


@pytest.mark.slow
def test_a_full_disk_ends_no_run_and_the_exit_status_tells(tmp_path: Path) -> None:
    Path("disk").mkdir()
    probe = [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "disk"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("no disk of our own may be made here")
    options = [
        "trainer.devices=2",
        "trainer.max_epochs=40",
        "logger=both",
        "hydra.run.dir=disk/run",
    ]
    options += [
        "trainer.log_every_n_steps=1",
        "callbacks.checkpoint.save_top_k=-1",
        "model.width=8",
    ]
    command = [sys.executable, "-m", "hybridtrain", *TINY, "callbacks.checkpoint.monitor=null"]
    done = subprocess.run(
        [*UNSHARE, "bash", "-c", SCRIPT, "-", *command, *options],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "could not be written (No space left on device); training goes on" in done.stderr
    assert "not saved" in done.stdout and "test/n" in done.stdout, done.stderr[-3000:]
    assert "epoch 40/40" in done.stdout
    kept = list(Path("copy/checkpoints").iterdir())
    assert len(kept) > 1 and all(fault_of(path) is None for path in kept)
    if Path("copy/summary.json").is_file():  # there may have been no room for it
        assert summary("copy")["unsaved"]
