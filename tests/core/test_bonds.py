"""A process ends with the one that it works for, also where it is nobody's child."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

OWNER = """
import multiprocessing, os, sys, time
from hybridtrain.worlds.bonds import die_with_parent

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


def ended(pid: int, limit_s: float) -> bool:
    """A zombie has: nobody may be there to ask what became of it."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    return False


def pid_after_kill_9(folder: Path, method: str) -> int:
    """Of a process whose owner has just been killed."""
    script = folder / "owner.py"
    script.write_text(OWNER)
    line = [sys.executable, str(script), method]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert not ended(pid, 0.3)
        owner.kill()
    return pid


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_it_ends_with_its_owner(tmp_path: Path, method: str) -> None:
    assert ended(pid_after_kill_9(tmp_path, method), 10.0)
