"""A process that has everything imported and forks whole command lines, so that each costs little.

It is the subreaper of what it forks: whatever a run leaves behind, however well hidden, becomes its
child. ``Zygote`` is the side of the tests; ``main`` what runs in the process.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from omegaconf import OmegaConf

from tests.cli.composing import get_mode, load_once, parse_all

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")
_PR_SET_CHILD_SUBREAPER = 36


class Zygote:
    """Forks command lines."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.zygote"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.busy = False
        self._temporary: list[str] = []

    def start(self, folder: Path, *arguments: str) -> Run:
        """The command line, run in ``folder``, with a directory of its own for temporary files."""
        shared = {path.name for path in SHARED_MEMORY.iterdir()}
        request = {"arguments": arguments, "folder": str(folder.absolute())}
        temporary = tempfile.mkdtemp()  # a short name, as sockets' paths have a limit
        self._temporary.append(temporary)
        pid = self.ask(request | {"temporary": temporary})
        return Run(self, pid, folder, temporary, shared)

    def ask(self, request: dict[str, Any]) -> int:
        """One request, one number."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        self.busy = True  # and stays so if this test is cut off meanwhile
        answer = int(self._process.stdout.readline())
        self.busy = False
        return answer

    def descendants(self) -> list[int]:
        """All processes that came of it and live."""
        parents = _parents()
        found = [self._process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found[1:]

    def clear(self) -> None:
        """End whatever is left of its runs, and what they start meanwhile; remove their files.

        The shells that would have removed these end as well.
        """
        while found := self.descendants():
            for pid in found:
                _kill(pid)
            time.sleep(0.01)
        while self._temporary:
            shutil.rmtree(self._temporary.pop(), ignore_errors=True)

    def close(self) -> None:
        """End it, and whatever is left of its runs."""
        self.clear()
        _kill(self._process.pid)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


class Run:
    """One command line that runs."""

    def __init__(
        self, zygote: Zygote, pid: int, folder: Path, temporary: str, shared: set[str]
    ) -> None:
        self.pid, self.folder, self.temporary = pid, folder, temporary
        self._zygote, self._shared = zygote, shared

    def until(self, path: str) -> None:
        """Wait for a file below its folder."""
        wait_for((self.folder / path).exists, lambda: f"no {path}:\n{self.said()}")

    def said(self) -> str:
        """What it has printed."""
        return (self.folder / "said.txt").read_text()

    def processes(self) -> list[int]:
        """It and all that came of it."""
        return self._zygote.descendants()

    def workers(self) -> list[int]:
        """In the order of their start; not the shell that tidies up, nor Python's helpers."""
        parents, helpers = _parents(), ("resource_tracker", "forkserver")
        children = sorted(pid for pid, parent in parents.items() if parent == self.pid)
        mine = [pid for pid in children if _session(pid) == self.pid]
        server = next((pid for pid in mine if helpers[1] in _command(pid)), None)
        if server is not None:
            return sorted(pid for pid, parent in parents.items() if parent == server)
        return [pid for pid in mine if not any(name in _command(pid) for name in helpers)]

    def kill_all(self) -> None:
        """As ``kill -9`` to its session does it."""
        for pid in [p for p in self.processes() if _session(p) == self.pid]:
            _kill(pid)

    def status(self) -> int:
        """Wait for its end; negative after a signal."""
        return self._zygote.ask({"wait": self.pid})

    def left(self, limit_s: float = 5.0) -> list[str]:
        """What is there after its end, and stays: processes, temporary files, shared memory."""
        deadline = time.monotonic() + limit_s
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def _left(self) -> list[str]:
        processes = [f"process {pid} {_command(pid)}" for pid in self.processes()]
        walk = os.walk(self.temporary)  # which passes over what goes away meanwhile
        files = [str(Path(folder, name)) for folder, one, two in walk for name in (*one, *two)]
        from trials.apart import unheld  # which the process that forks cannot find, and need not

        segments = unheld(self._shared)
        return [*processes, *files, *segments]


def wait_for(
    condition: Callable[[], bool], what: Callable[[], str], limit_s: float = 150.0
) -> None:
    """Look until it is so."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def _parents() -> dict[int, int]:
    """The parent of each process that lives; zombies do not."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if state not in "ZX":
            found[int(path.parent.name)] = int(parent)
    return found


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    except OSError:
        return ""


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# ---- the process ---------------------------------------------------------------------------------


def main() -> int:
    """Fork what is asked for on standard input."""
    gc.disable()  # what is imported stays, and need not be looked through
    import hybridtrain.cli.run  # noqa: F401
    from hybridtrain.cli.entry import main as command

    if len(sys.argv) == 1:
        _be_quick()
    gc.freeze()
    gc.enable()
    if len(sys.argv) > 1:  # a rank of ddp, started by a run as "this command"
        return command()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
        elif (pid := os.fork()) == 0:
            _settle(Path(request["folder"]), request["temporary"])
            sys.argv = [sys.argv[0], *request["arguments"]]
            _leave(command(request["arguments"]))
        else:
            print(pid, flush=True)
    return 0


def _be_quick() -> None:
    """Do in advance what each command would do again."""
    from hybridtrain.cli import hydra_config
    from tests.support.warm_up import warm_up

    OmegaConf.load, Hydra.get_mode = load_once, get_mode
    parse_all(hydra_config.conf_dir())
    warm_up()


def _settle(folder: Path, temporary: str) -> None:
    """As a command that was started by itself."""
    os.setsid()
    os.chdir(folder)
    os.environ["TMPDIR"] = temporary
    tempfile.tempdir = None
    nothing = os.open(os.devnull, os.O_RDONLY)
    said = os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for ours, theirs in ((nothing, 0), (said, 1), (said, 2)):
        os.dup2(ours, theirs)
    os.close(nothing)
    os.close(said)


def _leave(status: int) -> None:
    """What the end of a process does, but for tearing down modules, which takes a fork seconds."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
