"""A process ends with the one that it works for, also where it is nobody's child."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.picking import by_default
from tests.support.ends import gone, wait_until

OWNER = """
import multiprocessing, os, sys, time
from hybridtrain.engine.worlds.parent_death import die_with_parent

def work(pipe):
    die_with_parent(None)
    pipe.send(os.getpid())
    time.sleep(1000)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs,))
    process.start()
    print(ours.recv(), flush=True)
    time.sleep(1000)
"""


def pid_after_kill_9(folder: Path, method: str) -> int:
    """Of a process whose owner has just been killed."""
    script = folder / "owner.py"
    script.write_text(OWNER)
    line = [sys.executable, str(script), method]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        time.sleep(0.3)
        assert not gone(pid)
        owner.kill()
    return pid


@pytest.mark.wide
@pytest.mark.parametrize("method", by_default(["fork", "spawn", "forkserver"], "fork"))
def test_a_process_ends_with_its_owner(tmp_path: Path, method: str) -> None:
    pid = pid_after_kill_9(tmp_path, method)
    wait_until(lambda: gone(pid))
